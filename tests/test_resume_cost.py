"What `Checkpoint` costs: nothing is exchanged between states, a state looks at what has changed once, and a long recorder is no burden"
import pytest
from collections import Counter
from contextlib import contextmanager
from unittest import mock
from fastcore.test import test_eq
from fastai.basics import *
from fastdist import *
from fastdist.comm.wire import Line
from fastdist.state import checkpoint_writer,progress,values
from fastdist.state.serialize import pack
from fastdist.base.values import leaves
from collectives import counting
from learners import digits

of_clock = {'ping','pong','waits','awaited','stands','ask'}

@contextmanager
def messages():
    "A `Counter` of the messages that this rank sends over the control connection, but for those of the clock"
    sent,send = Counter(),Line.send
    def counted(self, **msg):
        sent[msg['kind']] += msg['kind'] not in of_clock
        send(self, **msg)
    with mock.patch.object(Line, 'send', counted): yield sent

def trained(rank, *cbs, n):
    "Collectives and messages of a fit without validation, and the number of its steps"
    learn = digits(n)
    learn._do_epoch_validate = noop
    with learn.distrib_ctx(), learn.no_bar(), learn.no_logging(), messages() as sent, counting() as ran: learn.fit(1, cbs=cbs)
    return len(learn.recorder.losses),ran,sent

class Written(Callback):
    "Waits for the state that is being written: one that falls due meanwhile is put off, and ranks agree anew on when it is made"
    order = Checkpoint.order+1
    def __init__(self, cb): self.cb = cb
    def before_batch(self): self.cb.now.states.writer.wait()

def added(rank, n, path, **kw):
    "What a `Checkpoint` adds to a fit: steps, collectives, messages"
    cb = Checkpoint(path, **kw)
    (steps,ran,sent),(_,ran0,sent0) = trained(rank, cb, Written(cb), n=n),trained(rank, n=n)
    ran.subtract(ran0)
    sent.subtract(sent0)
    return steps,+ran,+sent

def on_both(n, path, **kw):
    "What `added` returns on 2 ranks, if that is the same"
    a,b = on_ranks(lambda rank: added(rank, n, path, **kw), join=False, timeout=100)
    test_eq(a, b)
    return a

at_ends = Counter({'c10d::broadcast_':2, 'c10d::allgather_':1, 'c10d::gather_':1}) # what there is to go on from, and the state of the end

@pytest.mark.replicas # ranks in shards write their own rows
@pytest.mark.parametrize('n,steps', ((160,4), (1600,40)))
def test_quiet_steps_exchange_nothing(tmp_path, n, steps): test_eq(on_both(n, tmp_path, minutes=60), (steps,at_ends,Counter()))

@pytest.mark.replicas # ranks in shards write their own rows
def test_a_state_is_one_gather(tmp_path):
    each = Counter({'c10d::allgather_':1, 'c10d::gather_':1})
    test_eq(on_both(1600, tmp_path, every=13, minutes=None), (40,at_ends+each+each+each,Counter()))

class Lasting(Callback):
    "A training that has made `n` steps"
    order = 100
    def __init__(self, n): self.made = n
    def before_train(self):
        rec = self.learn.recorder
        rec.losses += map(TensorBase, torch.rand(self.made).unbind())
        rec.lrs += [0.1]*self.made

def looked_at(path, n):
    "How often a state asked what a value is, and what has changed, after `n` steps; and how many tensors were written of it"
    asked,changed,packed = Counter(),Counter(),[]
    learn = digits(20)
    learn._do_epoch_validate = noop
    def noted(v, copy): return packed.append(pack(v, copy)) or packed[-1]
    with spied(values, 'kind_of', asked), spied(progress.Changes, 'now', changed), mock.patch.object(checkpoint_writer, 'pack', noted):
        with learn.no_bar(), learn.no_logging(): learn.fit(1, cbs=[Lasting(n), Checkpoint(path)])
    return asked,changed,sum(isinstance(v, Tensor) for _,v in leaves('', packed))

def spied(owner, name, calls):
    do = getattr(owner, name)
    def counted(*args):
        calls[name] += 1
        return do(*args)
    return mock.patch.object(owner, name, counted)

def test_a_long_recorder_is_one_value(tmp_path):
    few,many = looked_at(tmp_path/'few', 100),looked_at(tmp_path/'many', 20_000)
    test_eq((few,few[1]), (many,Counter(now=1)))
