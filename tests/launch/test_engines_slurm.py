"Ranks in the tasks of a job that `submitit` submits to a real SLURM of two nodes, and in those of its local executor"
import os,re,signal,subprocess,sys
from pathlib import Path
from threading import Thread
import pytest,torch
from fastai.basics import SGD
from fastdist import *
from procs import *
from test_restart import is_exact
from test_slurm import idle,members,running,sh

pytest.importorskip('submitit')
import slurm_parent,test_slurm

cluster = test_slurm.cluster # the fixture
pytestmark = [pytest.mark.launcher, pytest.mark.slow, pytest.mark.timeout(240)]

def head(env, how, out):
    Path(out).mkdir()
    return start(sys.executable, here/'slurm_parent.py', out, how, env=env|dict(OMP_NUM_THREADS='1'))

def left(out): return list(Path(out, 'jobs').glob('fastdist*'))

def test_a_cell_trains_as_on_this_node(cluster):
    out = output(head(cluster, 'same', Path.cwd()/'same'), timeout=200)
    gap,rows,acc = re.search(r'gap (\S+), rows (\d), accuracy (\S+)', out).groups()
    assert float(gap)<1e-6 and rows=='2' and float(acc)>.7 and 'rank 3 on n2 failed: ValueError: lost' in out, out[-3000:]
    assert 'fastdist: 4 ranks on 2 nodes, cpu over gloo, from fastdist over slurm' in out and not left('same')
    await_that(lambda: idle(cluster))

@pytest.fixture
def here_is_parent(cluster, monkeypatch):
    for k in ('PATH','SLURM_CONF'): monkeypatch.setenv(k, cluster[k])
    return lambda kind='slurm': Accelerator(nprocs=2, compute_setup='cpu', engine=slurm_parent.engine(kind, 'jobs'))

@pytest.mark.whole
def test_the_script_runs_once(here_is_parent, cluster):
    def trained(**kw):
        learn = slurm_parent.learner()
        learn.opt_func = SGD # Adam makes rounding large
        with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(**kw):
            learn.fit(1, 1e-2)
            learn.fit(1, 1e-2)
        return learn,[learn.get_preds()[0], *learn.model.parameters()]
    (one,a),(two,b) = trained(),trained(nprocs=2, engine=slurm_parent.engine('slurm', 'jobs'), compute_setup='cpu')
    for x,y in zip(a, b): torch.testing.assert_close(y, x, rtol=1e-5, atol=1e-5)
    assert two.recorder.iters==one.recorder.iters and not left('')
    await_that(lambda: idle(cluster))

def where():
    w = this_world()
    return w.rank,w.local_rank,w.node_rank,w.source

@pytest.mark.whole
def test_the_local_executor_has_one_node(here_is_parent):
    assert here_is_parent('local').distribute(where, all_ranks=True)()==[(i,i,0,'fastdist over submitit') for i in range(2)]
    assert not left('')

@pytest.mark.whole
def test_secrets_do_not_show(here_is_parent, monkeypatch):
    monkeypatch.setenv('WANDB_API_KEY', 'a'*40)
    def look(): return os.environ['WANDB_API_KEY'],'a'*40 in subprocess.run(['ps','axww'], capture_output=True, text=True).stdout
    assert here_is_parent().distribute(look, all_ranks=True)()==[('a'*40,False)]*2
    kept = [o for o in Path('jobs').rglob('*') if o.is_file()]
    assert kept and not [o for o in kept if b'a'*40 in o.read_bytes()]

def pids(out): return [list(map(int, o.read_text().split())) for o in sorted(Path(out).glob('?.pid'))] # of each rank and of its agent
def begun(out): await_that(lambda: [len(o) for o in pids(out)]==[2,2])
def gone(out): return not left(out) and not any(alive(o) for pair in pids(out) for o in pair)
def scancel(): sh(f'scancel {re.search("[0-9]+", next(Path("jobs").glob("*_submission.sh")).name)[0]}', os.environ)
def kill_task(): os.kill(pids('.')[1][1], signal.SIGKILL)

