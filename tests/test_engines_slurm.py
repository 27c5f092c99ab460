"Ranks in the tasks of a job that `submitit` submits to a real SLURM of two nodes, and in those of its local executor"
import os,re,signal,subprocess,sys,time
from contextlib import contextmanager
from pathlib import Path
import pytest
from procs import *
from test_restart import is_exact
from test_slurm import cluster,end_jobs,idle,sh

pytest.importorskip('submitit')
pytestmark = [pytest.mark.launcher, pytest.mark.slow, pytest.mark.timeout(240)]

def head(env, how, *args, **vars):
    Path('jobs').mkdir()
    return start(sys.executable, here/'slurm_head.py', Path.cwd(), how, *args, env=env|dict(OMP_NUM_THREADS='1')|vars)

def ended(p, timeout, rc=0):
    "What a head has said; nothing of its job is left but submitit's log"
    (out,_), = said(p, timeout=timeout)
    assert p.returncode==rc, f'exit code {p.returncode}: {out[-3000:]}'
    assert not list(Path('jobs').glob('fastdist*'))
    return out

@pytest.mark.parametrize('kind,node', [('slurm','n2'), ('local','')])
def test_a_cell_trains_as_on_this_node(cluster, kind, node):
    out = ended(head(cluster, 'same', kind), 150)
    gap,rows,acc = re.search(r'gap (\S+), rows (\d), accuracy (\S+)', out).groups()
    assert float(gap)<1e-6 and rows=='2' and float(acc)>.7 and re.search(rf'rank 3 on {node}.* failed: ValueError: lost', out), out[-3000:]
    assert f'from fastdist over {"slurm" if kind=="slurm" else "submitit"}' in out and out.count('fastdist: 4 ranks on')==2
    await_that(lambda: idle(cluster), 15)

@contextmanager
def job_that_stays(env):
    "A head, its job, and of each rank the process and its agent's"
    p = head(env, 'stays')
    try:
        pids = lambda: [list(map(int, o.read_text().split())) for o in sorted(Path.cwd().glob('?.pid'))]
        await_that(lambda: [len(o) for o in pids()]==[2,2], 90)
        yield p,re.search(r'\d+', next(Path('jobs').glob('*_submission.sh')).name)[0],pids()
        await_that(lambda: not any(alive(o) for pair in pids() for o in pair) and idle(env), 20)
    finally:
        p.kill()
        end_jobs(env)

def ctrl_c(env, p, job, pids): p.send_signal(signal.SIGINT)
def scancel(env, p, job, pids): sh(f'scancel {job}', env)
def kill_task(env, p, job, pids): os.kill(pids[1][1], signal.SIGKILL)

@pytest.mark.parametrize('fault,rc,words', [(ctrl_c,-2,'KeyboardInterrupt'), (scancel,1,'is CANCELLED'), (kill_task,1,'rank 1 on n2 failed')])
def test_a_job_that_is_ended_names_its_node_and_leaves_nothing(cluster, fault, rc, words):
    with job_that_stays(cluster) as (p,job,pids):
        fault(cluster, p, job, pids)
        began = time.monotonic()
        out = ended(p, 30, rc)
        assert words in out and time.monotonic()-began<(10 if rc<0 else 18), (time.monotonic()-began,out[-3000:])
        assert rc<0 or re.search(r'rank \d on n\d failed', out), out[-3000:]

def test_the_job_ends_with_its_head(cluster):
    with job_that_stays(cluster) as (p,job,pids):
        p.kill()
        await_that(lambda: not list(Path('jobs').glob('fastdist*')), 20)

def test_a_job_that_is_preempted_and_queued_again_goes_on(cluster):
    "A signal before the time is up, for which the head queues the job again, and a `scontrol requeue`"
    out = ended(head(cluster, 'resumes', FAULTS='0:slurm:20,0:slurm:42'), 200)
    assert [out.count(o) for o in ('was asked to stop (SIGUSR2)','SIGTERM: the training stops','goes on in fit')]==[1,1,1], out[-3000:]
    is_exact(Path.cwd(), 2)
