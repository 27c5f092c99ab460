"A signal asks a training to stop: on one rank or all, under every launcher, in a head, in a notebook, beside data workers"
import os,pytest,re,signal,sys
from functools import partial
from fastcore.test import test_eq
from fastai.basics import *
from fastdist import *
from fastdist.state.checkpoint import StopSignals
from jupyter_client import KernelManager
from procs import *
import procs

script = here/'stopping.py'

def mark(f): return pytest.mark.launcher(pytest.mark.timeout(300)(f))

@pytest.fixture
def start(tmp_path):
    "Starts a command with `tmp_path` for an argument, by which all of its processes are known; none of them is left"
    yield partial(procs.start, err=subprocess.PIPE)
    for pid in processes(tmp_path): os.kill(pid, signal.SIGKILL)

def trains(path, p, n):
    "The processes that train, in the order of their ranks, once all do"
    def all_there(): return p.poll() is not None or len(list(path.glob('*.*')))>=n
    await_that(all_there)
    assert p.poll() is None, p.communicate()
    return [int(f.suffix[1:]) for f in sorted(path.glob('*.*'))]

@pytest.fixture
def start_warm(warm):
    "The same in a fork of a process that has torch and fastai"
    jobs = []
    def start(*cmd):
        jobs.append(warm.start(*cmd))
        return jobs[-1]
    yield start
    for o in jobs: o.end()

def stopped(p, tmp_path, rc, secs=60):
    "What `p` says; it ends with `rc`, soon, and leaves nothing"
    out,err = p.communicate(timeout=secs)
    assert p.returncode==rc, (p.returncode,out[-1000:],err[-3000:])
    assert not processes(tmp_path)
    return err

@pytest.mark.parametrize('sig,rc', [('SIGTERM',143), ('SIGUSR1',138)])
@pytest.mark.by_default('SIGUSR1')
def test_a_plain_script(warm, tmp_path, sig, rc):
    _,err = warm(sys.executable, script, tmp_path, rc=rc, ASK=f'{sig}:0')
    test_eq([err.count(o) for o in (f'fastdist: {sig}: the training stops', 'Traceback')], [1,0])
    assert (tmp_path/'state0').exists()

@mark
@pytest.mark.parametrize('sig,rc', [(signal.SIGTERM,143), (signal.SIGUSR1,138)])
def test_a_signal_to_all_processes_comes_to_workers_too(start_warm, tmp_path, sig, rc):
    "As SLURM sends it"
    p = start_warm(sys.executable, script, tmp_path)
    trains(tmp_path, p, 1)
    os.killpg(p.pid, sig)
    stopped(p, tmp_path, rc)

def states(path): return {f.read_text() for f in path.glob('state*')},len(list(path.glob('state*')))

def test_torchrun_starts_them_again(warm, tmp_path):
    out,err = warm(*torchrun('--max-restarts', 1, script, tmp_path), ASK='SIGTERM:1', timeout=60)
    assert out.count('it is done')==2 and err.count('fastdist: rank 1: SIGTERM')==1 and 'rank 0: SIGTERM' not in err and 'RankError' not in err
    test_eq([len(states(tmp_path)[0]),states(tmp_path)[1]], [1,2])

@pytest.mark.whole
@pytest.mark.parametrize('ranks', ('0','2','0,1,2'))
def test_torchrun_without_restarts(warm, tmp_path, ranks):
    _,err = warm(*torchrun(script, tmp_path, n=3), rc=1, ASK=f'SIGUSR1:{ranks}', timeout=60)
    assert re.search(r'exitcode +: 138', err) and 'RankError' not in err and 'ends because' not in err
    test_eq([len(states(tmp_path)[0]),states(tmp_path)[1]], [1,3])

@pytest.mark.whole
@mark
def test_torchrun_is_asked_to_stop(start_warm, tmp_path):
    "It passes the signal on, and `timeout` and SLURM send it to the ranks besides"
    p = start_warm(*torchrun(script, tmp_path))
    pids = trains(tmp_path, p, 2)
    for pid in (p.pid,*pids): os.kill(pid, signal.SIGTERM)
    err = stopped(p, tmp_path, 1)
    assert states(tmp_path)[1]==2, err

@pytest.mark.whole
@mark
def test_a_head_with_new_processes(start, tmp_path):
    p = start(sys.executable, script, tmp_path, 'head')
    trains(tmp_path, p, 2)
    os.kill(p.pid, signal.SIGTERM)
    err = stopped(p, tmp_path, 143)
    assert 'Traceback' not in err and 'failed' not in err and states(tmp_path)[1]==2

@pytest.mark.parametrize('ask,rc', [('SIGTERM:head',143), ('SIGUSR1:head',138), ('SIGTERM:1',143), ('SIGUSR1:0',138)])
@pytest.mark.by_default('SIGTERM:1')
def test_a_head(warm, tmp_path, ask, rc):
    _,err = warm(sys.executable, script, tmp_path, 'head', 'fork', rc=rc, ASK=ask)
    assert 'Traceback' not in err and 'failed' not in err and states(tmp_path)[1]==2

