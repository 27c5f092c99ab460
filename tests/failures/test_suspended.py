"Ranks that are suspended for longer than `patience`, as by SIGSTOP, Ctrl-Z, SLURM or a paused machine, and continued"
import os,signal,sys,time,pytest
from multiprocessing import get_context
from fastai.basics import *
from fastdist import *
from fastdist.comm.collectives import gather_objs
from fastdist.comm.job import Job
from fastdist.state.dcp import await_shards
from fastcore.test import test_eq
from learners import digits
from procs import await_that

pytestmark = pytest.mark.timeout(120)
patience = 2
long = patience+7 # a rank counts as lost after five seconds more than `patience`

class At(Callback):
    "Calls `f` in batch `n` of training, before its forward pass; `decides` says that it may cancel on one rank"
    def __init__(self, n, f, decides=False): self.n,self.f,self.decides = n,f,decides
    def before_batch(self):
        if self.training and self.iter==self.n: self.f()

def suspend(pids, until):
    "Suspend `pids`, until `until` returns in a process that is not suspended, and return then"
    reading,writing = os.pipe()
    if os.fork():
        os.close(writing)
        os.read(reading, 1) # nothing, once the other process has ended
        return os.close(reading)
    try:
        for o in pids: os.kill(o, signal.SIGSTOP)
        until()
    finally:
        for o in pids: os.kill(o, signal.SIGCONT)
        os._exit(0)

def heard(f):
    try: f()
    except Exception as e: return type(e).__name__,str(e)

def raises(e):
    if e: raise e

def all_suspended(rank, n):
    learn = digits()
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(patience=patience):
        pids = gather_objs(os.getpid())
        stop = At(1, lambda: suspend(pids, lambda: time.sleep(long)) if rank==0 else None)
        last = lambda e, **kw: At(3, lambda: raises(rank==n-1 and e), **kw) # the same callback on all ranks
        err = heard(lambda: learn.fit(1, cbs=[stop, last(ValueError('a bad sample'))]))
        steps = heard(lambda: learn.fit(1, cbs=last(CancelFitException(), decides=True))),learn.train_iter
        return err,steps

@pytest.mark.parametrize('n', [2,3])
@pytest.mark.by_default('3')
def test_all_are_suspended_and_go_on(n):
    "What one of them does then, an error or a cancel, all ranks know as ever"
    *others,(own,cancelled) = on_ranks(partial(all_suspended, n=n), n, join=False, timeout=100)
    assert own[0]=='ValueError' and 'a bad sample' in own[1], own
    test_eq(cancelled[0], None)
    for err,steps in others:
        assert err[0]=='RankError' and err[1].startswith(f'rank {n-1} failed:') and 'a bad sample' in err[1], err
        test_eq(steps, cancelled)

def one_suspended(rank, n, who, place, path):
    "Rank `who` is suspended until the others have ended, and continued then"
    def until():
        end = time.monotonic()+60
        while len(list(path.iterdir()))<n-1 and time.monotonic()<end: time.sleep(.05)
    stop = lambda: suspend([os.getpid()], until) if rank==who else None
    learn = digits()
    with learn.no_bar(), learn.no_logging():
        try:
            with learn.distrib_ctx(patience=patience):
                if place=='fit': learn.fit(1, cbs=At(1, stop))
                stop()
                torch.distributed.barrier()
        except Exception as e: res = type(e).__name__,str(e)
    if rank!=who: (path/str(rank)).touch()
    return res

@pytest.mark.parametrize('n,who,place', [(3,2,'fit'), (2,0,'barrier')])
@pytest.mark.by_default('2-0')
def test_one_is_suspended_and_comes_back(tmp_path, n, who, place):
    "The others have gone on without it; it raises the error that they have raised"
    for kind,text in on_ranks(partial(one_suspended, n=n, who=who, place=place, path=tmp_path), n, join=False, timeout=100):
        assert kind=='RankError' and text.startswith(f'rank {who} failed:\nits process has not answered for'), text

def leaves(rank, path):
    "Rank 0 is suspended until the other has left, which notes whether it had to be continued for that"
    continued = path/'continued'
    def until():
        end = time.monotonic()+40
        while not (path/'left').exists() and time.monotonic()<end: time.sleep(.05)
        continued.touch()
    with Job(this_world(), patience=patience).open() as job:
        if rank==0:
            job.post('pid', str(os.getpid()))
            suspend([os.getpid()], until)
        else:
            state = Path(f'/proc/{job.posted("pid")}/stat')
            await_that(lambda: state.read_text().rpartition(')')[2].split()[0]=='T')
    alone = not continued.exists()
    if rank: (path/'left').touch()
    return alone

@pytest.mark.whole
@pytest.mark.skipif(sys.platform!='linux', reason='the state of a process is read from /proc')
def test_who_needs_nobody_leaves_while_rank_0_is_suspended(tmp_path):
    test_eq(on_ranks(partial(leaves, path=tmp_path), 2, join=False, timeout=100)[1], True)

@pytest.mark.parametrize('where', ('anywhere','between its looks at the clock'))
@pytest.mark.by_default('anywhere')
def test_a_wait_for_files_of_others(tmp_path, where):
    "The time of the own suspension does not count"
    folder,looks = tmp_path/'state',get_context('fork').Event()
    folder.mkdir()
    def lost():
        if looks.is_set(): return
        looks.set()
        if where!='anywhere': os.kill(os.getpid(), signal.SIGSTOP)
    p = get_context('fork').Process(target=await_shards, args=(folder, 1, lost), kwargs=dict(patience=3.))
    p.start()
    looks.wait()
    if where=='anywhere': os.kill(p.pid, signal.SIGSTOP)
    os.waitpid(p.pid, os.WUNTRACED)
    time.sleep(4)
    os.kill(p.pid, signal.SIGCONT)
    p.join(1)
    (folder/'rank0.json').write_text('{}')
    p.join(30)
    test_eq(p.exitcode, 0)
