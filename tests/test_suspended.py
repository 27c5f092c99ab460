"Ranks that are suspended for longer than `patience`, as by SIGSTOP, Ctrl-Z, SLURM or a paused machine, and continued"
import os,signal,time,pytest
from fastai.basics import *
from fastdist import *
from fastdist.comm.collectives import gather_objs
from fastcore.test import test_eq
from learners import digits

pytestmark = pytest.mark.timeout(120)
patience = 2
long = patience+7 # a rank counts as lost after five seconds more than `patience`

class At(Callback):
    "Calls `f` in batch `n` of training, and makes each batch last"
    def __init__(self, n, f): self.n,self.f = n,f
    def before_batch(self):
        if self.training and self.iter==self.n: self.f()

def suspend(pids, until):
    "Suspend `pids`, until `until` returns in a process that is not suspended"
    if os.fork(): return
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
        last = lambda e: At(3, lambda: raises(rank==n-1 and e)) # the same callback on all ranks
        err = heard(lambda: learn.fit(1, cbs=[stop, last(ValueError('a bad sample'))]))
        steps = heard(lambda: learn.fit(1, cbs=last(CancelFitException()))),learn.train_iter
        return err,steps

@pytest.mark.parametrize('n', [2])
def test_all_are_suspended_and_go_on(n):
    "What one of them does then, an error or a cancel, all ranks know as ever"
    *others,(own,cancelled) = on_ranks(partial(all_suspended, n=n), n, join=False, timeout=100)
    assert own[0]=='ValueError' and 'a bad sample' in own[1], own
    test_eq(cancelled[0], None)
    for err,steps in others:
        assert err[0]=='RankError' and err[1].startswith(f'rank {n-1} failed:') and 'a bad sample' in err[1], err
        test_eq(steps, cancelled)