@pytest.mark.whole
def test_a_head_without_a_checkpoint_ends_as_before(warm, tmp_path):
    warm(sys.executable, script, tmp_path, 'head', 'fork', 'quiet', rc=-signal.SIGTERM, ASK='SIGTERM:head')

@mark
def test_notebook_launcher(start_warm, tmp_path):
    p = start_warm(sys.executable, script, tmp_path, 'notebook', free_port())
    trains(tmp_path, p, 2)
    os.kill(p.pid, signal.SIGTERM)
    stopped(p, tmp_path, 1)
    assert states(tmp_path)[1]==2, err

# Data workers

class Handlers:
    "Each sample is what a worker's process does with the two signals"
    def __len__(self): return 8
    def __getitem__(self, i): return [int(signal.getsignal(s) is not None and callable(signal.getsignal(s))) for s in (signal.SIGTERM,signal.SIGUSR1)]

def ends_of_workers(persistent):
    "What is seen of a loader's workers inside the context, and how they end by what torch ends them with"
    with StopSignals() as stops:
        dl = torch.utils.data.DataLoader(Handlers(), batch_size=4, num_workers=2, persistent_workers=persistent)
        it = iter(dl)
        seen = [o for b in it for o in torch.stack(b).flatten().tolist()]
        if persistent:
            for o in it._workers: o.terminate()
            for o in it._workers: o.join(5)
        return seen,[o.exitcode for o in it._workers] if persistent else [],stops.asked

@pytest.mark.parametrize('persistent', (False,True))
def test_data_workers_do_not_inherit_the_handler(persistent):
    def run(rank):
        for o in (signal.SIGCHLD,signal.SIGTERM,signal.SIGUSR1): signal.signal(o, signal.SIG_DFL) # whatever tests before this one have left
        return ends_of_workers(persistent)
    test_eq(on_ranks(run, 1, join=False), [([0]*16,[0,0] if persistent else [],None)])

def child(rank, sig):
    "How a process ends that is forked in the context and gets `sig` from its first moment on"
    with StopSignals() as stops:
        codes = []
        for _ in range(50):
            pid = os.fork()
            if not pid:
                signal.alarm(2)
                while True: signal.pause()
            os.kill(pid, sig)
            if sig==signal.SIGUSR1: os.kill(pid, signal.SIGKILL) # or it would live on
            codes.append(-os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        return set(codes),stops.asked

@pytest.mark.parametrize('sig,by', [(signal.SIGTERM,signal.SIGTERM), (signal.SIGUSR1,signal.SIGKILL)])
@pytest.mark.by_default('15-15')
def test_no_signal_is_lost_on_the_way_into_a_child(sig, by): test_eq(on_ranks(partial(child, sig=sig), 1, join=False), [({by},None)])

# What a process does with more than one

def again(rank):
    with StopSignals() as stops:
        for o in (signal.SIGTERM,signal.SIGUSR1,signal.SIGTERM): signal.raise_signal(o)
        return stops.agree()

def test_a_launcher_may_send_a_signal_again(): test_eq(on_ranks(again, 1, join=False), [signal.SIGTERM])

def kept(rank):
    "Ignored signals stay ignored, handlers that were there come back, and what others install inside stays"
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, own := lambda *_: None)
    with StopSignals(): seen = signal.getsignal(signal.SIGUSR1)
    res = seen==signal.SIG_IGN and signal.getsignal(signal.SIGTERM) is own
    with StopSignals(): signal.signal(signal.SIGTERM, later := lambda *_: None)
    return res and signal.getsignal(signal.SIGTERM) is later

def test_handlers_come_back(): test_eq(on_ranks(kept, 1, join=False), [True])

# Notebooks

cell = "import sys; sys.path.append({!r}); import stopping, os; os.environ['ASK'] = {!r}; stopping.train({!r})"

@pytest.mark.whole
@mark
def test_a_kernel_lives_on_after_sigusr1(tmp_path):
    _,last = cells = executed(cell.format(str(here), 'SIGUSR1:0', str(tmp_path))+'\n# %%\nprint("alive")', tmp_path, raises=(0,))
    said = '\n'.join([o.get('text', '') or '\n'.join(o.get('traceback', '')) for o in cells[0].outputs])
    assert 'alive' in shown(last) and said.count('the training has stopped for SIGUSR1')==1 and 'Traceback' not in said, said
    assert (tmp_path/'state0').exists()

@pytest.mark.whole
@mark
@pytest.mark.parametrize('how', ('SIGTERM','shutdown'))
def test_a_kernel_ends_when_it_is_asked_to(tmp_path, how):
    km = KernelManager(kernel_name='python3')
    km.start_kernel(cwd=str(tmp_path))
    try:
        kc = km.client()
        kc.start_channels()
        kc.wait_for_ready(60)
        kc.execute(cell.format(str(here), 'SIGTERM:0' if how=='SIGTERM' else '', str(tmp_path)))
        await_that(lambda: list(tmp_path.glob('0.*')))
        if how=='shutdown': km.shutdown_kernel()
        await_that(lambda: not km.is_alive())
        assert how=='shutdown' or (tmp_path/'state0').exists() # before a shutdown Jupyter interrupts the cell
    finally: km.shutdown_kernel(now=True)
