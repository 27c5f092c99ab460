"Who connects to the ports of a job and is no rank; addresses of rank 0; and a thread of a job that fails"
import contextlib,ctypes,signal,socket,subprocess,sys,threading,time
from dataclasses import replace
import pytest
from fastai.basics import *
from fastdist import *
from fastdist.comm.job import Job,current_job
from fastdist.launch.group import sockets
from fastcore.test import test_eq
from learners import digits

sizes = pytest.mark.parametrize('size', [2,3])

# Unauthenticated clients

client = '''
import random,socket,sys,time
from pathlib import Path
ports,rng,kept = list(map(int, sys.argv[1:])),random.Random(1),[]

def come(port, data=b''):
    try:
        s = socket.create_connection(('127.0.0.1', port), timeout=5)
        s.sendall(data)
        return s
    except OSError: return None

texts = [b'123\\n', b'['*60_000+b'\\n', b'GET / HTTP/1.1\\r\\n\\r\\n', bytes(61), b'\\xff'*5000]+[rng.randbytes(rng.randrange(200)) for _ in range(50)]
for port in ports:
    for o in texts:
        s = come(port, o)
        if s: s.close()
    kept += [come(port) for _ in range(50)] # half open
Path('go').touch()
while True:
    for port in ports:
        s = come(port, rng.choice(texts))
        if s: kept[:] = [*kept[-200:], s]
    time.sleep(.002)
'''

def listening():
    "Ports at which this process listens, those of the job's store and of this rank among them"
    res = []
    for fd in sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as s:
            if s.family!=socket.AF_UNIX and s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN): res.append(s.getsockname())
    return res

def weights(learn): return [p.tolist() for p in learn.model.parameters()]

def trains(rank, crowded=False):
    "Fit, rank 0 amid clients that are no ranks; weights, hosts at which it listened, descriptors that are left over"
    with Job(this_world()).open(): pass # torch's store keeps a pipe from the first one on
    set_seed(1)
    learn,before,procs = digits(path='.'),len(os.listdir('/dev/fd')),[]
    try:
        with learn.no_bar(), learn.no_logging(), learn.distrib_ctx():
            job = current_job()
            ports = job.store.port,job.watchdog.presence.address[1]
            if crowded and rank==0: procs.append(subprocess.Popen([sys.executable, '-c', client, *map(str, ports)]))
            while crowded and not Path('go').exists(): time.sleep(.01)
            hosts = {o[0] for o in listening() if o[1] in ports}
            learn.fit(6, 0.01)
    finally:
        for o in procs: o.kill() or o.wait()
    return weights(learn),hosts,len(os.listdir('/dev/fd'))-before

@sizes
def test_others_who_connect_change_nothing(size):
    quiet,amid = [on_ranks(partial(trains, crowded=o), size, join=False, timeout=100) for o in (False,True)]
    for a,b in zip(quiet, amid): test_eq((b[0],b[1:]), (a[0],({'127.0.0.1'},0)))

def across_nodes(rank, addr):
    with Job(replace(this_world(), num_nodes=2, master_addr=addr)).open(20) as job: return job.agree('a vote', rank)

@pytest.mark.parametrize('addr', ['127.0.0.7','localhost','::1','192.0.2.1'])
def test_master_addresses(addr):
    "The last is of no interface here, as behind NAT: then rank 0 listens on all of them, where others reach it by a name of their own"
    def f(rank):
        if addr=='192.0.2.1' and rank: socket.create_connection = partial(elsewhere, socket.create_connection)
        return across_nodes(rank, addr)
    test_eq(on_ranks(f, join=False), [1,1])

def elsewhere(connect, at, **kw):
    "The router, which passes on to rank 0"
    return connect(('127.0.0.1', at[1]), **kw)

def error_of(rank, cb, secs=60):
    "The error that a fit with `cb` ends in"
    learn,start = digits(path='.', cbs=cb),time.monotonic()
    try:
        with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(): learn.fit(200, 0.01)
    except Exception as e: return getattr(e, 'rank', None),str(e),time.monotonic()-start<secs

