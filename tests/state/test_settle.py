"A fit that goes on from a state adds gradients of three ranks in the order in which the undisturbed one does"
import pytest
from copy import deepcopy
from accelerate.utils import DistributedDataParallelKwargs
from fastcore.test import test_eq
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from fastai.vision.all import *
from fastdist import *
from fastdist.parallel.layout import Carrier,Wrapped

pytestmark = pytest.mark.replicas # shards have no buckets

class Odd(nn.Module):
    "Its parameters are used in another order than the one in which they were made, one of them twice"
    def __init__(self):
        super().__init__()
        self.head,self.twice,self.body = nn.Linear(40,5),nn.Linear(40,40),nn.Linear(64,40)
    def forward(self, x): return self.head(self.twice(self.twice(self.body(x).relu()).relu()))

class Rnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb,self.rnn,self.head = nn.Embedding(50, 12),nn.LSTM(12, 24, 2, dropout=.3, batch_first=True),nn.Linear(24,5)
    def forward(self, x): return self.head(self.rnn(self.emb((x.abs()*20).long().clamp(max=49)))[0][:,-1])

class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb,self.head = nn.EmbeddingBag(50, 16, sparse=True),nn.Sequential(nn.Linear(16,90), nn.Linear(90,5))
    def forward(self, x): return self.head(self.emb((x.abs()*20).long().clamp(max=49)))

class Empties(nn.Module):
    "Has parameters without elements, one of them used"
    def __init__(self):
        super().__init__()
        self.none,self.body,self.nothing,self.head = nn.BatchNorm1d(0),nn.Linear(64,90),nn.Parameter(torch.zeros(0,5)),nn.Linear(90,5)
    def forward(self, x): return self.head(self.body(x).relu())+x[:,:0]@self.nothing

def mlp(): return nn.Sequential(nn.Linear(64,100), nn.BatchNorm1d(100), nn.ReLU(), nn.Dropout(.2), nn.Linear(100,5))
def cnn():
    body = ConvLayer(1, 9, stride=2),nn.Dropout2d(.2),ConvLayer(9, 16),nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(Reshape(1,8,8), *body, Flatten(), nn.Linear(16,5))
class Reshape(Module):
    def __init__(self, *shape): self.shape = shape
    def forward(self, x): return x.view(-1, *self.shape)

def learner(mk, done=0, n=101, opt=Adam, **kw):
    g = torch.Generator().manual_seed(0)
    data = list(zip(torch.randn(n, 64, generator=g), torch.randint(0, 5, (n,), generator=g)))[done:]
    set_seed(3)
    dls = DataLoaders.from_dsets(data, data[:8], bs=4, shuffle=False, drop_last=False, num_workers=0, device='cpu')
    return Learner(dls, mk(), loss_func=CrossEntropyLossFlat(), opt_func=opt, **kw)

class Leave(Callback):
    "Notes the state after `at` batches"
    def __init__(self, at): self.at,self.res = at,None
    def after_batch(self):
        if not self.training or self.train_iter!=self.at: return
        model,opt,layout = self.learn.model,self.opt,self.learn.distributed_trainer.layout
        self.res = deepcopy((model.state_dict(),opt.state_dict(),[p.grad for p in model.parameters()])),torch.get_rng_state(),layout.looks

class GoOn(Callback):
    "Begins from such a state"
    def __init__(self, state): self.state = state
    def before_batch(self):
        if self.state is None: return
        ((model,opt,grads),rng,looks),self.state = deepcopy(self.state),None
        self.learn.model.load_state_dict(model)
        self.opt.load_state_dict(opt)
        torch.set_rng_state(rng)
        for p,g in zip(self.learn.model.parameters(), grads): p.grad = g # fastai steps parameters whose gradient is zero, and none without
        self.learn.distributed_trainer.layout.looks = looks

def fitted(learn, cb, cbs=None, lr=.01, **kw):
    with learn.distrib_ctx(**kw), learn.no_bar(), learn.no_logging(): learn.fit(1, lr, cbs=[cb,*L(cbs)])
    return torch.cat([o.double().flatten() for o in learn.model.state_dict().values()])

def apart(rank, size, mk, at, cbs=lambda at: None, opt=Adam, **kw):
    "How many numbers differ between an undisturbed fit and one that went on after `at` batches"
    cb = Leave(at)
    whole = fitted(learner(mk, opt=opt), cb, cbs(0), **kw)
    return (fitted(learner(mk, at*4*size, opt=opt), GoOn(cb.res), cbs(at), **kw)!=whole).sum().item()

