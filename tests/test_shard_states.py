"A training in shards that is ended anywhere goes on where it was, in shards or not, on any number of ranks"
import pytest
from contextlib import suppress
from functools import cache
from tempfile import TemporaryDirectory
from fastcore.test import test_eq
from fastai.basics import *
from fastai.callback.training import GradientAccumulation,GradientClip
from fastdist import *
from fastdist.state import run as fit_run
from fastdist.state.chunks import map_tensors
from survive import *
from test_survive import differences,runs

kw = dict(saves=False, every=2)

@cache
def whole(size, drop=True, **how):
    "What the undisturbed run leaves"
    with TemporaryDirectory() as d: return runs(Path(d), size, drop, **kw|how)

# As many ranks in shards: to the bit, with dropout

ends = [Blow('kill the last', 'middle', 0, 1, 2, 4), Blow('kill the first', 'middle', 1, 1, 1, 1), Blow('kill all', 'validation', 1, 0, 3, 0),
    Blow('SIGTERM to one', 'last step', 1, 2, 3, 13), Blow('kill all', 'between fits', 0, 1, 0, 0), *(Blow('power cut', 'while writing', 1, 0, 1, n) for n in (0,7,3,5))]

@pytest.mark.parametrize('i', range(len(ends)), ids=lambda i: str(ends[i]))
def test_it_ends_as_the_undisturbed_run(tmp_path, i):
    size = 2+i%2
    assert runs(tmp_path, size, True, shard=True, blow=ends[i], **kw) is None
    res = runs(tmp_path, size, True, shard=True, **kw)
    for a,b in zip(whole(size, shard=True), res): test_eq(differences(a, b, True), [])

# Other ranks, other layouts

def near(a, b, *parts): return differences({k:a[k] for k in parts}, {k:b[k] for k in parts}, False)

@pytest.mark.parametrize('first,second', (((2,True),(3,True)), ((3,True),(2,False)), ((2,True),(1,False)), ((2,False),(3,True)), ((1,False),(2,True))))
def test_it_goes_on_in_another_layout(tmp_path, first, second):
    (n,shard),(m,then) = first,second
    assert runs(tmp_path, n, False, shard=shard, blow=Blow('kill all', 'middle', 1, 1, 1, 4), **kw) is None
    res = runs(tmp_path, m, False, shard=then, **kw)
    for a,b in zip(whole(1, False)*m, res): test_eq(near(a, b, 'snap','rec','log'), [])

# What a state in shards holds

class Until(Callback):
    "Ends the training before step `n` of the fit, as an error of the user does"
    order = 90
    def __init__(self, n): self.n,self.seen = n,0
    def before_batch(self):
        self.seen += self.training
        if self.seen>self.n>0: raise InterruptedError('cut off')

def tied():
    model = nn.Sequential(nn.Linear(8,8), nn.ReLU(), nn.Linear(8,8), nn.Dropout(.2), nn.Linear(8,3))
    model[2].weight = model[0].weight
    return model

def plain(): return nn.Sequential(nn.Linear(8,5), nn.ReLU(), nn.Dropout(.2), nn.Linear(5,3))

def fitted(path, n, mk=plain, opt=Adam, cbs=(), **how):
    "Fit two epochs of five batches on this rank in shards, unless it ends before step `n`; return weights, losses and the optimizer's state"
    fit_run._last.clear()
    set_seed(3)
    dls = DataLoaders.from_dsets(Samples(30), Samples(7, 1), bs=3, num_workers=0, device='cpu')
    learn = Learner(dls, mk(), loss_func=CrossEntropyLossFlat(), metrics=accuracy, opt_func=opt, lr=.05, cbs=[Checkpoint(path, every=1, minutes=None), Until(n), *[o() for o in cbs]])
    with suppress(InterruptedError), learn.no_bar(), learn.no_logging(), learn.distrib_ctx(**dict(shard=True)|how): learn.fit(2)
    for o in fit_run._writers.values(): o.wait()
    return learn.model.state_dict(),list(learn.recorder.losses),map_tensors(snapshot(learn, 'opt')['opt'], lambda t: getattr(t, '_local_tensor', t))

class InEpochs(Callback):
    "Has states made between epochs only, where a window of batches may be open"
    def before_fit(self): self.learn.recorder.train_metrics = True

kinds = dict(ranger=dict(opt=ranger), larc=dict(opt=Larc), wrapped=dict(opt=partial(OptimWrapper, opt=torch.optim.AdamW)), tied=dict(mk=tied),
    window=dict(cbs=[partial(GradientAccumulation, 18)]), clipped=dict(cbs=[partial(GradientClip, .1)]), batches=dict(gradient_accumulation_steps=2),
    open_window=dict(cbs=[partial(GradientAccumulation, 18),InEpochs]))

@pytest.mark.parametrize('kind', kinds)
def test_all_kinds(tmp_path, kind):
    def run(rank):
        whole,_,last = [fitted(tmp_path/k, n, **kinds[kind]) for k,n in (('whole',0),('cut',8),('cut',0))]
        return differences(dict(enumerate(whole)), dict(enumerate(last)), True)
    test_eq(on_ranks(run, join=False), [[],[]])
