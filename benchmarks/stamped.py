"Peers with stamps on what they call in a step"
import sys,torch
from contextlib import nullcontext
from itertools import groupby
from torch import nn
from torch.nn import functional as F
from fastai.callback.core import _events
from fastai.data.load import DataLoader
from fastai.learner import Callback,Learner,Metric
from fastai.losses import BaseLoss
from fastai.optimizer import Optimizer
from fast import Fastai,Fastdist
from loops import Loop,opts
from stamps import Stamps
from work import no_exchange

learner_parts = dict(_set_device='to the device', _split='splitting')
opt_parts = dict(step='optimizer step', zero_grad='zero_grad')

def subclasses(cls): return {cls}.union(*map(subclasses, cls.__subclasses__()))

def stamp_torch(st):
    "Put stamps on what every loop calls"
    for opt in opts.values():
        opt([nn.Parameter(torch.zeros(1))]) # the first object of a class makes torch wrap its `step`
        st.patch(opt, 'step', 'optimizer step')
    st.patch(torch.optim.Optimizer, 'zero_grad', 'zero_grad')
    st.patch(torch.autograd, 'backward', 'backward')
    st.patch(F, 'cross_entropy', 'loss')
    st.patch(nn.parallel.DistributedDataParallel, 'forward', 'around the forward pass')
    st.patch_iter(torch.utils.data.DataLoader, 'batch')

def dispatch(_, event_name): return f'dispatch of {event_name}'

def stamp_fastai(st, package):
    "Put stamps on functions of a Learner and its optimizer, on all classes of callbacks and metrics that there are, and on the loaders of `package`; fastdist goes over one that is replaced in another way"
    for k,name in learner_parts.items(): st.patch(Learner, k, name)
    for k,name in opt_parts.items(): st.patch(Optimizer, k, name)
    st.patch(BaseLoss, '__call__', 'around the loss')
    st.patch(Learner, '__call__', dispatch)
    for c in subclasses(Callback):
        for o in _events: st.patch(c, o, f'{c.__name__}.{o}')
    for c in subclasses(Metric): st.patch(c, 'accumulate', f'metric {c.__name__}')
    for c in subclasses(DataLoader):
        if c.__module__.partition('.')[0]==package: st.patch_iter(c, 'batch')

def stamp_fastdist(st):
    "Put stamps on what fastdist lends a Learner in the place of these; what it does not have is passed over"
    mods = [m for k,m in sys.modules.items() if k.partition('.')[0]=='fastdist']
    st.patch(torch.autograd, '_engine_run_backward', 'backward')
    for c in {o for m in mods for o in vars(m).values() if isinstance(o, type) and o.__module__==m.__name__}:
        st.patch(c, '_on_call_one', dispatch)
        for k,name in (learner_parts|(opt_parts if opt_parts.keys()<=vars(c).keys() else {})).items(): st.patch(c, k, name)
    for m in mods:
        st.patch_made(m, 'call_of', lambda cb, event_name, *_: f'{type(cb).__name__}.{event_name}')
        st.patch_made(m, 'plain_loss', lambda *_: 'around the loss')
        if m.__name__.endswith('.recorder'): st.patch(m, 'accumulate', lambda m, *_: f'metric {type(m).__name__}')

def by_phase(steps, train, valid):
    "Microseconds by part of each step of training and of validation; the first epoch warms up, and the last step of a phase has no next one to end it"
    groups = [[{k:v/1e3 for k,v in o.items()} for _,o in g] for _,g in groupby(steps, key=lambda o: o[0])]
    if [len(g) for g in groups[:2]]!=[train,valid]: raise ValueError(f'{len(groups[0])} and {len(groups[1])} steps were made, not {train} and {valid}')
    return [[o for g in groups[i::2] for o in g[:-1]] for i in (2,3)]

class Stamped:
    "Base of a peer with stamps"
    def __init__(self, rank, size):
        self.stamps = Stamps()
        self.stamp() # before fastdist notes which functions are fastai's own
        super().__init__(rank, size)
        self.stamp()

    def stamp(self): stamp_torch(self.stamps)

    def parts(self, model, w, train, valid, epochs, exchange):
        "Microseconds by part of the steps of a fit on this rank, in training and in validation"
        st,self.exchange = self.stamps,exchange
        st.log.clear()
        st.calibrate()
        st.hook(model)
        st.on = True
        try:
            with nullcontext() if exchange else no_exchange(): self.fit(model, w, train, valid, epochs)
        finally: st.on = False
        return by_phase(st.steps(), train, valid)

class StampedLoop(Stamped, Loop): pass

class StampedFastai(Stamped, Fastai):
    loaders = 'fastai'
    def stamp(self):
        super().stamp()
        stamp_fastai(self.stamps, self.loaders)
        stamp_fastdist(self.stamps)

class StampedFastdist(StampedFastai, Fastdist): loaders = 'fastdist'

class StampedLean(StampedFastdist):
    "A Learner in one process, with the step that fastdist's ranks make"
    def __init__(self, rank, size):
        super().__init__(rank, size)
        if not hasattr(Learner, 'lean_ctx'): raise ModuleNotFoundError(name='Learner.lean_ctx')

    def context(self, learn): return learn.lean_ctx()
