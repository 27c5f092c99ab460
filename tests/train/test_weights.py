"What a rank's loss weighs, whatever people do to a batch, to its loss, or between two steps: N ranks compute what one process computes, or say so"
import pytest,warnings
from contextlib import nullcontext
from torch.nn import functional as F
from torch.utils.data import default_collate
from fastcore.test import test_close,test_eq
from fastai.basics import *
from fastai.callback.all import *
from fastai.text.all import RNNRegularizer
from fastdist import *
from collectives import counting
from half import CpuHalf

weight = tensor([1.,3.,.2])

class Data:
    "`n` samples that are the same in each process; every third has a feature above all others'"
    def __init__(self, n=53):
        g = torch.Generator().manual_seed(0)
        self.x,self.y = torch.randn(n, 6, generator=g),torch.randint(0, 3, (n,), generator=g)
        self.x[::3,0] = 5.
    def __len__(self): return len(self.x)
    def __getitem__(self, i): return self.x[i],self.y[i]

def net(bn=False): return nn.Sequential(nn.Linear(6,8), *[nn.BatchNorm1d(8)]*bn, nn.Tanh(), nn.Linear(8,3))

def learner(bs, loss=CrossEntropyLossFlat, bn=False, n=53, **kw):
    set_seed(3)
    dls = DataLoaders(*[DataLoader(Data(n), bs, shuffle=o, device='cpu', **kw) for o in (True,False)])
    return Learner(dls, net(bn), loss_func=loss(), opt_func=partial(SGD, mom=.9))

def fitted(learn, ctx=True, cbs=None, lr=.05, **kw):
    "Weights, smoothed losses, what the recorder holds, and what was said"
    with warnings.catch_warnings(record=True) as said, learn.distrib_ctx(**kw) if ctx else nullcontext(), learn.no_bar(), learn.no_logging():
        warnings.simplefilter('always')
        learn.fit(2, lr, cbs=cbs)
    weights = torch.cat([o.detach().float().flatten() for o in learn.model.state_dict().values()]).tolist()
    return weights,L(learn.recorder.losses).map(float),L(learn.recorder.values).map(list),[str(o.message) for o in said if issubclass(o.category, UserWarning)]

