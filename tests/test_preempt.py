"A signal asks a training to stop: on one rank or all, under every launcher, in a head, in a notebook, beside data workers"
import os,pytest,re,signal,sys,time
from functools import partial
from fastcore.test import test_eq
from fastai.basics import *
from fastdist import *
from fastdist.comm.steps import SteppingConnection
from fastdist.state.preempt import StopSignals
from procs import *
import procs

script = here/'stopping.py'

def mark(f): return pytest.mark.launcher(pytest.mark.timeout(120)(f))

@pytest.fixture
def start(tmp_path):
    "Starts a command with `tmp_path` for an argument, by which all of its processes are known; none of them is left"
    yield partial(procs.start, err=subprocess.PIPE)
    for pid in processes(tmp_path): os.kill(pid, signal.SIGKILL)

def trains(path, p, n):
    "The processes that train, in the order of their ranks, once all do"
    def all_there(): return p.poll() is not None or len(list(path.glob('*.*')))>=n
    await_that(all_there, 60)
    assert p.poll() is None, p.communicate()
    return [int(f.suffix[1:]) for f in sorted(path.glob('*.*'))]

def stopped(p, tmp_path, rc, secs=15):
    "What `p` says; it ends with `rc`, soon, and leaves nothing"
    out,err = p.communicate(timeout=secs)
    assert p.returncode==rc, (p.returncode,out[-1000:],err[-3000:])
    assert not processes(tmp_path)
    return err

@pytest.mark.parametrize('sig,rc', [('SIGTERM',143), ('SIGUSR1',138)])
def test_a_plain_script(warm, tmp_path, sig, rc):
    _,err = warm(sys.executable, script, tmp_path, rc=rc, ASK=f'{sig}:0')
    test_eq([err.count(o) for o in (f'fastdist: {sig}: the training stops', 'Traceback')], [1,0])
    assert (tmp_path/'state0').exists()

@mark
def test_a_signal_to_all_processes_comes_to_workers_too(start, tmp_path):
    "As SLURM sends it"
    p = start(sys.executable, script, tmp_path)
    trains(tmp_path, p, 1)
    os.killpg(p.pid, signal.SIGUSR1)
    stopped(p, tmp_path, 138)

def states(path): return {f.read_text() for f in path.glob('state*')},len(list(path.glob('state*')))

def test_torchrun_starts_them_again(warm, tmp_path):
    out,err = warm(*torchrun('--max-restarts', 1, script, tmp_path), ASK='SIGTERM:1', timeout=60)
    assert out.count('it is done')==2 and err.count('fastdist: rank 1: SIGTERM')==1 and 'rank 0: SIGTERM' not in err and 'RankError' not in err
    test_eq([len(states(tmp_path)[0]),states(tmp_path)[1]], [1,2])

@pytest.mark.parametrize('ranks', ('0','2','0,1,2'))
def test_torchrun_without_restarts(warm, tmp_path, ranks):
    _,err = warm(*torchrun(script, tmp_path, n=3), rc=1, ASK=f'SIGUSR1:{ranks}', timeout=60)
    assert re.search(r'exitcode +: 138', err) and 'RankError' not in err and 'ends because' not in err
    test_eq([len(states(tmp_path)[0]),states(tmp_path)[1]], [1,3])

@mark
def test_torchrun_is_asked_to_stop(start, tmp_path):
    "It passes the signal on, and `timeout` and SLURM send it to the ranks besides"
    p = start(*torchrun(script, tmp_path))
    pids = trains(tmp_path, p, 2)
    for pid in (p.pid,*pids): os.kill(pid, signal.SIGTERM)
    stopped(p, tmp_path, 1, 40)
    test_eq(len(list(tmp_path.glob('state*'))), 2)

@mark
@pytest.mark.parametrize('sig,rc', [(signal.SIGTERM,143), (signal.SIGUSR1,138)])
def test_a_head(start, tmp_path, sig, rc):
    p = start(sys.executable, script, tmp_path, 'head')
    trains(tmp_path, p, 2)
    os.kill(p.pid, sig)
    err = stopped(p, tmp_path, rc)
    assert 'Traceback' not in err and 'failed' not in err and len(list(tmp_path.glob('state*')))==2

@mark
def test_a_head_whose_rank_was_asked(start, tmp_path):
    p = start(sys.executable, script, tmp_path, 'head')
    os.kill(trains(tmp_path, p, 2)[1], signal.SIGTERM)
    err = stopped(p, tmp_path, 143)
    assert 'Traceback' not in err and 'failed' not in err

@mark
def test_a_head_without_a_checkpoint_ends_as_before(start, tmp_path):
    p = start(sys.executable, script, tmp_path, 'head', 'quiet')
    trains(tmp_path, p, 2)
    os.kill(p.pid, signal.SIGTERM)
    stopped(p, tmp_path, -signal.SIGTERM, 10)

@mark
def test_notebook_launcher(start, tmp_path):
    p = start(sys.executable, script, tmp_path, 'notebook', free_port())
    trains(tmp_path, p, 2)
    os.kill(p.pid, signal.SIGTERM)
    stopped(p, tmp_path, 1, 20)
    test_eq(len(list(tmp_path.glob('state*'))), 2)
