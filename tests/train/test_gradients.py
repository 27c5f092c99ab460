"Whatever makes gradients, and whoever takes the step, ranks compute what one process computes"
import io,pytest
from contextlib import nullcontext,redirect_stderr
from fastcore.test import test_close,test_eq
from fastai.vision.all import *
from fastai.vision.gan import *
from torch.nn.utils.prune import l1_unstructured
from accelerate.utils import DDPCommunicationHookType,DistributedDataParallelKwargs
from fastdist import *
from collectives import counting
from half import halved

class Data:
    "`n` samples that are the same in each process"
    def __init__(self, n=41, out=3):
        g = torch.Generator().manual_seed(0)
        self.x,self.y = torch.randn(n, 8, generator=g),torch.randint(0, out, (n,), generator=g)
    def __len__(self): return len(self.x)
    def __getitem__(self, i): return self.x[i],self.y[i]

def net(): return nn.Sequential(nn.Linear(8,6), nn.Tanh(), nn.Linear(6,3))

def learner(bs, cls=Learner, data=Data, model=net, opt=partial(SGD, mom=.9), loss=CrossEntropyLossFlat, **kw):
    set_seed(3)
    ds = data()
    dls = DataLoaders(*[DataLoader(ds, bs, shuffle=o, device='cpu') for o in (True,False)])
    return cls(dls, model(), loss_func=loss(), opt_func=opt, **kw)

def fitted(learn, ctx=True, epochs=2, cbs=None, **kw):
    with learn.distrib_ctx(**kw) if ctx else nullcontext(), learn.no_bar(), learn.no_logging(): learn.fit(epochs, .05, cbs=cbs)
    ps = [*learn.model.state_dict().values(), *L(learn.opt.param_lists).concat()]
    return torch.cat([o.detach().float().flatten() for o in ps]).tolist(),L(learn.recorder.losses).map(float),L(learn.recorder.values).map(list)