def compare(mk, cbs=noop, size=2, tol=1e-5, bs=12, n=3, said=None, lr=.05):
    "Of `mk(bs)` in one process, and on `size` ranks, the first `n` results; rank 0 says what matches `said`, once"
    one = fitted(mk(bs), ctx=False, cbs=cbs(), lr=lr)
    many = on_ranks(lambda rank: fitted(mk(bs//size), cbs=cbs(), lr=lr), size, join=False)
    for o in many:
        for a,b in zip(one[:n], o[:n]): test_close(a, b, tol)
    test_eq([len([s for s in o[3] if (said or 'rank') in s]) for o in many], [1 if said else 0]+[0]*(size-1))

sizes = pytest.mark.parametrize('size', (2,3))

# Losses with an attribute

class Mine(nn.Module):
    "Of a user, who keeps torch's attribute and does as he likes"
    def __init__(self, f, reduction='mean'):
        super().__init__()
        self.f,self.reduction = f,reduction
    def forward(self, p, y): return self.f(p, y)

def total(p, y): return F.cross_entropy(p, y, reduction='sum')/8
def mean(p, y): return F.cross_entropy(p, y)
def weighed(p, y): return F.cross_entropy(p, y, weight=weight)
def hinge(p, y): return (p.softmax(1).max(1)[0]-.42).relu().sum()
def hardest(p, y): return F.cross_entropy(p, y, reduction='none').topk(2)[0].mean()
class Worst(nn.CrossEntropyLoss):
    def forward(self, p, y): return hardest(p, y)

@pytest.mark.whole
@sizes
@pytest.mark.parametrize('f', (total,mean,hinge))
@pytest.mark.by_default('mean', 'hinge')
def test_an_attribute_is_not_believed(f, size): compare(lambda bs: learner(bs, lambda: Mine(f)), size=size)

@pytest.mark.whole
@pytest.mark.parametrize('loss', (lambda: Mine(weighed), lambda: Mine(hardest), Worst, lambda: partial(two_ways, reduction='mean')))
@pytest.mark.by_default('<lambda>0', 'Worst')
def test_an_attribute_that_is_wrong_is_told(loss): compare(lambda bs: learner(bs, loss), n=0, said='neither a sum nor a mean')

@pytest.mark.whole
@sizes
def test_label_smoothing_with_class_weights_is_told_what_is_exact(size):
    compare(lambda bs: learner(bs, lambda: LabelSmoothingCrossEntropyFlat(weight=weight)), n=0, size=size, said='two means, one over samples')
    compare(lambda bs: learner(bs, lambda: CrossEntropyLossFlat(weight=weight, label_smoothing=.1)), size=size)

def two_ways(p, y, reduction): return weighed(p, y)

calls = []
def logs(p, y): return calls.append(1) or total(p, y)

@pytest.mark.whole
def test_where_the_batch_does_not_tell_the_attribute_does(): compare(lambda bs: learner(bs, lambda: Mine(logs, 'sum')), size=3)

def asked(rank, n, f):
    with counting() as ran: fitted(learner(4, lambda: f, n=n))
    return ran['c10d::allgather_']

def nothing(p, y): return p.sum()*0

@pytest.mark.whole
def test_a_loss_that_tells_nothing_is_asked_ever_more_rarely():
    few,many = [on_ranks(lambda rank: asked(rank, n, nothing), join=False)[0] for n in (64,512)]
    assert many-few<20, (few,many)

# Batches of another size than planned

class Leaves(Callback):
    "Trains on the samples that `keep` wants"
    def __init__(self, keep): self.keep = keep
    def before_batch(self):
        if not self.training: return
        m = self.keep(self.x)
        self.learn.xb,self.learn.yb = (self.x[m],),(self.y[m],)

def low(x): return x[:,0]<2
def few(x): return x[:,1]>.9
def twice(x): return torch.cat([torch.arange(len(x)), (x[:,0]>2).nonzero()[:,0]])

@sizes
@pytest.mark.parametrize('bn', (False,True))
@pytest.mark.parametrize('keep', (low,few,twice))
def test_a_callback_leaves_samples_out(keep, bn, size):
    if keep is few and bn: return # one process refuses a batch of one sample
    compare(lambda bs: learner(bs, FocalLossFlat, bn=bn), lambda: Leaves(keep), size, 1e-4 if bn else 1e-5)

kinds = *[partial(CrossEntropyLossFlat, **kw) for kw in (dict(weight=weight), dict(ignore_index=1), dict(reduction='sum'))],

@pytest.mark.whole
@pytest.mark.parametrize('loss', (*kinds, lambda: Mine(mean)))
@pytest.mark.by_default('loss0', '<lambda>')
def test_samples_left_out_of_other_losses(loss): compare(lambda bs: learner(bs, loss), lambda: Leaves(low), 3, lr=.01)

def drops(b): return default_collate([o for o in b if o[0][0]<2])

@pytest.mark.whole
@sizes
def test_a_collate_function_drops_samples(size): compare(lambda bs: learner(bs, FocalLossFlat, n=48, create_batch=drops), size=size, bs=24, n=2)

class SecondPass(Callback):
    "Another pass over what is left of the batch"
    def after_backward(self): (.5*self.loss_func(self.model(*self.xb), *self.yb)).backward()

@pytest.mark.whole
@sizes
def test_other_passes_over_what_is_left(size): compare(lambda bs: learner(bs, FocalLossFlat), lambda: [Leaves(low),SecondPass()], size)

def test_one_process_leaves_out_what_ranks_do_in_a_window():
    one = fitted(learner(24, FocalLossFlat, n=48), ctx=False, cbs=Leaves(low))
    many = on_ranks(lambda rank: fitted(learner(6, FocalLossFlat, n=48), cbs=Leaves(low), gradient_accumulation_steps=2), join=False)
    for o in many: test_close(one[0], o[0], 1e-5)

@pytest.mark.whole
@sizes
@pytest.mark.parametrize('n_acc', (24,30))
@pytest.mark.by_default('30')
def test_windows_of_batches_that_shrink(n_acc, size): compare(lambda bs: learner(bs, FocalLossFlat), lambda: [Leaves(low),GradientAccumulation(n_acc)], size)

# Windows

@pytest.mark.whole
@sizes
@pytest.mark.parametrize('loss', kinds)
@pytest.mark.parametrize('cbs', (lambda: [], lambda: [Leaves(low)]))
@pytest.mark.by_default('<lambda>0')
def test_each_batch_of_a_window_has_its_own_normaliser(loss, cbs, size):
    compare(lambda bs: learner(bs, loss), lambda: [GradientAccumulation(30),*cbs()], size, lr=.01)

# What is added to a loss

class Decay(Callback):
    "A penalty on weights"
    def after_loss(self):
        if self.training: self.learn.loss_grad += .3*sum(p.square().sum() for p in self.model.parameters())

class Assigned(Callback):
    def after_loss(self):
        if self.training: self.learn.loss_grad = 2*self.loss_grad+.3*sum(p.square().sum() for p in self.model.parameters())/2

class Activity(Callback):
    "A penalty on what the model gives, a mean over samples"
    def after_loss(self):
        if self.training: self.learn.loss_grad = self.loss_grad+.3*self.pred.square().mean()

class Flood(Callback):
    def after_loss(self):
        if self.training: self.learn.loss_grad = (self.loss_grad-.9).abs()+.9

class Hardest(Callback):
    def after_loss(self):
        if self.training: self.learn.loss_grad = hardest(self.pred, self.y)

def sums(): return CrossEntropyLossFlat(reduction='sum')

@pytest.mark.replicas
@sizes
@pytest.mark.parametrize('cb', (Decay,Assigned))
@pytest.mark.parametrize('loss', (sums,CrossEntropyLossFlat,partial(CrossEntropyLossFlat, weight=weight)))
@pytest.mark.by_default('CrossEntropyLossFlat', 'sums')
def test_a_penalty_counts_once(loss, cb, size): compare(lambda bs: learner(bs, loss), cb, size, lr=.005, n=1 if cb is Assigned else 3)

@pytest.mark.whole
@pytest.mark.replicas
@pytest.mark.parametrize('n_acc', (None,30))
@pytest.mark.by_default('30')
def test_a_penalty_of_a_window(n_acc):
    compare(lambda bs: learner(bs, sums), lambda: [Decay(), *([GradientAccumulation(n_acc)] if n_acc else [])], 3, lr=.002)

@pytest.mark.whole
@pytest.mark.parametrize('cb', (pytest.param(Decay, marks=pytest.mark.replicas),Activity))
@pytest.mark.by_default('Activity')
def test_a_term_of_a_mean(cb): compare(lambda bs: learner(bs, FocalLossFlat), cb, 3)

class Outputs(Callback):
    "As fastai's `RNNCallback`, for any model"
    order = RNNRegularizer.order-1
    name = 'rnn'
    def after_pred(self): self.out,self.raw_out = self.pred[:,None],self.pred.view(-1, 3, 1)

@sizes
@pytest.mark.parametrize('loss', (sums,CrossEntropyLossFlat))
@pytest.mark.by_default('sums')
def test_what_fastai_adds(loss, size): compare(lambda bs: learner(bs, loss, n=54), lambda: [Outputs(),RNNRegularizer(2.,1.)], size, lr=.005) # which adds nothing to a batch of one sample

@pytest.mark.parametrize('loss,cb', [(CrossEntropyLossFlat,Flood), (sums,Flood), (CrossEntropyLossFlat,Hardest), (sums,Activity)])
@pytest.mark.by_default('CrossEntropyLossFlat-Flood', 'sums-Activity')
def test_what_cannot_be_exact_is_said(loss, cb): compare(lambda bs: learner(bs, loss), cb, n=0, said=cb.__name__, lr=.002)

@pytest.mark.parametrize('cbs', (lambda: MixUp(), lambda: CpuHalf('bf16'), lambda: [GradientClip(.1),GradientAccumulation(24)], lambda: Leaves(low)))
@pytest.mark.by_default('<lambda>0', '<lambda>3')
def test_no_false_alarm(cbs): compare(lambda bs: learner(bs, sums), cbs, n=0, lr=.002)

@pytest.mark.whole
def test_a_rank_without_a_part_and_batch_norm(): compare(lambda bs: learner(bs, bn=True, n=50), size=3, tol=1e-4)
