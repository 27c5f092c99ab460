"Trainings with a seed on any number of ranks, and what they must share with one process"
import random,torch,numpy as np
from fastcore.all import *
from fastcore.test import *
from fastai.basics import *
from fastdist.learner import *
from fastdist.job.fork import *

class Batches(Callback):
    "Keeps the inputs and the targets of each batch as the model gets them, and its predictions"
    order,run_valid = 100,True
    def __init__(self): self.seen = []
    def after_pred(self): self.seen.append((self.training, [o.detach().clone() for o in (*self.xb,*self.yb) if isinstance(o, Tensor)]))

def plain(o): return o.detach().as_subclass(Tensor).clone() if isinstance(o, Tensor) else o

def training(mk, n, fit, **ctx):
    "What a rank of `n` has after `fit`, of the Learner that `mk` makes for `n` ranks"
    def run(rank):
        for f in (random.seed,np.random.seed,torch.manual_seed): f(rank+1)
        learn = mk(n)
        learn.add_cb(Batches())
        with learn.no_bar(),learn.no_logging(),learn.distrib_ctx(seed=42, **ctx): res = fit(learn)
        rec = learn.recorder
        held = dict(weights=learn.model.parameters(), buffers=learn.model.buffers(), losses=rec.losses)
        return {k:[*map(plain, v)] for k,v in held.items()} | dict(values=[[*map(plain, o)] for o in rec.values], batches=[(t,[*map(plain, b)]) for t,b in learn.batches.seen], result=res,
            after=(random.random(),np.random.rand(),torch.rand(1).item()))
    return run

def one_cycle(learn): learn.fit_one_cycle(2, .01)

def joined(ranks):
    "The batches of training of all ranks, put together"
    return [[torch.cat(o) for o in zip(*step)] for step in zip(*[[b for t,b in r['batches'] if t] for r in ranks])]

def near(a, b, eps=1e-5):
    if isinstance(a, (list,tuple)): return len(a)==len(b) and all(near(x, y, eps) for x,y in zip(a, b))
    if a is None or isinstance(a, str): return a==b
    a,b = torch.as_tensor(a).double(),torch.as_tensor(b).double()
    return a.shape==b.shape and bool(((a-b).abs()<=eps*b.abs().clamp(min=1)).all())

def same_on(mk, sizes=(2,), fit=one_cycle, exact=True, inner=0, bs=True, **ctx):
    "Whether each number of ranks has what one process has: weights, losses, metrics and results to 1e-5, batches to the bit"
    one, = on_ranks(training(mk, 1, fit, **ctx), 1, timeout=120)
    for n in sizes:
        ranks = on_ranks(training(mk, n, fit, **ctx), n, timeout=120)
        for k in ('weights','buffers','losses','values','result'): assert all(near(r[k], one[k]) for r in ranks), (n, k, [r[k] for r in ranks][0], one[k])
        test_eq([r['after'] for r in ranks], [one['after']]*n)
        if not bs: continue
        for a,b in zip(joined(ranks), joined([one])): assert all(torch.equal(x, y) if exact else near(x, y) for x,y in zip(a, b)), (n,a,b)
    return one