@pytest.mark.whole
@pytest.mark.parametrize('fault,words', [(scancel,'is CANCELLED'), (kill_task,'')])
def test_what_ends_a_job_is_named(here_is_parent, cluster, capfd, fault, words):
    Thread(target=lambda: begun('.') or fault(), daemon=True).start()
    with pytest.raises(RankError, match=r'rank \d on n2 failed' if fault is kill_task else r'rank \d on n\d failed'): here_is_parent().distribute(slurm_parent.stays)('.')
    assert words in capfd.readouterr().err and gone('.')
    await_that(lambda: idle(cluster))

@pytest.mark.whole
def test_ctrl_c_and_the_end_of_the_head_end_the_job(cluster):
    outs,ps = [Path.cwd()/o for o in ('interrupted','killed')],[]
    for o,s in zip(outs, (signal.SIGINT,signal.SIGKILL)): # the second job may wait until the first has ended
        ps.append(head(cluster, 'stays', o))
        begun(o)
        ps[-1].send_signal(s)
    (out,_),_ = said(*ps, timeout=100)
    assert out.rstrip().splitlines()[-1].startswith('fastdist: interrupted by Ctrl-C or SIGINT at '), out[-3000:]
    await_that(lambda: all(map(gone, outs)) and idle(cluster))

@pytest.mark.whole
def test_a_job_that_is_stopped_goes_on_by_the_same_call(here_is_parent, monkeypatch, capfd):
    "After a signal before its time is up, and after a `scontrol requeue`"
    monkeypatch.setenv('FAULTS', '0:slurm:20,0:slurm:42')
    for i in range(2):
        with pytest.raises(Preempted): here_is_parent().distribute(slurm_parent.resumes)(str(Path.cwd()))
    here_is_parent().distribute(slurm_parent.resumes)(str(Path.cwd()))
    out = ''.join(capfd.readouterr())
    assert [out.count(o) for o in ('SIGUSR1: the training stops','SIGTERM: the training stops')]==[1,1] and 'resuming fit' in out, out[-3000:]
    monkeypatch.delenv('FAULTS') # or the run that it is compared with would have them
    is_exact(Path.cwd(), 2)

@pytest.mark.whole
def test_detached_jobs(here_is_parent, cluster, monkeypatch):
    for k,v in dict(FASTDIST_JOBS=Path.cwd()/'detached', PYTHONPATH=f'{here/"cold"}:{here}:{Path(__file__).parent}:{top}').items(): monkeypatch.setenv(k, str(v))
    for o in ('ended','home'): here_is_parent().distribute(slurm_parent.waits, detach=o, all_ranks=True)('.')
    ended_and_home(**os.environ)
    assert gone('.')
    await_that(lambda: idle(cluster))

def loses(out, act):
    "Call `act` when the ranks have begun"
    for o in Path(out).glob('?.pid'): o.unlink()
    Thread(target=lambda: begun(out) or act(), daemon=True).start()

def kill_node(cluster, d):
    "All that runs on the second node"
    on = [o for o in members(d) if b'SLURMD_NODENAME=n2\0' in Path(f'/proc/{o}/environ').read_bytes()]
    step = int(Path(f'/proc/{pids(".")[1][1]}/stat').read_text().rpartition(') ')[2].split()[1])
    for o in processes('n2')+[step]+on: os.kill(o, signal.SIGKILL)

@pytest.mark.whole
@pytest.mark.timeout(360)
def test_a_node_without_its_slurmd_goes_on_and_one_that_is_killed_is_named(here_is_parent, cluster, monkeypatch):
    "Last, since the node does not come back; SLURM itself notices after five minutes"
    d = Path(cluster['SLURM_CONF']).parent
    monkeypatch.setenv('TMPDIR', str(d)) # where a killed node leaves its files
    loses('.', lambda: os.kill(processes('n2')[0], signal.SIGKILL) or Path('go').touch())
    assert here_is_parent().distribute(slurm_parent.waits, all_ranks=True)('.')==[0,1]
    with running('slurmd -D -N n2', d, cluster):
        await_that(lambda: idle(cluster))
        loses('.', lambda: kill_node(cluster, d))
        with pytest.raises(RankError, match='rank 1 on n2 failed:\nits machine was lost: nothing was received from it'): here_is_parent().distribute(slurm_parent.stays)('.')
        assert gone('.')
