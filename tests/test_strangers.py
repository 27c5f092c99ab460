"Who knocks at the port of rank 0 and is no rank; a rank that does not speak as one should; and a control thread that fails"
import contextlib,ctypes,random,signal,socket,subprocess,sys,threading,time
from dataclasses import replace
import pytest
from fastai.basics import *
from fastdist import *
from fastdist.comm.control import control_connection
from fastdist.comm.vote import voting_connection
from fastdist.comm.wire import Listener,_head,_magic,_proof
from fastdist.job.group import sockets
from fastcore.test import test_eq
from learners import digits

sizes = pytest.mark.parametrize('size', [2,3])

# At the door

stranger = '''
import random,socket,sys,time
from pathlib import Path
port,rng,kept = int(sys.argv[1]),random.Random(1),[]

def come(data=b''):
    try:
        s = socket.create_connection(('127.0.0.1', port), timeout=5)
        s.sendall(data)
        return s
    except OSError: return None

lines = [b'123\\n', b'[1]\\n', '{"secret":"ä"}\\n'.encode(), b'['*60_000+b'\\n', b'GET / HTTP/1.1\\r\\n\\r\\n', b'fastdist'+bytes(53), bytes(61), bytes(60), b'fastdist']
for o in lines+[rng.randbytes(rng.randrange(200)) for _ in range(50)]:
    s = come(o)
    if s: s.close()
for o in [b'']*200+lines: kept.append(come(o)) # half open, for as long as they are let
slow = [come() for _ in range(5)]
Path('go').touch()
while True:
    for o in kept+slow:
        try: o and o.sendall(b'x'*(1 if o in slow else 1<<16))
        except OSError: pass
    s = come(b'[1]\\n')
    if s: kept[:] = [*kept[-100:], s]
    time.sleep(0.001)
'''

def listening():
    "Sockets of this process that listen"
    res = []
    for fd in sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as s:
            if s.family!=socket.AF_UNIX and s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN): res.append(s.getsockname())
    return res

def besiege(procs):
    "Send strangers to the first port that this process opens"
    while not listening(): time.sleep(0.01)
    procs.append(subprocess.Popen([sys.executable, '-c', stranger, str(listening()[0][1])]))
    procs[0].port = listening()[0][1]

def weights(learn): return [p.tolist() for p in learn.model.parameters()]

class Ports(Callback):
    "Notes what is open in a fit"
    def after_batch(self): self.open = [o[1] for o in listening()]

def trains(rank, strangers=False, procs=None):
    "Fit, rank 0 amid strangers, who came before the other ranks did; weights, CPU time of the fit, whether the port is still open, descriptors that are left over"
    set_seed(1)
    learn,before,procs = digits(path='.', cbs=Ports()),len(os.listdir('/dev/fd')),[]
    if strangers and rank==0: threading.Thread(target=besiege, args=(procs,), daemon=True).start()
    while strangers and rank and not Path('go').exists(): time.sleep(0.01)
    try:
        with learn.no_bar(), learn.no_logging(), learn.distrib_ctx():
            start = time.process_time()
            learn.fit(6, 0.01)
            took = time.process_time()-start
    finally:
        for o in procs: o.kill() or o.wait()
    return weights(learn),took,any(o.port in learn.ports.open for o in procs),len(os.listdir('/dev/fd'))-before

@sizes
def test_strangers_change_nothing(size):
    quiet,amid = [on_ranks(partial(trains, strangers=o), size, join=False) for o in (False,True)]
    for a,b in zip(quiet, amid):
        test_eq(b[0], a[0])
        test_eq(b[2:], (False,0))
        assert b[1]<3*a[1]+1, (a[1],b[1])

def greeting(nonce, secret, rank=1, kind=0, magic=_magic):
    head = _head.pack(magic, rank, kind, bytes(16))
    return head+_proof(secret, nonce, head)

def admitted(door, make):
    "Whom `door` lets in for what `make` answers to its nonce"
    with socket.create_connection(('127.0.0.1', door.port)) as s:
        res = door.poll()
        s.sendall(make(s.recv(32)))
        end = time.monotonic()+60
        while (door.pending or not door.known) and not res and time.monotonic()<end: res = door.poll()
        return [o[1:] for o in res]

def flipped(i, nonce, secret):
    msg = bytearray(greeting(nonce, secret))
    msg[i] ^= 1
    return bytes(msg)

def test_one_wrong_bit_is_enough():
    door = Listener(World(size=3), patience=0.2)
    ask = lambda f: admitted(door, f)
    secret,wrong = door.secret,[dict(rank=0), dict(rank=3), dict(rank=1<<31), dict(kind=2), dict(magic=b'fastdisT')]
    door.known.add((2,'news')) # of a rank that came before
    bad = [lambda n, i=i: flipped(i, n, secret) for i in range(61)]+[lambda n, o=o: greeting(n, secret, **o) for o in wrong]
    bad += [lambda n: greeting(n, b'guess'), lambda n: greeting(bytes(32), secret), lambda n: greeting(n, secret, 2, 1), lambda n: greeting(n, secret)[:60]]
    rng = random.Random(1)
    bad += [lambda n: rng.randbytes(61)]*100
    test_eq([ask(o) for o in bad], [[]]*len(bad))
    test_eq(ask(lambda n: greeting(n, secret)), [(1,'votes')])
    test_eq(len(door.pending), 0)
    door.close()

def across_nodes(rank, addr):
    with voting_connection(replace(this_world(), num_nodes=2, master_addr=addr)).open(20) as line: return line.votes.agree(rank)

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

# Ranks that do not speak as ranks

class Says(Callback):
    "Rank 1 sends `data` over its line in the second epoch, and then does not move"
    def __init__(self, data): self.data = data
    def before_batch(self):
        if this_world().rank!=1 or (self.epoch,self.iter)!=(1,3): return
        control_connection().lines[0].sock.sendall(self.data)
        time.sleep(100)

def error_of(rank, cb, secs=60):
    "The error that a fit with `cb` ends in"
    learn,start = digits(path='.', cbs=cb),time.monotonic()
    try:
        with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(): learn.fit(200, 0.01)
    except Exception as e: return getattr(e, 'rank', None),str(e),time.monotonic()-start<secs

@pytest.mark.parametrize('data', [b'['*60_000+b'\n', b'{"kind":"bye"}\n', b'x'*(2<<20)], ids=['deep','fields','endless'])
def test_what_a_rank_says_wrong_names_it(data):
    res = on_ranks(partial(error_of, cb=Says(data)), 3, join=False, timeout=120)
    for o in (res[0],res[2]): assert o[0]==1 and 'it sent' in o[1] and 'HINT' in o[1], o
    assert res[1] is not None

# The thread fails

class ClosesAll(Callback):
    "Rank `bad` closes a descriptor that is not its own, and then does not move"
    def __init__(self, bad): self.bad = bad
    def before_batch(self):
        if this_world().rank==self.bad and (self.epoch,self.iter)==(1,3):
            os.close(control_connection().sel.fileno())
            time.sleep(100)

@pytest.mark.parametrize('bad', [0,1])
def test_a_thread_that_fails_is_an_error_on_all(bad, capfd):
    res = on_ranks(partial(error_of, cb=ClosesAll(bad)), 3, join=False, timeout=120)
    for o in res: assert o[0]==bad and 'its control thread failed' in o[1] and 'Bad file descriptor' in o[1] and o[2], o
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