def compare(mk, cbs=noop, size=2, tol=1e-5, bs=12, n=3, **kw):
    "Of `mk(bs)` in one process, and on `size` ranks, the first `n` of weights, smoothed losses and what the recorder holds"
    one = fitted(mk(bs), ctx=False, cbs=cbs())
    for o in on_ranks(lambda rank: fitted(mk(bs//size), cbs=cbs(), **kw), size, join=False):
        for a,b in zip(one[:n], o[:n], strict=True): test_close(a, b, tol)

unused = dict(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
replicas = pytest.mark.replicas
kws = pytest.mark.parametrize('kw', ({}, pytest.param(unused, marks=replicas)))
sizes = pytest.mark.parametrize('size', (2,3))

# Another model, another optimizer, other layers

class NewModel(Callback):
    "Puts a wider model in the Learner"
    def __init__(self, event, opt): setattr(self, event, partial(self.put, opt))
    def put(self, opt):
        if not self.training or self.epoch!=1 or getattr(self, 'done', False): return
        self.done = True
        set_seed(4)
        self.learn.model = nn.Sequential(nn.Linear(8,9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9,3)) if opt else nn.Sequential(self.learn.model, nn.Tanh())
        if opt: self.learn.create_opt()
        self.learn.opt.set_hypers(lr=.05)

@pytest.mark.whole
@pytest.mark.parametrize('event,opt,size', [('before_epoch',True,2), ('before_train',True,3), ('before_batch',True,3), ('before_batch',False,2), ('before_epoch',False,3)])
@pytest.mark.by_default('before_train')
def test_another_model(event, opt, size): compare(learner, lambda: NewModel(event, opt), size)

class Empties(nn.Module):
    "As fastai's models for tables of categories only: a norm of nothing, which is not called; and parameters of nothing that are used"
    def __init__(self):
        super().__init__()
        self.none,self.lin,self.nothing = nn.BatchNorm1d(0),nn.Linear(8,3),nn.Parameter(torch.zeros(0,3))
    def forward(self, x): return self.lin(x)+x[:,:0]@self.nothing

class Prints(Callback):
    def after_batch(self): float(self.loss)

class PrintsAtEnd(Callback):
    def after_epoch(self): float(self.recorder.losses[-1])

def said_of(rank, *cbs, **kw):
    with redirect_stderr(io.StringIO()) as said: fitted(learner(6), cbs=list(cbs), **kw)
    return [o for o in said.getvalue().splitlines() if 'learn.loss' in o]

@pytest.mark.whole
def test_who_may_read_a_loss_within_a_window_is_named():
    (a,),others = on_ranks(lambda rank: said_of(rank, Prints(), GradientAccumulation(24)), join=False)
    assert 'Prints may read' in a and 'fastdist-check' in a and not others
    right = [PrintsAtEnd(),TerminateOnNaNCallback(),GradientClip(1.),GradientAccumulation(24)]
    for cbs,kw in ((right,{}), ([Prints()],{}), ([PrintsAtEnd()],dict(gradient_accumulation_steps=2))):
        test_eq(on_ranks(lambda rank: said_of(rank, *cbs, **kw), join=False), [[],[]])

class EveryOther(Callback):
    "Steps after every other batch, as a user's own accumulation does"
    def before_step(self):
        if self.iter%2==0: raise CancelBatchException()

def three_fits(bs, ctx, first, then):
    "Weights after each of three fits with a loss with class weights; one batch of four is left over in a window of two"
    learn,res = learner(bs, loss=partial(CrossEntropyLossFlat, weight=torch.tensor([1.,3.,.2]))),[]
    with learn.distrib_ctx() if ctx else nullcontext(), learn.no_bar(), learn.no_logging():
        for cb in (first,then,then):
            learn.fit(1, .05, cbs=cb())
            res += [getattr(p, 'full_tensor', lambda p=p: p)().detach().flatten().clone() for p in learn.model.parameters()]
    return torch.cat(res).tolist()

window = partial(GradientAccumulation, 24)
@pytest.mark.whole
@sizes
@pytest.mark.parametrize('first,then', [(window,noop), (window,window), (window,EveryOther), (EveryOther,noop)])
@pytest.mark.by_default('first1', 'EveryOther-noop')
def test_gradients_of_steps_that_were_not_made(first, then, size):
    one = three_fits(12, False, first, then)
    for o in on_ranks(lambda rank: three_fits(12//size, True, first, then), size, join=False): test_close(o, one, 1e-5)

@pytest.fixture
def doubles():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)

class Doubles(Data):
    def __getitem__(self, i): return self.x[i].double(),self.y[i]

@pytest.mark.whole
@sizes
@pytest.mark.parametrize('loss', [CrossEntropyLossFlat,LabelSmoothingCrossEntropyFlat])
@pytest.mark.by_default('LabelSmoothing')
def test_double_precision(loss, size, doubles): compare(partial(learner, data=Doubles, loss=loss), size=size)

@pytest.mark.whole
@sizes
def test_parameters_without_elements(size): compare(partial(learner, model=Empties), size=size)

class Thaw(Callback):
    "Thaws what is frozen in the midst of an epoch, and freezes it again"
    def before_batch(self):
        if self.training and self.iter==1: self.learn.unfreeze()
        if self.training and self.iter==3: self.learn.freeze()

def halves(m): return [params(m[:1]),params(m[1:])]

def frozen(bs):
    learn = learner(bs, splitter=halves)
    learn.freeze()
    return learn

@pytest.mark.whole
@sizes
@kws
@pytest.mark.by_default('kw1')
def test_a_layer_thawed_in_an_epoch(kw, size): compare(frozen, Thaw, size, **kw)

# A loss that learns

class Tempered(nn.Module):
    "A temperature and a penalty, of which the ranks begin with other ones"
    def __init__(self, **kw):
        super().__init__()
        self.t,self.ce = nn.Parameter(torch.ones(3)),CrossEntropyLossFlat(**kw)
    def forward(self, p, y): return self.ce(p*self.t, y)

def with_loss(bs, opt=partial(SGD, mom=.9), **kw):
    loss = Tempered(**kw)
    loss.reduction = 'mean'
    return learner(bs, opt=opt, loss=lambda: loss, splitter=lambda m: [params(m),params(loss)])

@pytest.mark.whole
@sizes
@kws
@pytest.mark.by_default('kw1')
def test_parameters_of_the_loss(kw, size): compare(with_loss, GradientClip, size, **kw)

# Other backward passes

class SAM(Callback):
    "A second pass where the first one points to"
    def after_backward(self):
        ps = [p for p in self.model.parameters() if p.grad is not None]
        es = [p.grad*.05/torch.stack([p.grad.norm() for p in ps]).norm() for p in ps]
        with torch.no_grad(): [p.add_(e) for p,e in zip(ps, es)]
        self.opt.zero_grad()
        self.loss_func(self.model(*self.xb), *self.yb).backward()
        with torch.no_grad(): [p.sub_(e) for p,e in zip(ps, es)]

@sizes
@pytest.mark.parametrize('cbs', (SAM, lambda: [SAM(),GradientClip(.1)]))
@pytest.mark.by_default('SAM-2')
def test_sam(cbs, size): compare(learner, cbs, size)

class SAMLearner(Learner):
    "The same with a step of its own"
    def _do_one_batch(self):
        self.pred = self.model(*self.xb)
        self('after_pred')
        self.loss_grad = self.loss_func(self.pred, *self.yb)
        self.loss = self.loss_grad.clone()
        self('after_loss')
        if not self.training: return
        self.loss_grad.backward()
        SAM.after_backward(self)
        self.opt.step()
        self.opt.zero_grad()

@pytest.mark.whole
@sizes
def test_sam_as_a_learner(size): compare(partial(learner, cls=SAMLearner), size=size)

class Adversarial(Callback):
    "Trains on what a first pass made of the batch"
    def before_batch(self):
        if not self.training: return
        x = self.xb[0].clone().requires_grad_()
        self.loss_func(self.model(x), *self.yb).backward()
        self.learn.xb = (x+.1*x.grad.sign()).detach(),
        if self.iter%2: self.opt.zero_grad()

class InTheMidst(Callback):
    "A pass while the loss of the batch is still to come"
    def after_loss(self):
        if self.training: self.loss_func(self.model(self.xb[0]*.5), *self.yb).backward()

class Penalty(Callback):
    "A penalty on the gradient with respect to what goes in"
    def before_batch(self): self.learn.xb = self.xb[0].requires_grad_(),
    def after_loss(self):
        if not self.training: return
        g, = torch.autograd.grad(self.pred.sum(), self.xb[0], create_graph=True)
        self.learn.loss_grad = self.loss_grad+.1*g.square().sum(1).mean()

class TwoSteps(Callback):
    "A step of the optimizer after one of its own"
    def after_step(self):
        self.opt.zero_grad()
        self.loss_func(self.model(*self.xb), *self.yb).backward()
        self.opt.step()

class ByHand(Callback):
    "Gradients that no backward pass has put where they are"
    def before_backward(self):
        ps = list(self.model.parameters())
        for p,g in zip(ps, torch.autograd.grad(self.loss_grad.as_subclass(torch.Tensor), ps)): p.grad = g.clone()
        raise CancelBackwardException()
    decides = True

@sizes
@pytest.mark.parametrize('cb', (Adversarial,InTheMidst,Penalty,TwoSteps,pytest.param(ByHand, marks=replicas)))
@pytest.mark.by_default('Adversarial', 'InTheMidst', 'ByHand')
def test_other_passes(cb, size): compare(learner, cb, size)

def ignores(): return CrossEntropyLossFlat(ignore_index=1)

@pytest.mark.parametrize('cb', (SAM,Adversarial,InTheMidst,TwoSteps,pytest.param(ByHand, marks=replicas)))
@pytest.mark.by_default('ByHand')
def test_a_mean_over_some_targets(cb):
    "One process divides each pass by the number of targets that count in its batch"
    compare(partial(learner, loss=ignores), cb, 3)

class Total(CrossEntropyLossFlat):
    def __init__(self, **kw): super().__init__(reduction='sum')

@pytest.mark.parametrize('cb', (SAM,InTheMidst,pytest.param(ByHand, marks=replicas)))
@pytest.mark.by_default('InTheMidst')
def test_sums(cb): compare(lambda bs: learner(bs, loss=Total, opt=partial(Adam, eps=1e-3)), cb, 3, tol=1e-4)

hooked = dict(kwargs_handlers=[DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)])

@pytest.mark.whole
@replicas
@pytest.mark.parametrize('cb,kw,tol', [(noop,hooked,1e-2), (SAM,hooked,1e-2), (InTheMidst,unused,1e-5), (SAM,unused,1e-5)])
@pytest.mark.by_default('InTheMidst')
def test_options_of_ddp(cb, kw, tol): compare(learner, cb, n=1, tol=tol, **kw)

# Two models

class Pairs(Data):
    "Noise that is the same in each process, and what is real"
    def __getitem__(self, i): return self.x[i,:4],self.x[i]

def gan(bs, **kw):
    set_seed(3)
    ds = Pairs()
    dls = DataLoaders(*[DataLoader(ds, bs, shuffle=o, device='cpu') for o in (True,False)])
    gen,critic = nn.Sequential(nn.Linear(4,6), nn.ReLU(), nn.Linear(6,8)),nn.Sequential(nn.Linear(8,6), nn.LeakyReLU(), nn.Linear(6,1))
    return GANLearner.wgan(dls, gen, critic, switcher=FixedGANSwitcher(n_crit=2, n_gen=1), clip=.3, opt_func=partial(Adam, mom=0., eps=1e-2), **kw)

@pytest.mark.whole
@pytest.mark.parametrize('gen_first,kw,size', [(False,{},2), (True,{},3), *[pytest.param(*o, marks=replicas) for o in ((False,unused,3), (True,unused,2))]])
@pytest.mark.by_default('True')
def test_gan(gen_first, kw, size):
    "In validation its metric of the critic's loss is what the last step of the critic has left, for the samples of all ranks"
    compare(partial(gan, gen_first=gen_first), size=size, **kw)

class Scaled(Callback):
    "SAM in half precision: the second pass is scaled too"
    def after_backward(self):
        ps = [p for p in self.model.parameters() if p.grad is not None]
        with torch.no_grad(): [p.add_(p.sign(), alpha=.01) for p in ps]
        loss = self.loss_func(self.model(*self.xb), *self.yb)
        (self.scaler.scale(loss) if hasattr(self.learn, 'scaler') else loss).backward()
        with torch.no_grad(): [p.sub_(p.sign(), alpha=.01) for p in ps]

def test_half_precision():
    one = fitted(learner(12), ctx=False, cbs=Scaled())
    res = on_ranks(lambda rank: fitted(halved(learner(6), init_scale=256.), cbs=[Scaled(),GradientClip(10.)], cpu=True), join=False)
    for o in res: test_close(one[0], o[0], 2e-2)

def test_accumulation():
    "The other pass of each batch is one of its own, with its own weight"
    compare(learner, lambda: [GradientAccumulation(24),TwoSteps()], 3, n=1)
    for o in on_ranks(lambda rank: fitted(with_loss(4), gradient_accumulation_steps=3, epochs=1), 3, join=False):
        test_close(fitted(with_loss(36), ctx=False, epochs=1)[0], o[0], 1e-5)

class Branches(nn.Module):
    "Of two layers a rank uses one, or both ranks do"
    def __init__(self, k):
        super().__init__()
        self.layer,self.layers = k,nn.ModuleList([nn.Linear(8,3),nn.Linear(8,3)])
    def forward(self, x): return self.layers[self.layer](x)

class Extra(Callback):
    "A second pass through a layer that not all ranks use"
    def after_backward(self):
        if self.training: self.model.layers[rank_distrib()%2](self.xb[0]).square().mean().backward()

@pytest.mark.whole
@replicas
def test_a_layer_that_one_rank_uses():
    def f(rank):
        kw = dict(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
        return fitted(learner(6, model=partial(Branches, rank%2)), cbs=Extra(), **kw)[0]
    res = on_ranks(f, 3, join=False)
    for o in res[1:]: test_eq(o, res[0])

# Parameters without a gradient, and parameters that were replaced

class Heads(nn.Module):
    "Uses its second head where `uses` says so"
    def __init__(self, uses):
        super().__init__()
        self.uses,self.n,self.body,self.a,self.b = uses,0,nn.Linear(8,6),nn.Linear(6,3),nn.Linear(6,3)
    def forward(self, x):
        self.n += self.training
        h = self.body(x).tanh()
        return self.a(h)+self.b(h) if self.uses(self.n) else self.a(h)

class SomeSamples(Heads):
    "The second head gets those samples of a batch that are far out, if there are some"
    def forward(self, x):
        h,far = self.body(x).tanh(),(x[:,0]>.8).nonzero()[:,0]
        return self.a(h).index_add(0, far, self.b(h[far])) if len(far) else self.a(h)

class SparseHead(nn.Module):
    "Has a table that it does not use"
    def __init__(self):
        super().__init__()
        self.a,self.table = nn.Linear(8,3),nn.Embedding(5, 3, sparse=True)
    def forward(self, x): return self.a(x)

never,later,flips = lambda n: False,lambda n: n>2,lambda n: n%3==0
heads = dict(never=partial(Heads, never), later=partial(Heads, later), flips=partial(Heads, flips), samples=partial(SomeSamples, never), sparse=SparseHead)
adamw = partial(OptimWrapper, opt=torch.optim.AdamW)

@replicas
@pytest.mark.timeout(100)
@pytest.mark.parametrize('size', (2,3))
@pytest.mark.parametrize('k', heads)
@pytest.mark.by_default('later', 'flips', 'sparse')
def test_parameters_that_some_steps_do_not_use(k, size):
    "The optimizer leaves alone what has never had a gradient, and lets weights decay that had one once"
    opt = partial(SGD, mom=0.) if k=='sparse' else partial(Adam, eps=1e-3)
    compare(partial(learner, model=heads[k], opt=opt), size=size)

@pytest.mark.whole
@replicas
@pytest.mark.parametrize('k', ('never','flips'))
def test_unused_parameters_in_torchs_optimizers_and_windows(k):
    compare(partial(learner, model=heads[k], opt=adamw), size=3, tol=1e-4)
    compare(partial(learner, model=heads[k]), partial(GradientAccumulation, 24), size=2, n=1)

class Replace(Callback):
    "Puts new parameters into the model"
    def __init__(self, event, put): setattr(self, event, partial(self.once, put))
    def once(self, put):
        if getattr(self, 'done', False) or getattr(self, 'epoch', None)==0 and not hasattr(self, 'before_fit'): return
        self.done = True
        put(self.learn)
        if self.learn.opt: self.learn.create_opt()
        self.learn.opt.set_hypers(lr=.05)

def new_head(learn):
    set_seed(4)
    learn.model[2] = nn.Linear(6,3)
def halve(learn): learn.model[2].weight = nn.Parameter(learn.model[2].weight.detach()/2)
def reparametrize(learn): nn.utils.parametrizations.weight_norm(learn.model[2])
def prune(learn): l1_unstructured(learn.model[2], 'weight', amount=.5)

@pytest.mark.whole
@replicas
@pytest.mark.parametrize('event,put,size', [('before_fit',new_head,2), ('before_batch',new_head,3), ('before_epoch',halve,2), ('before_epoch',reparametrize,3), ('before_batch',prune,2)])
@pytest.mark.by_default('before_fit', 'before_batch')
def test_parameters_that_a_callback_replaces(event, put, size): compare(learner, lambda: Replace(event, put), size)

# Trainings within a training

class Nested(Callback):
    "The same Learner"
    def before_epoch(self):
        if self.epoch!=1 or hasattr(self, 'epochs'): return
        self.epochs = self.n_epoch
        self.learn.fit(1, .05)
        self.learn.n_epoch,self.learn.epoch = self.epochs,1

class Inner(Callback):
    "Another Learner, of the same model"
    def after_epoch(self):
        inner = learner(12, model=lambda: self.model)
        with inner.no_bar(), inner.no_logging(): inner.fit(1, .05)

class OwnLoop(Callback):
    "No Learner"
    def after_epoch(self):
        self.model.train()
        for i in range(3):
            x,y = Data()[slice(i*6, i*6+6)]
            self.loss_func(self.model(x), y).backward()
            self.opt.step()
            self.opt.zero_grad()

class Other(Callback):
    "A model of the callback's"
    def before_fit(self):
        self.probe = nn.Linear(3,1)
        self.own_opt = torch.optim.SGD(self.probe.parameters(), lr=.1)
    def after_pred(self):
        if not self.training: return
        self.probe(self.pred.detach()).mean().backward()
        self.own_opt.step()

class OnRank0(OwnLoop):
    "One rank alone looks at gradients, and lets them be"
    rank0_only = True
    def after_epoch(self):
        self.loss_func(self.model(Data().x), Data().y).backward()
        self.opt.zero_grad()

@pytest.mark.whole
@pytest.mark.parametrize('cb', (Nested,Inner,OwnLoop,Other,pytest.param(OnRank0, marks=replicas)))
@pytest.mark.by_default('Nested', 'OwnLoop', 'OnRank0')
def test_trainings_within(cb): compare(learner, cb, 3, n=1)

# Steps of one's own

class Own(Learner):
    "fastai's step as people copy it"
    def _do_one_batch(self):
        self.pred = self.model(*self.xb)
        self('after_pred')
        if len(self.yb):
            self.loss_grad = self.loss_func(self.pred, *self.yb)
            self.loss = self.loss_grad.clone()
        self('after_loss')
        if not self.training or not len(self.yb): return
        self('before_backward')
        self.loss_grad.backward()
        self('after_backward')
        self('before_step')
        self.opt.step()
        self('after_step')
        self.opt.zero_grad()

class Old(Learner):
    "As it was before there was a `loss_grad`, with no events"
    def _do_one_batch(self):
        self.pred = self.model(*self.xb)
        self.loss = self.loss_func(self.pred, *self.yb)
        if not self.training: return
        self.loss.backward()
        self.opt.step()
        self.opt.zero_grad()

class Local(Learner):
    "Its loss has a name of its own, and is told at the end"
    def _do_one_batch(self):
        pred = self.model(*self.xb)
        loss = self.loss_func(pred, *self.yb)
        if self.training:
            loss.backward()
            self.opt.step()
            self.opt.zero_grad()
        self.pred,self.loss = pred,loss.detach()

class Two(Learner):
    "Two losses, each with a backward pass through the same forward pass"
    def _do_one_batch(self):
        self.pred = self.model(*self.xb)
        a,b = self.loss_func(self.pred, *self.yb),self.pred.square().mean()
        self.loss = a.detach()+b.detach()
        if not self.training: return
        a.backward(retain_graph=True)
        b.backward()
        self.opt.step()
        self.opt.zero_grad()

class Parts(Learner):
    "The layers are called one by one"
    def _do_one_batch(self):
        h = self.model[0](*self.xb)
        self.pred = self.model[2](self.model[1](h))
        self.loss_grad = self.loss_func(self.pred, *self.yb)
        self.loss = self.loss_grad.clone()
        if not self.training: return
        torch.autograd.backward([self.loss_grad, h], [None, torch.full_like(h, .01/len(h))])
        self.opt.step()
        self.opt.zero_grad()

owns = dict(own=Own, old=Old, local=Local, two=Two, parts=Parts)

@pytest.mark.whole
@sizes
@pytest.mark.parametrize('k', owns)
@pytest.mark.by_default('old', 'two', 'parts')
def test_a_step_of_ones_own(k, size): compare(partial(learner, cls=owns[k]), size=size)

class Assigned(Callback):
    "Puts its own step in the Learner's place of it for a fit"
    def before_fit(self): self.learn._do_one_batch = partial(Own._do_one_batch, self.learn)
    def after_fit(self): del self.learn._do_one_batch

class Around(Callback):
    "Does something around the Learner's own step"
    def before_fit(self): self.old,self.learn._do_one_batch = self.learn._do_one_batch,self.mine
    def after_fit(self): self.learn._do_one_batch = self.old
    def mine(self):
        self.learn.xb = self.xb[0]*1.5,
        self.old()

@pytest.mark.whole
@sizes
@pytest.mark.parametrize('cb', (Assigned,Around))
@pytest.mark.by_default('Around')
def test_a_step_that_a_callback_assigns(cb, size): compare(learner, cb, size)

@pytest.mark.whole
def test_a_step_that_was_assigned_before():
    def mk(bs):
        learn = learner(bs)
        learn._do_one_batch = partial(Own._do_one_batch, learn)
        return learn
    def kept(rank):
        learn = mk(6)
        mine = learn._do_one_batch
        fitted(learn)
        return learn._do_one_batch is mine
    compare(mk)
    test_eq(on_ranks(kept, join=False), [True]*2)

class Spoil(Callback):
    "One rank's loss is no number"
    def before_batch(self):
        if self.training and self.iter==2 and rank_distrib()==1: self.learn.xb = self.xb[0]*math.nan,

@pytest.mark.parametrize('k', owns)
@pytest.mark.by_default('own', 'parts')
def test_all_ranks_stop_at_nan(k):
    def f(rank):
        learn = learner(6, cls=owns[k])
        fitted(learn, cbs=[Spoil(),TerminateOnNaNCallback()])
        return len(learn.recorder.losses)
    test_eq(on_ranks(f, join=False), [2]*2)

# What cannot be averaged is an error before the step

def refused(rank, match, *cbs, **kw):
    learn = learner(6, **kw)
    before = [p.detach().clone() for p in learn.model.parameters()]
    with pytest.raises(RuntimeError, match=match): fitted(learn, cbs=cbs)
    return all(torch.equal(a, b) for a,b in zip(before, learn.model.parameters()))

class Second(Callback):
    def after_loss(self):
        if self.training: self.loss_grad.backward(create_graph=True)

class Sparse(nn.Sequential):
    def __init__(self): super().__init__(nn.Linear(8,3), nn.Embedding(4, 3, sparse=True))
    def forward(self, x): return self[0](x)+self[1](x[:,0].long().clamp(0,3))

faults = [('HINT: torch.autograd.grad', dict(cbs=Second())), (r'sparse gradient of shape \(4, 3\)', dict(model=Sparse, cls=Own))]

@replicas
@pytest.mark.parametrize('match,kw', faults)
def test_refused_before_the_step(match, kw):
    cbs = [InTheMidst()] if 'sparse' in match else []
    test_eq(on_ranks(lambda rank: refused(rank, match, *cbs, **kw), join=False), [True]*2)

def with_norm(): return nn.Sequential(nn.Linear(8,6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6,3))

@pytest.mark.whole
def test_a_gradient_of_a_gradient_past_batch_norm():
    "The statistics of all ranks are no function that is differentiated twice"
    test_eq(on_ranks(lambda rank: refused(rank, 'once_differentiable', Penalty(), model=with_norm), join=False), [True]*2)
    compare(partial(learner, model=with_norm), Penalty, n=0, sync_bn=False)

# Cost

def counted(rank, n, cls=Learner, **kw):
    learn = learner(4, cls, partial(Data, n))
    with counting() as ran: fitted(learn, epochs=1, **kw)
    return ran['c10d::allreduce_']

def per_step(**kw):
    a,b = [on_ranks(lambda rank: counted(rank, n, **kw), join=False)[0] for n in (64,128)]
    return (b-a)/8

@replicas
def test_one_exchange_a_pass(): test_eq([per_step(), per_step(cbs=SAM()), per_step(cls=Own)], [1,2,1])
