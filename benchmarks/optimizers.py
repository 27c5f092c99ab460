"A step of fastai's optimizers one by one, in lists, and of torch's: `python benchmarks/optimizers.py --help`"
import torch
from functools import partial
from statistics import median
from time import perf_counter
from torch import optim
from fastcore.all import call_parse
from jobs import save,show_table
from work import mlp

def resnet():
    from torchvision.models import resnet18
    return resnet18()

def kinds():
    "Name -> fastai's optimizer, and torch's counterpart"
    from fastai.optimizer import SGD,Adam,RAdam
    sgd = partial(SGD, mom=.9),partial(optim.SGD, momentum=.9)
    return dict(SGD=sgd, Adam=(Adam,optim.AdamW), RAdam=(RAdam,optim.RAdam))

def with_grads(mk, device):
    "Parameters of a model with gradients"
    torch.manual_seed(0)
    ps = list(mk().to(device).parameters())
    for p in ps: p.grad = torch.randn_like(p)
    return ps

def made(mk, device, theirs, torchs):
    "Name -> an optimizer; each has parameters of its own"
    from fastdist.parallel.foreach import override_lists
    res = dict(fastai=theirs(with_grads(mk, device), lr=1e-3), lists=override_lists(theirs(with_grads(mk, device), lr=1e-3)))
    if torchs is None: return res
    res['foreach'] = torchs(with_grads(mk, device), lr=1e-3, foreach=True)
    if torchs is not optim.RAdam: res['fused'] = torchs(with_grads(mk, device), lr=1e-3, fused=True)
    return res

def timed(f, n, wait):
    wait()
    start = perf_counter()
    for _ in range(n): f()
    wait()
    return (perf_counter()-start)/n

def seconds(opt, n, wait):
    "Of a step and of zeros for gradients, the mean of `n`; steps have gradients that are not zero, since averages of zeros become numbers that are slow"
    ps = [p for g in opt.param_groups for p in g['params']]
    step = timed(opt.step, n, wait)
    zero = timed(partial(opt.zero_grad, set_to_none=False) if isinstance(opt, optim.Optimizer) else opt.zero_grad, n, wait)
    for p in ps: p.grad.normal_()
    return step+zero

def rounds_of(opts, n, rounds, wait):
    "Name -> median milliseconds, over rounds in each of which all take `n` steps in turn; the first warms up"
    took = [{k:seconds(o, n, wait) for k,o in opts.items()} for _ in range(rounds+1)][1:]
    return {k:1e3*median(o[k] for o in took) for k in opts}

heads = ['fastai','lists','foreach','fused']

@call_parse
def main(
    rounds:int=15, # In each of which all are timed in turn
    device:str=None, # Where parameters are; a GPU if there is one
    out:str=None # JSON file for the rows
):
    "Time a step and `zero_grad` of optimizers, in one thread"
    torch.set_num_threads(1)
    device = device or ('cuda' if torch.cuda.is_available() else 'cpu')
    wait,rows = torch.cuda.synchronize if device.startswith('cuda') else lambda: None,[]
    for model,mk,n in (('mlp',mlp,200),('resnet18',resnet,3)):
        for k,fs in kinds().items(): rows.append(dict(model=model, optimizer=k, **rounds_of(made(mk, device, *fs), n, rounds, wait)))
    table = [[f'{o["model"]}, {o["optimizer"]}', *[f'{o[h]:.3f}' if h in o else None for h in heads], o['lists']/o['fastai'], *[o['lists']/o[h] if h in o else None for h in heads[2:]]] for o in rows]
    show_table(f'A step and `zero_grad` on {device}, milliseconds', ['',*heads,'lists/fastai','/foreach','/fused'], table)
    save(rows, out)
