"Another reason to save: what one rank requests, all do after the same step"
import pytest
from fastai.basics import *
from fastcore.test import test_eq
from fastdist import *
from fastdist.state.checkpoint import CheckpointedFit
from fastdist.state.folder import States
from learners import digits

def fit(path, who):
    "A fit in which rank `who` requests a state at its third step, and nothing else is a reason"
    def due_here(self): return 'save' if self.fit.rank==who and self.learn.train_iter==3 else None
    CheckpointedFit.due_here = due_here # ranks are forks, so nobody else sees it
    learn = digits(n=240, bs=8)
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(): learn.fit(1, cbs=Checkpoint(path, minutes=None))

def positions(path):
    "Batch of each state in `path`, and whether it is of the end of the fit"
    found = []
    States(path).find(lambda about: found.append((about['batch'],about['ended'])))
    return found

@pytest.mark.parametrize('size', [2,3])
@pytest.mark.parametrize('who', [None,0,-1])
def test_a_save_that_one_rank_requests(size, who, tmp_path):
    on_ranks(lambda rank: fit(tmp_path, None if who is None else who%size), size, join=False)
    test_eq(positions(tmp_path), [(0,True)] if who is None else [(0,True),(4,False)])
