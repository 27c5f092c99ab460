"In shards, N ranks with batch size `bs` compute what one process computes with `N*bs`; each number of ranks is forked once, for all cases"
import pytest,traceback
from contextlib import nullcontext
from tempfile import TemporaryDirectory
from torch.utils.data import DataLoader as TorchLoader
from accelerate.utils import FullyShardedDataParallelPlugin
from fastcore.test import test_close,test_eq
from fastai.text.all import AWD_LSTM,TextDataLoaders,awd_lstm_lm_config,language_model_learner
from fastai.vision.all import *
from fastdist import *
from fastdist.comm.collectives import broadcast_obj,gather_objs
from compare import cases,difference,usual
from half import halved
from test_gradients import Penalty
from test_preds import pictures
import learners

whole_between = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=False)

def data(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    return list(zip(torch.randn(n, 8, generator=g), torch.randint(0, 3, (n,), generator=g)))

def net(bn=False):
    "Three units, none of which has a number of rows that two, three and four divide"
    return nn.Sequential(nn.Linear(8,7), *[nn.BatchNorm1d(7)]*bn, nn.Tanh(), nn.Linear(7,5), nn.Tanh(), nn.Linear(5,3))

def parts(m): return L(m[:2],m[2:4],m[4:]).map(params)

def small(bs, n=37, bn=False, opt=SGD, **kw):
    set_seed(3)
    dls = DataLoaders.from_dsets(data(n), data(7, 1), bs=bs, shuffle=True, drop_last=False, num_workers=0, device='cpu')
    return Learner(dls, net(bn), loss_func=CrossEntropyLossFlat(), opt_func=opt, metrics=[accuracy,F1Score(average='macro')], **kw)

def fitted(learn, ctx, cbs, f, n, **kw):
    "The first `n` of a Learner's weights afterwards, and what it reports"
    with learn.distrib_ctx(shard=True, **kw) if ctx else nullcontext(), learn.no_bar(), learn.no_logging():
        learn.add_cbs(L(cbs and cbs()))
        f(learn)
        losses,values,preds = [float(o) for o in learn.recorder.losses],learn.recorder.values,learn.get_preds() if n==4 else None
    return ([o.detach().float() for o in learn.model.state_dict().values()],losses,values,preds)[:n]

def case(mk=small, cbs=None, f=lambda o: o.fit(2, .05), tol=1e-5, n=4, full=None, **kw):
    "A function of context and size, and its tolerance; `full` makes the Learner of one process where it is another, of whose results the first `n` are compared"
    def run(ctx, size): return fitted((mk if ctx else full or mk)(12//size), ctx, cbs, f, n, **(kw if ctx else {}))
    return run,tol

class Coupled(torch.optim.Optimizer):
    "Steps by the norm of all gradients, which it computes in place, with a state in another shape than the parameter"
    def __init__(self, params, lr=.1): super().__init__(params, dict(lr=lr))
    @torch.no_grad()
    def step(self, closure=None):
        ps = [p for g in self.param_groups for p in g['params'] if p.grad is not None]
        size = torch.zeros(()).add_(sum(p.grad.norm().pow_(2) for p in ps)).sqrt_()
        for p in ps:
            s = self.state[p]
            s['rows'] = s.get('rows', 0)*.9+p.grad.reshape(len(p), -1).square().mean(1).add_(1e-3)
            s['mom'] = s.get('mom', 0)*.9+p.grad
            p.sub_((s['mom'].view(len(p), -1)/s['rows'].sqrt()[:,None]).view_as(p), alpha=self.param_groups[0]['lr']/(1+size.item()))

def no_bias(opt):
    def mk(bs):
        learn = small(bs, opt=opt)
        for m in (learn.model[0],learn.model[2],learn.model[4]): m.bias = None
        return learn
    return case(mk)

class Masked(Callback):
    "Keeps a mask computed from weights as a buffer, and applies it"
    def before_batch(self):
        m = self.model[0]
        m.register_buffer('mask', (m.weight.detach().abs()>.05)*1.)
        with torch.no_grad(): m.weight.mul_(m.mask)

adamw,torch_sgd = [partial(OptimWrapper, opt=o) for o in (torch.optim.AdamW,partial(torch.optim.SGD, momentum=.9))]
def of(opt, **kw): return case(partial(small, opt=opt), **kw)

def thawed(learn):
    learn.freeze()
    learn.fit(1, slice(.001,.05))
    learn.unfreeze()
    learn.fit(1, slice(.001,.05))

class Thaw(Callback):
    "In the midst of an epoch"
    def before_batch(self):
        if self.training and self.iter==1: self.learn.unfreeze()
        if self.training and self.iter==2: self.learn.freeze()

class SAM(Callback):
    "A second pass where the first one points to"
    def after_backward(self):
        ps = [p for p in self.opt.all_params().itemgot(0) if p.grad is not None]
        with torch.no_grad(): [p.add_(p.grad, alpha=.05) for p in ps]
        self.opt.zero_grad()
        self.loss_func(self.model(*self.xb), *self.yb).backward()

class Small(Callback):
    "A penalty on weights"
    def after_loss(self):
        if self.training: self.learn.loss_grad = self.loss_grad+.1*sum(p.square().sum() for p in self.model.parameters())

def decay_first(p, lr, **kwargs): p.data[0].mul_(1-lr)
def first_rows(params, lr): return Optimizer(params, [decay_first,weight_decay,step_stat,average_grad,momentum_step], lr=lr, mom=.9, wd=.01)

class Cumulated(Optimizer):
    "A step of its own, in which elements of a parameter are mixed"
    def __init__(self, params, lr): super().__init__(params, [sgd_step], lr=lr)
    def step(self, closure=None):
        for p,*_,hyper in self.all_params(with_grad=True): p.data.sub_(p.grad.data.cumsum(0), alpha=hyper['lr'])

def clipped(): return [GradientClip(.1)]
def tuned(learn): learn.fine_tune(1, .02)

optimizers = dict(sgd=of(SGD), momentum=of(partial(SGD, mom=.9, wd=.1)), rms=of(RMSProp), adam=of(Adam, cbs=clipped), radam=of(RAdam), qhadam=of(QHAdam),
    larc=of(Larc), lamb=of(Lamb), ranger=of(ranger), torch_sgd=of(torch_sgd), adamw=of(adamw, cbs=clipped),
    coupled=of(partial(OptimWrapper, opt=Coupled), f=lambda o: (o.fit(1, .05), o.fit(1, .05))), muon=no_bias(partial(OptimWrapper, opt=torch.optim.Muon)),
    mask=case(cbs=lambda: Masked()), first_rows=of(first_rows, f=lambda o: (o.fit(1, .05), o.fit(1, .05))), cumulated=of(Cumulated))
ways = dict(norm=case(partial(small, n=36, bn=True)), window=case(cbs=lambda: [GradientAccumulation(24),*clipped()]),
    frozen=case(partial(small, splitter=parts, opt=Adam), f=thawed), tuned=case(partial(small, splitter=parts, opt=adamw), f=tuned),
    thawed=case(partial(small, splitter=parts), cbs=lambda: Thaw(), f=lambda o: (o.freeze(), o.fit(2, .05))), cycle=case(f=lambda o: o.fit_one_cycle(2, .05)),
    few=case(partial(small, n=2)), sam=case(cbs=lambda: SAM()), sharp=case(cbs=lambda: Penalty()), penalty=case(cbs=lambda: Small(), fsdp_plugin=whole_between))
def language(bs):
    set_seed(3)
    dls = TextDataLoaders.from_df(learners.texts()[:40], is_lm=True, bs=bs, seq_len=8, **learners.tok)
    config = awd_lstm_lm_config | dict(emb_sz=10, n_hid=14)
    return language_model_learner(dls, AWD_LSTM, config=config, drop_mult=1e-12, pretrained=False, metrics=accuracy)

def once(learn): learn.fit(1, .05)
half = dict(full=small, n=1, tol=2e-2, cpu=True)
ways |= dict(steps=case(full=lambda bs: small(2*bs), n=1, gradient_accumulation_steps=2), language=case(language, f=once, n=3),
    bf16=case(lambda bs: halved(small(bs), 'bf16'), **half), fp16=case(lambda bs: halved(small(bs), init_scale=256.), cbs=clipped, **half))

def evaluated(ctx, size):
    "All that evaluates, with ranks that have no batch, and before the first fit"
    learn,few = small(12//size),lambda n: dict(dl=learn.dls.test_dl(data(n, 5)))
    with learn.distrib_ctx(shard=True) if ctx else nullcontext(), learn.no_bar(), learn.no_logging():
        return [learn.get_preds(**few(1)), learn.validate(), learn.get_preds(0, with_input=True, with_loss=True), learn.get_preds(**few(13)),
            list(learn.lr_find(num_it=9, show_plot=False, suggest_funcs=(valley,minimum)))]

def shown(ctx, size):
    "One picture on all ranks, and some in other ways each"
    learn = pictures(7, 12//size)
    with learn.distrib_ctx(shard=True) if ctx else nullcontext(), learn.no_bar(), learn.no_logging(): return [learn.predict(3), learn.tta(n=1)]

class Stream(torch.utils.data.IterableDataset):
    "It has fewer than it says"
    def __len__(self): return 15
    def __iter__(self): return iter(data(13))

def streamed(ctx, size):
    learn = small(12//size)
    with learn.distrib_ctx(shard=True) if ctx else nullcontext(), learn.no_bar(), learn.no_logging():
        return [learn.validate(dl=TorchLoader(Stream(), o//size)) for o in (12,24)]

class Uneven(TfmdDL):
    "Its second batch has one sample"
    def chunkify(self, b):
        its = list(b)
        yield from (its[:self.bs],its[self.bs:self.bs+1],its[self.bs+1:])

def uneven(ctx, size, **kw):
    "Metrics and predictions of a loader with its own batches, and how many of them are on disk"
    learn = small(12//size)
    dl = Uneven(data(17, 2), bs=12//size, num_workers=0)
    with learn.distrib_ctx(**kw) if ctx else nullcontext(), learn.no_bar(), learn.no_logging(), TemporaryDirectory() as d:
        d = Path(broadcast_obj(d) if ctx else d)
        res = learn.validate(dl=dl),learn.get_preds(dl=dl, with_input=True, with_loss=True)
        learn.get_preds(dl=dl, save_preds=d)
        saved = torch.cat([torch.load(o) for o in sorted(d.iterdir(), key=lambda o: int(o.name))])
        if ctx: gather_objs(None) # before the folder is removed
        return *res,saved

def all_cases(ctx, size, cases):
    res = {}
    for k,(f,_) in cases.items():
        try: res[k] = f(ctx, size)
        except Exception as e:
            if not ctx: raise
            traceback.print_exc()
            res[k] = f'{type(e).__name__}: {e}'
    return res

def check(size, cases):
    many = on_ranks(lambda rank: all_cases(True, size, cases), size, timeout=100, join=False)
    one,wrong = all_cases(False, 1, cases),{}
    for res in many:
        for k,(_,tol) in cases.items():
            d = res[k] if isinstance(res[k], str) else difference(one[k], res[k], rtol=tol, atol=tol)
            if d: wrong.setdefault(k, f'{k}: {d}')
    assert not wrong, '\n'.join(wrong.values())

ways |= dict(evaluated=(evaluated,1e-5), shown=(shown,1e-5), streamed=(streamed,1e-5), uneven=(partial(uneven, shard=True),1e-5))
sizes = pytest.mark.parametrize('size', (2,3))
few = 'evaluated shown streamed uneven norm window tuned few steps'.split()

@pytest.mark.slow
@sizes
@cases(**usual(ways, *few, 'window', 'frozen', 'cycle', 'language', 'bf16'))
def test_the_law(cases, size): check(size, cases)

@pytest.mark.whole
def test_four_ranks(): check(4, {k:ways[k] for k in few}|{k:optimizers[k] for k in ('sgd','adam','larc','lamb')})

@sizes
@cases(**usual(optimizers, 'momentum', 'adam', 'larc', 'lamb', 'adamw', 'muon', 'first_rows', 'cumulated'))
def test_optimizers(cases, size): check(size, cases)

@pytest.mark.parametrize('size', (pytest.param(2, marks=pytest.mark.whole),3))
def test_replicas_of_uneven_batches(size): check(size, dict(uneven=(uneven,1e-5)))

# What a forward pass or a callback writes to weights, as a momentum encoder's

class Encoder(nn.Sequential):
    "A unit of its own where the plugin says so"
    def __init__(self): super().__init__(nn.Linear(8,7), nn.Tanh(), nn.Linear(7,3))

class Momentum(nn.Module):
    "The weights of `k` follow those of `q`, each in the way of `write`"
    def __init__(self, write=None):
        super().__init__()
        self.q,self.k,self.write = Encoder(),Encoder().requires_grad_(False),write
    @torch.no_grad()
    def follow(self, write):
        for q,k in zip(self.q.parameters(), self.k.parameters()): write(q, k)
    def forward(self, x):
        if self.write and self.training: self.follow(self.write)
        return self.q(x)+self.k(x.flip(-1))

def in_place(q, k): k.mul_(.5).add_(q, alpha=.5)
def on_data(q, k): k.data.mul_(.5).add_(q.data, alpha=.5)
def new_data(q, k): k.data = k.data*.5+q.data*.5
def clipped_too(q, k): in_place(q.clamp_(-.1,.1), k)

class Follow(Callback):
    "`model.follow` in the event `at`"
    def __init__(self, write, at): setattr(self, at, lambda: self.training and self.model.follow(write))

def encoders(bs, write=None):
    learn = small(bs)
    set_seed(4)
    learn.model = Momentum(write)
    return learn

two_units = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy='transformer_based_wrap', transformer_cls_names_to_wrap=['Encoder'])
writes = in_place,on_data,new_data,clipped_too
moving = {o.__name__:case(partial(encoders, write=o)) for o in writes} | {f'{o.__name__} across units':case(partial(encoders, write=o), fsdp_plugin=two_units) for o in writes}
moving |= {f'{o.__name__} {e}':case(encoders, cbs=partial(Follow, o, e)) for o in (in_place,new_data) for e in ('before_batch','after_pred','after_step')}
moving |= dict(window=case(partial(encoders, write=in_place), cbs=lambda: GradientAccumulation(24)),
    kept=case(partial(encoders, write=new_data), fsdp_plugin=whole_between))

across = [o for o in moving if 'across' in o and o!='in_place across units']
@pytest.mark.whole
@sizes
@cases(**usual({k:v for k,v in moving.items() if k not in across}, 'clipped_too', 'in_place across units', 'new_data after_pred', 'kept'))
def test_weights_that_are_written(cases, size): check(size, cases)

@pytest.mark.whole
@sizes
def test_weights_of_other_units_that_are_written(size): check(size, {k:moving[k] for k in across})

class Codebook(nn.Module):
    "Each rank writes what it sees"
    def __init__(self):
        super().__init__()
        self.out,self.codes = nn.Linear(8,3),nn.Parameter(torch.zeros(8), requires_grad=False)
    def forward(self, x):
        if self.training:
            with torch.no_grad(): self.codes.lerp_(x.mean(0), .5)
        return self.out(x-self.codes)

class Listed(Momentum):
    "With a list of parameters that was made before the context"
    def __init__(self, write):
        super().__init__(write)
        self.pairs = [*zip(self.q.parameters(), self.k.parameters())]
    def follow(self, write):
        with torch.no_grad():
            for q,k in self.pairs: write(q, k)

class Numbers(Callback):
    "Reads numbers of parameters and gradients between backward pass and step, and steers by them"
    def __init__(self, extremes): self.extremes = extremes
    def before_fit(self): self.learn.read = []
    def before_step(self):
        for p,g in ((p,p.grad) for p in self.model.parameters()):
            self.learn.read += [p.norm().item(), p.sum().item(), p.mean().item(), g.norm().item(), bool((p>.2).any()), (p.sum()+1).item()]
            self.learn.read.append((p.norm()+g.norm()).item())
            if self.extremes: self.learn.read += [float(p.detach().abs().max()), float(g.min())]
        if self.model[0].weight.grad.norm().item()>.05: self.opt.set_hyper('lr', .02)

def read(rank, bs, extremes):
    learn = small(bs)
    fitted(learn, rank is not None, partial(Numbers, extremes), lambda o: o.fit(1, .05), 1)
    return learn.read

@pytest.mark.whole
@pytest.mark.parametrize('size', [pytest.param(2, marks=pytest.mark.whole),3,pytest.param(4, marks=pytest.mark.whole)])
def test_numbers_that_have_parts(size):
    "`p.norm().item()` is that of the whole parameter on each rank, of which torch gives each its part; of no rows, as one of four has, torch finds no largest, which is an error"
    want = read(None, 12, size<4)
    assert len(want)>=4*6*7
    for o in on_ranks(lambda rank: read(rank, 12//size, size<4), size, timeout=60, join=False): test_close(o, want, 1e-4)

# What cannot work in shards is an error

class ByHand(Callback):
    "Gradients that no backward pass has put where they are"
    def before_backward(self):
        ps = list(self.model.parameters())
        for p,g in zip(ps, torch.autograd.grad(self.loss_grad.as_subclass(torch.Tensor), ps)): p.grad = g.clone()
        raise CancelBackwardException()
    decides = True

class OnRank0(Callback):
    "One rank alone uses the model"
    rank0_only = True
    def after_epoch(self): self.model(torch.zeros(2,8))

class ReadsOnRank0(OnRank0):
    "One rank alone reads what all have parts of"
    def after_epoch(self): self.learn.total = sum(p.sum().item() for p in self.model.parameters())

class Replaces(Callback):
    "One rank puts another loss in the place of that of its batch"
    def after_loss(self):
        if self.training and rank_distrib(): self.learn.loss_grad = torch.zeros_like(self.loss_grad, requires_grad=True)

class Branches(nn.Module):
    "Of two layers a rank uses one"
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Linear(8,3),nn.Linear(8,3)
    def forward(self, x): return (self.a,self.b)[rank_distrib()](x)

refusals = [(Small, {}, {}, 'reshard_after_forward=False'), (ByHand, {}, {}, r'torch.autograd.grad with regard to them'),
    (ByHand, {}, dict(fsdp_plugin=whole_between), 'outside of a backward pass'), (OnRank0, {}, {}, 'a callback without rank0_only'), (ReadsOnRank0, {}, {}, 'reads it on all ranks'), (noop, Branches, {}, 'others did not'),
    (Replaces, {}, {}, 'must depend on parameters on each rank'), (noop, Codebook, {}, 'codes in forward passes'),
    (noop, partial(Listed, in_place), {}, 'a list made before'), (noop, partial(Listed, new_data), {}, 'must be written to as learn.model has them')]

def refused(rank, cb, model, kw, match):
    learn = small(6)
    if model: learn.model = model()
    with pytest.raises(Exception) as e: fitted(learn, True, cb, lambda o: o.fit(1), 1, **kw)
    text = ''.join(traceback.format_exception(e.value))
    return '' if re.search(match, text) and 'HINT' in text else text

def test_refused(): test_eq(on_ranks(lambda rank: [refused(rank, *o) for o in refusals], timeout=60, join=False), [['']*len(refusals)]*2)