def check(size, *args, **kw):
    test_eq(on_ranks(lambda rank: apart(rank, size, *args, **kw), size), [0]*size)

@pytest.mark.parametrize('mk', [mlp,cnn,Rnn,Odd,Empties])
@pytest.mark.by_default('mlp')
def test_first_step_is_bit_for_bit(mk): check(3, mk, 4)

class Branches(Module):
    "The second branch gets its first gradient in batch 6, the third none"
    def __init__(self): self.first,self.second,self.third,self.n = nn.Linear(64,5),nn.Linear(64,5),nn.Linear(64,5),0
    def forward(self, x): return self.first(x)+(self.second(x) if self.n>=6 else 0)

class Count(Callback):
    order = -5
    def __init__(self, done): self.done = done
    def before_batch(self): self.model.n = self.train_iter+self.done

@pytest.mark.whole
@pytest.mark.parametrize('at', [1,4,6,7])
@pytest.mark.by_default('4')
def test_parameters_that_are_used_late(at): check(3, Branches, at, cbs=Count)

class Experts(Module):
    "The second expert has no gradient on the last rank in batches 0 and 6"
    def __init__(self): self.first,self.second,self.n = nn.Linear(64,5),nn.Linear(64,5),0
    def forward(self, x):
        last = this_world().rank==this_world().size-1
        return self.first(x)+(0 if last and self.n in (0,6) else self.second(x))

@pytest.mark.parametrize('size', [2,3,4])
def test_parameters_that_some_rank_does_not_use(size):
    "A state between two such batches, after which the fit has to look for them as before"
    check(size, Experts, 4, cbs=Count)

@pytest.mark.whole
def test_sparse_gradients(): check(3, Sparse, 4, opt=SGD, lr=.5) # plain SGD makes little of a last digit

@pytest.mark.parametrize('at', [1,5])
@pytest.mark.whole
def test_four_ranks_and_a_state_of_the_first_step(at): check(4, Odd, at)

@pytest.mark.whole
@pytest.mark.parametrize('options', [dict(bucket_cap_mb=.01), dict(comm_hook='fp16')])
@pytest.mark.by_default('options1')
def test_options_of_ddp(options): check(3, mlp, 4, kwargs_handlers=[DistributedDataParallelKwargs(**options)])

@pytest.mark.whole
def test_within_accumulation(): check(3, mlp, 4, gradient_accumulation_steps=2)

class Thaw(Callback):
    "The first layer learns in some batches of the fit, and `done` of them were before this Learner's"
    def __init__(self, done): self.done = done
    def before_batch(self):
        k = self.train_iter+self.done
        self.learn.model[0].requires_grad_(k<2 or 4<=k<6)

@pytest.mark.whole
@pytest.mark.parametrize('at', [1,3,5])
def test_wrappers_that_are_made_later(at): check(3, mlp, at, cbs=Thaw)

@pytest.mark.whole
@pytest.mark.parametrize('size,options', [(2,{}), (3,dict(find_unused_parameters=True))])
@pytest.mark.by_default('3-options1')
def test_buckets_that_stay_as_they_are(size, options):
    check(size, mlp, 4, kwargs_handlers=[DistributedDataParallelKwargs(**options)])

def nothing_moves(rank):
    model,seen = mlp(),[]
    model.register_forward_hook(lambda *_: seen.append(1))
    model[0].weight.register_hook(lambda g: seen.append('gradient'))
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append('accumulated'))
    ddp,old = DistributedDataParallel(Carrier(model)),[p.grad for p in model.parameters()]
    model[0].weight.grad = g = torch.full_like(model[0].weight, rank)
    before,rng = deepcopy(model.state_dict()),torch.get_rng_state()
    with torch.no_grad(): Wrapped(ddp, ddp.module.carry).lay()
    test_eq((seen,model[0].weight.grad is g,g.mean().item(),[p.grad for p in model.parameters()][1:]), ([],True,rank,old[1:]))
    assert_close(model.state_dict(), before, rtol=0, atol=0)
    test_eq(rng, torch.get_rng_state())
    torch.autograd.backward((ddp(torch.ones(4,64)).sum(),ddp.module.carry), (None,torch.zeros_like(ddp.module.carry)))
    return seen,[n for n,p in model.named_parameters() if p.grad is None]

def test_nothing_else_moves(): test_eq(on_ranks(nothing_moves, 3), [([1,'gradient','accumulated'],[])]*3)
