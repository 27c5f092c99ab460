"What `Checkpoint` costs: nothing is exchanged between states, and a long recorder is no burden"
import pytest
from collections import Counter
from fastcore.test import test_eq
from safetensors import safe_open
from fastai.basics import *
from fastdist import *
from fastdist.state.folder import States
from collectives import counting
from learners import digits

def trained(rank, *cbs, n):
    "Collectives of a fit without validation, and the number of its steps"
    learn = digits(n)
    learn._do_epoch_validate = noop
    with learn.distrib_ctx(), learn.no_bar(), learn.no_logging(), counting() as ran: learn.fit(1, cbs=cbs)
    return len(learn.recorder.losses),ran

class Written(Callback):
    "Waits for the state that is being written: one that falls due meanwhile is put off, and ranks agree anew on when it is made"
    order = Checkpoint.order+1
    def __init__(self, cb): self.cb = cb
    def before_batch(self): self.cb.now.states.writer.wait()

def added(rank, n, path, **kw):
    "What a `Checkpoint` adds to a fit: steps, collectives"
    cb = Checkpoint(path, **kw)
    (steps,ran),(_,ran0) = trained(rank, cb, Written(cb), n=n),trained(rank, n=n)
    ran.subtract(ran0)
    return steps,+ran

def on_both(n, path, **kw):
    "What `added` returns on 2 ranks, if that is the same"
    a,b = on_ranks(lambda rank: added(rank, n, path, **kw), join=False, timeout=100)
    test_eq(a, b)
    return a

at_ends = Counter({'c10d::broadcast_':2, 'c10d::allgather_':1, 'c10d::gather_':1}) # what there is to go on from, and the state of the end

@pytest.mark.replicas # ranks in shards write their own rows
@pytest.mark.parametrize('n,steps', ((160,4), (1600,40)))
@pytest.mark.by_default('160-4')
def test_quiet_steps_exchange_nothing(tmp_path, n, steps): test_eq(on_both(n, tmp_path, minutes=60), (steps,at_ends))

@pytest.mark.replicas # ranks in shards write their own rows
def test_a_state_is_one_gather(tmp_path):
    each = Counter({'c10d::allgather_':1, 'c10d::gather_':1})
    test_eq(on_both(1600, tmp_path, every=13, minutes=None), (40,at_ends+each+each+each))

class Lasting(Callback):
    "A training that has made `n` steps"
    order = 100
    def __init__(self, n): self.made = n
    def before_train(self):
        rec = self.learn.recorder
        rec.losses += map(TensorBase, torch.rand(self.made).unbind())
        rec.lrs += [0.1]*self.made

def written(path, n):
    "How many tensors the state of a training has that has made `n` steps"
    learn = digits(20)
    learn._do_epoch_validate = noop
    with learn.no_bar(), learn.no_logging(): learn.fit(1, cbs=[Lasting(n), Checkpoint(path)])
    with safe_open(States(path).newest().path/'tensors.safetensors', 'pt') as f: return len(f.keys())

def test_a_long_recorder_is_one_value(tmp_path):
    few = written(tmp_path/'few', 100)
    assert few>10
    test_eq(written(tmp_path/'many', 20_000), few)
