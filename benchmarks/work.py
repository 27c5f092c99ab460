"What is trained, and what a fit tells of its time and its collectives"
import gc,torch
from collections import namedtuple
from contextlib import contextmanager,nullcontext
from functools import lru_cache
from itertools import groupby
from statistics import median
from time import perf_counter
from unittest.mock import patch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity,profile

Work = namedtuple('Work', 'model shape bs steps opt', defaults=['SGD'])

def mlp(): return nn.Sequential(nn.Linear(64,32), nn.ReLU(), nn.Linear(32,10))

def resnet18():
    from torchvision.models import resnet18
    return resnet18(num_classes=10)

def conv(ni, nf, stride): return nn.Sequential(nn.Conv2d(ni, nf, 3, stride, 1, bias=False), nn.BatchNorm2d(nf), nn.ReLU())
def cnn(): return nn.Sequential(conv(3,32,1), conv(32,64,2), conv(64,64,2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64,10))

works = dict(mlp=Work(mlp, (64,), 64, 100), cnn=Work(cnn, (3,32,32), 32, 12))
all_works = works | dict(resnet18=Work(resnet18, (3,64,64), 8, 6, 'Adam'))

@lru_cache(None)
def samples(shape, n):
    "`n` pairs of input and target"
    g = torch.Generator().manual_seed(0)
    return list(zip(torch.randn(n, *shape, generator=g), torch.randint(0, 10, (n,), generator=g)))

def timings(marks, train, valid):
    "Median seconds of a training step, a validation step and a whole epoch, from when each forward pass of a fit began; the first epoch warms up"
    phases = [[t for t,_ in g] for _,g in groupby(marks, key=lambda o: o[1])]
    if [len(p) for p in phases[:2]]!=[train,valid]: raise ValueError(f'{len(phases[0])} and {len(phases[1])} steps were made, not {train} and {valid}')
    step = lambda ps: median(b-a for p in ps for a,b in zip(p, p[1:]))
    starts = [p[0] for p in phases[2::2]]
    return dict(train=step(phases[2::2]), valid=step(phases[3::2]), epoch=median(b-a for a,b in zip(starts, starts[1:])))

@contextmanager
def no_exchange():
    "Inside, ranks keep their own gradients, as after an exchange that takes no time"
    init = DistributedDataParallel.__init__
    def wrap(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.register_comm_hook(None, noop_hook)
    with patch.object(DistributedDataParallel, '__init__', wrap): yield

class Peer:
    "Base of what is compared: `fit` trains a model for some epochs of `train` steps a rank, each followed by `valid` steps of validation, if any"
    lr,exchange = 1e-2,True
    def __init__(self, rank, size): self.rank,self.size = rank,size

    def __call__(self, what, work, *args):
        gc.collect()
        torch.manual_seed(0)
        w = all_works[work]
        model = w.model()
        return getattr(self, what)(model, w, *args)

    def time(self, model, w, train, valid, epochs, exchange):
        "Timings, and a number that tells whether the weights are the same on all ranks"
        marks = []
        model.register_forward_pre_hook(lambda m,_: marks.append((perf_counter(), m.training)))
        self.exchange = exchange
        with nullcontext() if exchange else no_exchange(): self.fit(model, w, train, valid, epochs)
        return timings(marks, train, valid), sum(p.abs().sum().item() for p in model.parameters())

    def count(self, model, w, *args):
        "Number of collectives in a fit, as rank 0 sees them"
        if self.rank: return self.fit(model, w, *args)
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as prof: self.fit(model, w, *args)
        return sum(e.name.startswith('c10d::') for e in prof.events())

    def data(self, w, steps): return samples(w.shape, steps*w.bs*self.size)
