"By how much each rank's loss counts: for any split of any samples, the numbers of all ranks give loss and gradient of one process"
import pytest
from hypothesis import given,settings,strategies as st
from fastcore.test import test_close,test_eq
from fastai.basics import *
from fastai.callback.training import GradientAccumulation
from fastdist.evaluate.loss import has_normaliser,is_summed,normaliser
from fastdist.data.loader import DistributedDL
from fastdist.train.scale import *

weight = tensor([1.,3.,.2])
losses = dict(mean=nn.MSELoss(), sum=nn.MSELoss(reduction='sum'), targets=nn.CrossEntropyLoss(), ignored=nn.CrossEntropyLoss(ignore_index=1),
    weighted=nn.CrossEntropyLoss(weight=weight), weighted_sum=nn.CrossEntropyLoss(weight=weight, reduction='sum'))
names = st.sampled_from(sorted(losses))
shares = st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(sum) # samples of each rank in a batch

def samples_of(n, name, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randn(n, 3, generator=g) if isinstance(losses[name], nn.MSELoss) else torch.randint(0, 3, (n,), generator=g)
    return torch.randn(n, 4, generator=g),y

def loss_and_grad(f, w, x, y):
    w = w.clone().requires_grad_()
    l = f(x@w, y) if len(x) else w.sum()*0 # a rank without a part has a sample that counts for nothing
    l.backward()
    return l.detach().double(),w.grad.double()

def scale_of(f, y, planned, size, fraction):
    "The scale of a rank with the targets `y`"
    v = normaliser(f, y)*size/planned if has_normaliser(f) and len(y) else None
    return BatchScale(len(y)*size/planned, size, is_summed(f), v, fraction)

def parts(f, w, x, y, ns, planned, fraction=1.):
    "Of each rank its scale, its loss and its gradient"
    return [(scale_of(f, b, planned, len(ns), fraction),*loss_and_grad(f, w, a, b)) for a,b in zip(x.split(ns), y.split(ns))]

def of_ranks(found):
    num,den = torch.stack([s.numbers(l.float()) for s,l,_ in found]).double().mean(0)
    return num/den,sum(s.weight*g for s,_,g in found if s.weight)/len(found)/den

def counts(f, y): return not has_normaliser(f) or normaliser(f, y)>0

@settings(max_examples=60, deadline=None)
@given(names, shares, st.integers(0, 99))
def test_one_batch(name, ns, seed):
    f,(x,y),w = losses[name],samples_of(sum(ns), name, seed),torch.randn(4, 3)
    if not counts(f, y): return
    one,many = loss_and_grad(f, w, x, y),of_ranks(parts(f, w, x, y, ns, sum(ns)))
    for a,b in zip(one, many): torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)

@settings(max_examples=40, deadline=None)
@given(names, shares, st.integers(1, 20), st.integers(0, 99))
def test_a_batch_of_another_size_than_planned(name, ns, more, seed):
    "The mean denominator makes up for it"
    f,(x,y),w = losses[name],samples_of(sum(ns), name, seed),torch.randn(4, 3)
    if not counts(f, y): return
    for a,b in zip(loss_and_grad(f, w, x, y), of_ranks(parts(f, w, x, y, ns, sum(ns)+more))): torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)

class Loader(DistributedDL):
    "Batches of as many samples as `sizes` says"
    def __init__(self, sizes): self.sizes = sizes
    def total(self, k): return self.sizes[k]

@settings(max_examples=30, deadline=None)
@given(st.sampled_from(['mean','targets','ignored','weighted']), st.lists(st.lists(st.integers(1, 4), min_size=2, max_size=2), min_size=1, max_size=5), st.integers(2, 3), st.integers(0, 99))
def test_a_window_of_batches_is_one_batch(name, batches, every, seed):
    "For two ranks, with a last window of fewer batches"
    f,w = losses[name],torch.randn(4, 3)
    totals,win = [sum(o) for o in batches],AccumulationWindow(every)
    x,y = samples_of(sum(totals), name, seed)
    grad,den,scales,lo = 0.,0.,0.,0
    for k,(ns,m) in enumerate(zip(batches, totals)):
        win.plan(Loader(totals), k, len(totals))
        if k%every==0: first,grad,den,scales = lo,0.,0.,0.
        for s,l,g in parts(f, w, x[lo:lo+m], y[lo:lo+m], ns, m, win.fraction):
            if not s.weight: continue
            grad,den = grad+s.factor()*g/2,den+s.denominator*win.fraction/2
        scales,lo = scales+win.fraction,lo+m
        if win.ends and counts(f, y[first:lo]):
            test_close(scales, 1.)
            torch.testing.assert_close(grad/den, loss_and_grad(f, w, x[first:lo], y[first:lo])[1], rtol=1e-5, atol=1e-5)
    assert win.ends

@settings(max_examples=40, deadline=None)
@given(names, st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 30), st.integers(0, 20), st.integers(0, 99))
def test_a_batch_under_gradient_accumulation(name, ns, n_acc, fewer, seed):
    "fastai's callback multiplies the loss in one process by all samples over `n_acc`; some were left out of what was planned"
    f,(x,y),w,size = losses[name],samples_of(sum(ns), name, seed),torch.randn(4, 3),len(ns)
    if not counts(f, y): return
    win,planned = AccumulationWindow(callback=GradientAccumulation(n_acc)),sum(ns)+fewer
    win.plan(Loader([planned]), 0, 1)
    found = parts(f, w, x, y, ns, planned, win.fraction)
    means = [sum(getattr(s, k) for s,*_ in found)/size for k in ('samples','denominator')] if name!='mean' else (1.,1.)
    grad = sum(s.factor(*means)*g for s,_,g in found if s.weight)/size
    torch.testing.assert_close(grad, loss_and_grad(f, w, x, y)[1]*sum(ns)/n_acc, rtol=1e-5, atol=1e-5)

@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 20))
def test_gradient_accumulation_steps_where_one_process_does(totals, n_acc):
    win,count = AccumulationWindow(callback=GradientAccumulation(n_acc)),0
    for k,m in enumerate(totals):
        win.plan(Loader(totals), k, len(totals))
        count += m
        test_eq(win.ends, count>=n_acc)
        if win.ends: count = 0

@pytest.mark.parametrize('scale', (BatchScale(0., 2), BatchScale(0., 2, summed=True), BatchScale(1., 2, counted=0)))
def test_a_rank_without_a_part_may_have_no_number(scale): test_eq(scale.numbers(tensor(math.nan))[0].item(), 0.)
