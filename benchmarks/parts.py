"Where the time of a step goes, by part: `python benchmarks/parts.py --help`"
import torch
from fastcore.all import call_parse
from fastai.basics import *
from contextlib import nullcontext
from itertools import groupby
from statistics import median
from torch import nn
from torch.nn import functional as F
from fastai.callback.core import _events
from fastai.data.load import DataLoader
from fastai.losses import BaseLoss
from fast import Fastai,Fastdist
from jobs import open_jobs,save,show_table
from loops import Loop,opts
from stamps import Stamps,rest
from steps import env,start
from work import Work,no_exchange,works

def resnet18():
    from torchvision.models import resnet18
    return resnet18(num_classes=10)

works['resnet18'] = Work(resnet18, (3,64,64), 8, 6, 'Adam')
phases = {True:'training', False:'validation'}
exchanged = '  of which exchange and wait'
first_rows = ['batch','to the device','splitting','forward','around the forward pass','loss','around the loss','backward',exchanged,'optimizer step','zero_grad']

def subclasses(cls): return {cls}.union(*map(subclasses, cls.__subclasses__()))

def stamp_torch(st):
    "Put stamps on what every loop calls"
    p = [nn.Parameter(torch.zeros(1))]
    for opt in opts.values():
        opt(p) # the first object of a class makes torch wrap its `step`
        st.patch(opt, 'step', 'optimizer step')
    st.patch(torch.optim.Optimizer, 'zero_grad', 'zero_grad')
    st.patch(torch.autograd, 'backward', 'backward')
    st.patch(F, 'cross_entropy', 'loss')
    st.patch(nn.parallel.DistributedDataParallel, 'forward', 'around the forward pass')
    st.patch_iter(torch.utils.data.DataLoader, 'batch')

def stamp_fastai(st):
    "Put stamps on a Learner's own functions, and on all classes of callbacks and metrics that there are"
    keys = {o:st.key(f'dispatch of {o}') for o in _events}
    for attr,name in dict(_set_device='to the device', _split='splitting').items(): st.patch(Learner, attr, name)
    for attr,name in dict(step='optimizer step', zero_grad='zero_grad').items(): st.patch(Optimizer, attr, name)
    st.patch(BaseLoss, '__call__', 'around the loss')
    for c in subclasses(Callback)|{Learner}:
        for o in ('__call__','_on_call_one'):
            if c is Learner or o=='_on_call_one': st.patch(c, o, key=lambda _, event_name: keys[event_name])
    for c in subclasses(Callback):
        for o in _events: st.patch(c, o, f'{c.__name__}.{o}')
    for c in subclasses(Metric): st.patch(c, 'accumulate', f'metric {c.__name__}')
    for c in subclasses(DataLoader):
        if '__iter__' in vars(c): st.patch_iter(c, 'batch')

def by_phase(steps, train, valid):
    "Median microseconds of each part, and of the whole, of the training and the validation step; the first epoch warms up, and a phase's last step has no next one to end it"
    groups = [[o for _,o in g] for _,g in groupby(steps, key=lambda o: o[0])]
    if [len(g) for g in groups[:2]]!=[train,valid]: raise ValueError(f'{len(groups[0])} and {len(groups[1])} steps were made, not {train} and {valid}')
    return {k:medians([o for g in groups[i::2] for o in g[:-1]]) for k,i in ((True,2),(False,3))}

def medians(steps):
    for o in steps: o['whole'] = sum(o.values())-o['stamps']
    return {k:median(o.get(k, 0.) for o in steps)/1e3 for k in {}.fromkeys(k for o in steps for k in o)}

class Stamped:
    "A peer with stamps on what it calls"
    def __init__(self, rank, size):
        self.stamps = Stamps()
        self.stamp()
        super().__init__(rank, size)
        self.stamp() # what was imported only now

    def stamp(self): stamp_torch(self.stamps)

    def parts(self, model, w, train, valid, epochs, exchange):
        "Median microseconds by part, of a training and a validation step of this rank"
        st,self.exchange = self.stamps,exchange
        st.calibrate()
        st.hook(model)
        st.on = True
        try:
            with nullcontext() if exchange else no_exchange(): self.fit(model, w, train, valid, epochs)
        finally: st.on = False
        return by_phase(st.steps(st.log), train, valid)