# The thread fails

class Misplaced(Callback):
    "On rank `bad` the watchdog fails, and the main thread does not move"
    def __init__(self, bad): self.bad = bad
    def before_batch(self):
        if this_world().rank==self.bad and (self.epoch,self.iter)==(1,3):
            current_job().progress.where = lambda: 1/0
            time.sleep(100)

@pytest.mark.parametrize('bad', [0,1])
@pytest.mark.by_default('1')
def test_a_thread_that_fails_is_an_error_on_all(bad, capfd):
    res = on_ranks(partial(error_of, cb=Misplaced(bad)), 3, join=False, timeout=120)
    for o in res: assert o[0]==bad and 'its control thread failed' in o[1] and 'ZeroDivisionError' in o[1] and o[2], o
    assert f'fastdist: rank {bad}: its control thread failed' in capfd.readouterr().err

# SIGURG

class Raises(Callback):
    "A signal in each batch, from somebody else"
    def before_batch(self): signal.raise_signal(signal.SIGURG)

def handled(rank, handler):
    "How many signals a fit of three batches passes on, and who handles them after it"
    heard,learn = [],digits(n=60, bs=8, path='.', cbs=Raises())
    handler = (lambda *_: heard.append(1)) if handler=='mine' else handler
    signal.signal(signal.SIGURG, handler)
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(): learn.fit(1)
    return len(heard),signal.getsignal(signal.SIGURG)==handler

def test_a_users_handler_goes_on():
    test_eq(on_ranks(partial(handled, handler='mine'), join=False), [(4,True)]*2)
    for o in (signal.SIG_IGN, signal.SIG_DFL): test_eq(on_ranks(partial(handled, handler=o), join=False), [(0,True)]*2)

def test_a_handler_that_calls_the_one_it_found():
    def f(rank):
        heard,learn = [],digits(n=60, bs=8, path='.', cbs=Raises())
        def install(name):
            old = signal.getsignal(signal.SIGURG)
            signal.signal(signal.SIGURG, lambda *a: heard.append(name) or callable(old) and old(*a))
        install('a')
        with learn.no_bar(), learn.no_logging(), learn.distrib_ctx():
            install('b')
            learn.fit(1)
            install('c')
        signal.raise_signal(signal.SIGURG)
        return heard
    for o in on_ranks(f, join=False): test_eq(o, ['b','a']*4+['c','b','a'])

def test_an_error_comes_in_spite_of_a_users_handler():
    def f(rank):
        learn = digits(n=60, bs=8, path='.', cbs=Fails())
        with learn.distrib_ctx():
            signal.signal(signal.SIGURG, lambda *_: None)
            try:
                with learn.no_bar(), learn.no_logging(): learn.fit(1)
            except Exception as e: return type(e).__name__
    test_eq(on_ranks(f, join=False, timeout=100), ['RankError','ZeroDivisionError'])

def test_a_fit_in_another_thread():
    "Only the main thread may install handlers"
    def f(rank):
        learn,done = digits(n=60, bs=8, path='.'),[]
        with learn.no_bar(), learn.no_logging(), learn.distrib_ctx():
            t = threading.Thread(target=lambda: learn.fit(1) or done.append(1))
            t.start()
            t.join()
        return done
    test_eq(on_ranks(f, join=False), [[1],[1]])

class Fails(Callback):
    def before_batch(self): 1/0 if this_world().rank else time.sleep(30)

def test_a_handler_in_c_comes_back():
    "Libraries install one behind Python's back"
    count = ctypes.c_int(0)
    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def handler(_): count.value += 1
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = ctypes.c_int,ctypes.c_void_p
    def f(rank):
        libc.signal(signal.SIGURG, ctypes.cast(handler, ctypes.c_void_p))
        learn = digits(n=60, bs=8, path='.')
        with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(): learn.fit(1)
        os.kill(os.getpid(), signal.SIGURG)
        return count.value
    test_eq(on_ranks(f, join=False), [1,1])
