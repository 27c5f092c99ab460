"Trainings with a seed on any number of ranks, and what they must share with one process"
import random,torch,numpy as np
from fastcore.all import *
from fastcore.test import *
from fastai.basics import *
from fastdist.learner import *
from fastdist.launch.fork import *

class Batches(Callback):
    "Keeps inputs and targets of each batch of training as the model gets them"
    order,run_valid = 100,False
    def __init__(self): self.seen = []
    def after_pred(self): self.seen.append([plain(o) for o in (*self.xb,*self.yb) if isinstance(o, Tensor)])

def plain(o): return o.detach().as_subclass(Tensor).clone() if isinstance(o, Tensor) else o
def one_cycle(learn): learn.fit_one_cycle(2, .01)

def trained(mk, n, fit=one_cycle, **ctx):
    "What a rank of `n` has after `fit`, of the Learner that `mk` makes for `n` ranks; each rank was seeded otherwise"
    learn = mk(n)
    learn.add_cb(Batches())
    with learn.no_bar(),learn.no_logging(),learn.distrib_ctx(seed=42, **ctx): res = fit(learn)
    rec,held = learn.recorder,dict(weights=learn.model.parameters(), buffers=learn.model.buffers(), losses=learn.recorder.losses)
    state = dict(after=(random.random(),np.random.rand(),torch.rand(1).item()), batches=learn.batches.seen)
    return {k:[*map(plain, v)] for k,v in held.items()} | state | dict(values=[[*map(plain, o)] for o in rec.values], result=res)

def on_each(mks, n, fit=one_cycle, **ctx):
    "What each of `n` ranks has after the fits of all Learners in `mks`"
    def run(rank):
        for f in (random.seed,np.random.seed,torch.manual_seed): f(rank+1)
        return {k:trained(mk, n, fit, **ctx) for k,mk in mks.items()}
    return on_ranks(run, n, timeout=110)

def near(a, b, eps=1e-5):
    if isinstance(a, (list,tuple)): return len(a)==len(b) and all(near(x, y, eps) for x,y in zip(a, b))
    if a is None or isinstance(a, str): return a==b
    a,b = torch.as_tensor(a).double(),torch.as_tensor(b).double()
    return a.shape==b.shape and bool(((a-b).abs()<=eps*b.abs().clamp(min=1)).all())

def joined(ranks): return [[torch.cat(o) for o in zip(*step)] for step in zip(*[r['batches'] for r in ranks])]
exact = tuple(map(int, torch.__version__.split('.')[:2]))>(2,10) # torch 2.10 warps an image of a batch of three otherwise than of four, in the last bit
def alike(a, b): return len(a)==len(b) and all(torch.equal(x, y) if exact else near(x, y) for p,q in zip(a, b) for x,y in zip(p, q))

def same_on(mks, sizes=(2,3), fit=one_cycle, batches=True, **ctx):
    "Check that any number of ranks has what one process has: weights, losses, metrics and results to 1e-5, batches to the bit"
    one, = on_each(mks, 1, fit, **ctx)
    for n in sizes:
        ranks = on_each(mks, n, fit, **ctx)
        for name,a in one.items():
            rs = [r[name] for r in ranks]
            for k in ('weights','buffers','losses','values','result'): assert all(near(r[k], a[k]) for r in rs), (name, n, k, rs[0][k], a[k])
            test_eq([r['after'] for r in rs], [a['after']]*n)
            if batches: assert alike(joined(rs), a['batches']), (name, n, 'batches')
    return one
