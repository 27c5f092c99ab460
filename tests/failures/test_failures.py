"What a user sees when a rank fails, is killed, or Ctrl-C is pressed, under real launchers"
import os,re,signal,subprocess,sys,time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
import pytest
from procs import *
import procs

pytestmark = [pytest.mark.launcher, pytest.mark.timeout(180)]
script = here/'broken.py'
by_torchrun,by_accelerate = torchrun(script),accelerate('--multi_gpu', '--num_processes', 2, '--mixed_precision', 'no', script)

def notebook():
    code = 'import sys; sys.path.append({!r}); import broken; from accelerate import notebook_launcher; ' \
        'notebook_launcher(broken.train, (sys.argv[1], int(sys.argv[2])), num_processes=2, use_port={!r})'
    return sys.executable,'-c',code.format(str(here), str(free_port()))

@pytest.fixture
def start(tmp_path):
    "Starts a command with `tmp_path` for an argument, by which all of its processes are known; none of them is left"
    yield partial(procs.start, out=subprocess.DEVNULL, err=subprocess.PIPE)
    for pid in processes(tmp_path): os.kill(pid, signal.SIGKILL)

def trains(path, *procs, timeout=90):
    "The processes that train, in the order of their ranks, once both do"
    end = time.monotonic()+timeout
    while len(files := sorted(path.iterdir()))<2:
        assert time.monotonic()<end and all(p.poll() is None for p in procs)
        time.sleep(.02)
    return [int(f.suffix[1:]) for f in files]

def ended(p):
    "What `p` says before it ends in an error"
    err = p.communicate(timeout=60)[1]
    assert p.returncode, err[-3000:]
    return err

@pytest.mark.parametrize('cmd,rank,times', [pytest.param(by_torchrun,1,1, id='torchrun'), pytest.param(by_accelerate,0,1, id='accelerate', marks=pytest.mark.whole), pytest.param(notebook,1,2, id='notebook')])
@pytest.mark.by_default('torchrun')
def test_the_cause_comes_first_and_alone(warm, tmp_path, cmd, rank, times):
    "`notebook_launcher` shows it twice by itself: as a log, and as an error of its own"
    cmd,bad = cmd() if callable(cmd) else cmd,16+4*rank
    _,err = warm(*cmd, tmp_path, bad, rc=1)
    before,*after = err.split(f'ValueError: broken file {bad}')
    assert 'RankError' not in err and len(after)==times
    assert f'[rank{rank}]: Traceback' in before or f'local_rank: {rank}' in before
    assert f'[rank{1-rank}]' not in before and not processes(tmp_path)

@pytest.mark.whole
def test_ctrl_c_ends_all(start, tmp_path):
    p = start(*by_torchrun, tmp_path)
    trains(tmp_path, p)
    os.killpg(p.pid, signal.SIGINT)
    err = ended(p)
    ours = [o for o in err.splitlines() if o.startswith('[rank') or 'fastdist' in o]
    assert len(ours)==1 and re.match(r'(\[rank0\]: )?fastdist: interrupted by Ctrl-C or SIGINT at .*, line \d+, in ', ours[0]), err[-5000:] # the rest is torchrun's own
    assert not processes(tmp_path)

@pytest.mark.whole
def test_torchrun_names_who_was_killed(warm, tmp_path):
    p = warm.start(*by_torchrun, tmp_path)
    os.kill(trains(tmp_path, p)[1], signal.SIGKILL)
    assert re.search(r'rank +: 1 \(local_rank: 1\)\s+exitcode +: -9', ended(p))

@pytest.mark.by_default('1')
@pytest.mark.parametrize('who', [0,1])
def test_ranks_that_nobody_looks_after(warm, tmp_path, who):
    "As `srun` starts them; rank 0 serves the store"
    job = dict(WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT=str(free_port()))
    start = lambda i: warm(sys.executable, script, tmp_path, rc=-signal.SIGKILL if i==who else 1, RANK=str(i), LOCAL_RANK=str(i), **job)
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(start, i) for i in range(2)]
        os.kill(trains(tmp_path)[who], signal.SIGKILL)
        err = ranks[1-who].result(timeout=60)[1]
        ranks[who].result(timeout=60)
    assert f'RankError: rank {who} failed:' in err and 'it died without an error message' in err