class StampedLoop(Stamped, Loop): pass

class StampedFastai(Stamped, Fastai):
    def stamp(self):
        super().stamp()
        stamp_fastai(self.stamps)

class StampedFastdist(StampedFastai, Fastdist): pass

class StampedLean(StampedFastai):
    "A Learner in one process, with fastdist's faster step"
    def __init__(self, rank, size):
        super().__init__(rank, size)
        import fastdist
        if not hasattr(Learner, 'lean_ctx'): raise ModuleNotFoundError(name='Learner.lean_ctx')
        self.stamp()
    def context(self, learn): return learn.lean_ctx()

peers = {'by hand, DDP':('parts.StampedLoop',2), 'fastai, 1 process':('parts.StampedFastai',1), 'fastai, lean':('parts.StampedLean',1), 'fastdist':('parts.StampedFastdist',2)}

def measure(job, work, epochs=4):
    "One round of `job`: parts by phase on rank 0, and what a step takes without stamps"
    n = works[work].steps
    res = job.ask('parts', work, n, n, epochs, True)[0]
    plain = job.ask('time', work, n, n, epochs, True)[0][0]
    for k,name in ((True,'train'),(False,'valid')): res[k]['plain'] = plain[name]*1e6
    if job.size>1: res[True][exchanged] = res[True]['backward']-job.ask('parts', work, n, n, epochs, False)[0][True]['backward']
    return res

def merged(runs):
    "Medians over rounds"
    return {k:{o:median(r[k].get(o, 0.) for r in runs) for o in {}.fromkeys(o for r in runs for o in r[k])} for k in phases}

def ordered(found):
    "The names of parts in the order of the table"
    last = [rest,'sum','whole','plain']
    mid = sorted({o for f in found for o in f}-{*first_rows,*last,'stamps'}, key=lambda o: (o.startswith('metric'), o.startswith('dispatch'), o))
    return [o for o in first_rows if any(o in f for f in found)]+mid+last

def show(work, training, found):
    "Print one table, and whether stamps and medians are to be trusted"
    for f in found.values(): f['sum'] = sum(v for k,v in f.items() if k not in ('whole','plain','stamps',exchanged))
    title = f'{work}, {phases[training]}, microseconds of a step on rank 0, batches of {works[work].bs}'
    cell = lambda f, k: f'{f[k]:,.1f}' if f.get(k) else None
    names = dict(sum='sum of these', whole='whole', plain='whole without stamps')
    show_table(title, ['',*found], [[names.get(k, k),*[cell(f, k) for f in found.values()]] for k in ordered(found.values())])
    for k,f in found.items(): print(f'{k}: parts are {f["sum"]/f["whole"]:.1%} of the whole; with stamps {(f["whole"]+f["stamps"])/f["plain"]:.1%} of the time without')

@call_parse
def main(
    rounds:int=5, # Times that each peer runs each workload
    out:str=None # JSON file for the rows
):
    "Time the parts of a training step and of a validation step, of a loop by hand, fastai and fastdist"
    with open_jobs({(k,n):(v,n) for k,(v,n) in peers.items()}, env) as jobs:
        missing,runs = start(jobs),{}
        for i in range(rounds):
            for work in works:
                for (k,_),job in jobs.items(): runs.setdefault((work,k), []).append(measure(job, work))
            print(f'round {i+1} of {rounds}', flush=True)
    res = {k:merged(o) for k,o in runs.items()}
    for work in works:
        for t in phases: show(work, t, {k:o[t] for (w,k),o in res.items() if w==work})
    for peer,why in missing.items(): print(f'{peer}: left out, since there is no {why}')
    save([dict(work=w, peer=k, phase=phases[t], microseconds=o[t]) for (w,k),o in res.items() for t in phases], out)
