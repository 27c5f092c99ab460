"Accumulation, precision and randomness on N ranks, and what they cost"
import random,pytest
from contextlib import nullcontext
from torch.amp import GradScaler
from torch.utils.data import DataLoader as TorchLoader
from accelerate.utils import AutocastKwargs,GradientAccumulationPlugin,GradScalerKwargs
from fastcore.test import test_close,test_eq,test_ne
from fastai.basics import *
from fastai.callback.all import *
from fastdist import *
from collectives import counting
from half import halved

def learner(bs, n=101, bn=False, opt=SGD, **kw):
    set_seed(3)
    g = torch.Generator().manual_seed(0)
    data = list(zip(torch.randn(n, 8, generator=g), torch.randint(0, 3, (n,), generator=g)))
    dls = DataLoaders.from_dsets(data, data, bs=bs, shuffle=True, drop_last=False, num_workers=0, device='cpu')
    layers = [nn.Linear(8,6),nn.BatchNorm1d(6)] if bn else [nn.Linear(8,6)]
    return Learner(dls, nn.Sequential(*layers, nn.Tanh(), nn.Linear(6,3)), loss_func=CrossEntropyLossFlat(), opt_func=opt, **kw)

def fitted(learn, ctx=True, epochs=2, cbs=None, **kw):
    with learn.distrib_ctx(**kw) if ctx else nullcontext(), learn.no_bar(), learn.no_logging(): learn.fit(epochs, 0.05, cbs=cbs)
    weights = torch.cat([o.detach().float().flatten() for o in learn.model.state_dict().values()])
    return weights,L(learn.recorder.losses).map(float),learn.recorder.values

def same(one, many, weights=1e-5, reports=1e-6):
    for o in many:
        test_close(one[0], o[0], weights)
        test_close(one[1], o[1], reports)
        for a,b in zip(one[2], o[2], strict=True): test_close(a, b, reports)

# Accumulation

@pytest.mark.parametrize('size', (2,3))
def test_callback_counts_samples_of_all_ranks(size):
    "24 samples to a step, in windows that go on into the next epoch"
    one = fitted(learner(12), ctx=False, cbs=GradientAccumulation(24))
    same(one, on_ranks(lambda rank: fitted(learner(12//size), cbs=GradientAccumulation(24)), size, join=False))

@pytest.mark.parametrize('size', (1,2,4))
@pytest.mark.parametrize('kw', (dict(gradient_accumulation_steps=3), dict(gradient_accumulation_plugin=GradientAccumulationPlugin(3, sync_each_batch=True))))
@pytest.mark.by_default('kw0-1')
def test_steps_give_the_large_batch(size, kw):
    "Of 101 samples 5 are left for the last window of an epoch"
    for n in (101,96):
        one = fitted(learner(24, n), ctx=False, cbs=GradientClip(.05))
        many = on_ranks(lambda rank: fitted(learner(8//size, n), cbs=GradientClip(.05), **kw), size, join=False)
        for o in many: test_close(one[0], o[0], 1e-5)
        small = fitted(learner(8, n), cbs=GradientClip(.05), **kw)
        same(small, many)

@pytest.mark.whole
def test_steps_of_the_launcher():
    def f(rank, n):
        os.environ['ACCELERATE_GRADIENT_ACCUMULATION_STEPS'] = n
        return fitted(learner(4))
    (a,_),(b,_) = [on_ranks(lambda rank: f(rank, n), join=False) for n in '13']
    test_ne(a[0], b[0])
    for o in on_ranks(lambda rank: fitted(learner(4), gradient_accumulation_steps=3), join=False): test_close(b[0], o[0], 1e-6)

def test_two_ways_to_accumulate_are_one_too_many():
    with pytest.raises(OptionError, match='GradientAccumulation'): fitted(learner(4), cbs=GradientAccumulation(8), gradient_accumulation_steps=2)

class Steps(Callback):
    def before_fit(self): self.learn.n_steps = 0
    def after_step(self): self.learn.n_steps += 1

def counted(rank, n, cbs=(), **kw):
    learn = learner(4, n)
    with counting() as ran: fitted(learn, epochs=1, cbs=[Steps(),*cbs], **kw)
    return learn.n_steps,ran['c10d::allreduce_']

def per_step(**kw):
    "All-reduces for each step of the optimizer, by the difference of two fits"
    (a,x),(b,y) = [on_ranks(lambda rank: counted(rank, n, **kw), join=False)[0] for n in (64,128)]
    return (y-x)/(b-a)

@pytest.mark.whole
@pytest.mark.replicas
def test_a_step_of_four_batches_exchanges_as_much_as_one():
    test_eq([per_step(), per_step(gradient_accumulation_steps=4), per_step(cbs=[GradientAccumulation(32)])], [1,1,1])

def exchanged(rank, mets):
    learn = learner(4, metrics=mets)
    fitted(learn, epochs=1)
    with learn.distrib_ctx(), learn.no_bar():
        learn.validate()
        with counting() as ran: learn.validate()
    return sum(ran.values())

def test_metrics_cost_no_exchange():
    "Once an evaluation the sums of all of them are exchanged with the loss, and in the same exchange the predictions of those that need all"
    sums,rows = [accuracy,Perplexity()],[F1Score(average='macro'),RocAuc()]
    none,few,one,both = [on_ranks(lambda rank: exchanged(rank, m), join=False)[0] for m in ([], sums, sums+rows[:1], sums+rows)]
    test_eq([few,one,both], [none]*3)

# Precision

def cast(size, mode, scale=None, cbs=None):
    seen = set()
    learn = halved(learner(12//size), mode, **(dict(init_scale=scale) if scale else {}))
    hook = learn.model[0].register_forward_hook(lambda m,i,o: seen.add(o.dtype))
    return *fitted(learn, cbs=cbs, cpu=True),seen

@pytest.mark.parametrize('mode,dtype,scale', [('bf16',torch.bfloat16,None), ('fp16',torch.float16,1024.)])
@pytest.mark.by_default('bf16')
def test_precision_of_the_learner(mode, dtype, scale):
    "As one process that trains on the CPU; what differs is the rounding of products of 16 bits"
    one = cast(1, mode, scale, GradientClip(.1))
    for o in on_ranks(lambda rank: cast(2, mode, scale, GradientClip(.1)), join=False):
        assert dtype in o[3]
        same(one, [o[:3]], 1e-2, 1e-2)
    full = fitted(learner(12), ctx=False, cbs=GradientClip(.1))
    test_close(one[0], full[0], 2e-2)

def overflown(rank):
    scales,skips = [],[]
    look = Callback(after_backward=lambda self: scales.append(self.scaler.get_scale()), after_cancel_step=lambda self: skips.append(self.iter))
    learn = halved(learner(6), init_scale=2.**40)
    weights = fitted(learn, epochs=1, cbs=look, kwargs_handlers=[GradScalerKwargs(backoff_factor=.25)])[0]
    return weights.isfinite().all().item(),scales[:3],skips[:2]

def test_all_ranks_skip_a_step_that_overflows(): test_eq(on_ranks(overflown, join=False), [(True, [2.**40,2.**38,2.**36], [0,1])]*2)

def twice(rank):
    os.environ['ACCELERATE_MIXED_PRECISION'] = 'bf16'
    learn,seen = learner(6),[]
    with learn.distrib_ctx():
        halved(learn)
        hook = learn.model[0].register_forward_hook(lambda m,i,o: seen.append(o.dtype))
        with learn.no_bar(), learn.no_logging(): learn.fit(1, cbs=Callback(before_batch=lambda self: seen.append(self.scaler.is_enabled())))
    return set(seen)

def test_a_precision_is_applied_once(): test_eq(on_ranks(twice, join=False), [{torch.float16,True}]*2)

class OwnCast(MixedPrecision):
    "Of a user, who computes in bfloat16 and scales all the same"
    def before_fit(self):
        super().before_fit()
        self.autocast = torch.autocast('cpu', dtype=torch.bfloat16)
        self.learn.scaler = GradScaler('cpu', init_scale=4.)

class OnCuda(MixedPrecision):
    "As in a script that was written on a machine with GPUs"
    def before_fit(self):
        super().before_fit()
        self.autocast = torch.autocast('cuda', dtype=torch.bfloat16)

class NoCast(MixedPrecision):
    "Of a user, who switches it off"
    def before_fit(self): self.autocast,self.learn.scaler,self.scales = nullcontext(),GradScaler('cpu', enabled=False),[]

def own_cast(rank, mp, **kw):
    seen,learn = [],learner(6)
    hook = learn.model[0].register_forward_hook(lambda m,i,o: seen.append(o.dtype))
    fitted(learn, cbs=[mp(),Callback(before_batch=lambda self: seen.append(self.scaler.get_scale()))], cpu=True, **kw)
    return set(seen)

@pytest.mark.whole
@pytest.mark.parametrize('mp,want', [(OwnCast,{torch.bfloat16,4.}), (OnCuda,{torch.float32,1.}), (NoCast,{torch.float32,1.})])
@pytest.mark.by_default('OwnCast')
def test_a_precision_of_the_users(mp, want): test_eq(on_ranks(lambda rank: own_cast(rank, mp), join=False), [want]*2)

@pytest.mark.whole
def test_options_go_with_a_precision_of_the_users():
    opts = [AutocastKwargs(cache_enabled=False),GradScalerKwargs(init_scale=8.)]
    test_eq(on_ranks(lambda rank: own_cast(rank, OwnCast, kwargs_handlers=opts), join=False), [{torch.bfloat16,8.}]*2)

def said(size, mp, **kw):
    "What two fits in one context say about precision"
    learn = mp(learner(12//size))
    with pytest.warns() as ws, learn.distrib_ctx(**kw), learn.no_bar(), learn.no_logging():
        for _ in range(2): learn.fit(1)
        learn.validate()
    return [str(o.message).split(':')[0] for o in ws if 'float32' in str(o.message)]

@pytest.mark.parametrize('mp', [Learner.to_fp16,Learner.to_bf16])
@pytest.mark.by_default('to_fp16')
def test_what_is_said_of_precision(mp):
    "On the CPU nothing is cast: one process says so as ranks do, in a job or in none, once in a context"
    want = ['On cpu this computes in float32, as plain fastai does']
    test_eq([said(1, mp), said(1, mp, seed=1), said(1, mp, nprocs=2), *on_ranks(lambda rank: said(2, mp), 2, join=False)], [want]*4+[[]])

# Randomness

class Noisy:
    "A data set that augments"
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __getitem__(self, i): return torch.tensor([random.random(),np.random.rand(),torch.rand(1).item()]),torch.tensor([float(i)])

def noise(rank, nw, mk):
    set_seed(1)
    seen,masks = [],[]
    dls = DataLoaders(*[mk(Noisy(24), nw) for _ in range(2)])
    learn = Learner(dls, nn.Sequential(nn.Linear(3,64), nn.Dropout(), nn.Linear(64,1)), loss_func=MSELossFlat())
    start = learn.model[0].weight.detach().clone()
    hook = learn.model[1].register_forward_hook(lambda m,i,o: masks.append((o!=0).flatten().tolist()) if m.training else None)
    fitted(learn, cbs=Callback(before_batch=lambda self: seen.append(self.xb[0].flatten().tolist())))
    return start,sum(seen, []),masks,(random.random(),np.random.rand(),torch.rand(1).item())

@pytest.mark.whole
@pytest.mark.parametrize('nw', (0,2))
@pytest.mark.parametrize('mk', (lambda ds,nw: DataLoader(ds, 4, shuffle=True, num_workers=nw), lambda ds,nw: TorchLoader(ds, 4, shuffle=True, num_workers=nw)))
@pytest.mark.by_default('<lambda>0-0')
def test_ranks_augment_and_drop_in_their_own_ways(nw, mk):
    a,b = on_ranks(lambda rank: noise(rank, nw, mk), join=False)
    test_eq(a[0], b[0])
    test_eq(len({*a[1],*b[1]}), len(a[1])+len(b[1]))
    assert all(x!=y for x,y in zip(a[2], b[2], strict=True))
    test_eq(a[3], b[3])
    again = on_ranks(lambda rank: noise(rank, nw, mk), join=False)
    test_eq([o[1:] for o in again], [a[1:],b[1:]])

class Watch(Callback):
    order = 60
    def before_fit(self): self.learn.curve = []
    def after_batch(self):
        if self.training: self.learn.curve.append(float(self.learn.smooth_loss))

def watched(bs, ctx):
    learn = learner(bs)
    fitted(learn, ctx, cbs=Watch())
    return learn.curve

@pytest.mark.whole
@pytest.mark.parametrize('size', (2,3))
def test_callbacks_see_the_smoothed_loss_of_all(size):
    one = watched(12, False)
    for o in on_ranks(lambda rank: watched(12//size, True), size, join=False): test_close(one, o, 1e-6)

# Mixing samples

class Keep(Callback):
    "What is left of the batch when it has been mixed"
    order = 95
    def before_fit(self): self.learn.mixed = []
    def before_batch(self):
        mix = self.learn.mix_up
        if self.training: self.learn.mixed.append((self.xb[0], mix.yb1[0], self.yb[0], mix.lam.expand(len(self.xb[0]))))

class Replay(Callback):
    "Put batches that were mixed before in the place of these"
    order = 95
    def __init__(self, batches): self.batches,self.k = batches,0
    def before_batch(self):
        if not self.training: return
        x,y1,y2,lam = self.batches[self.k]
        self.learn.xb,self.learn.yb,self.learn.mix_up.lam,self.learn.mix_up.yb1 = (x,),(y2,),lam,(y1,)
        self.k += 1

def mixed(rank, smooth):
    learn = learner(6)
    learn.loss_func = LabelSmoothingCrossEntropyFlat() if smooth else learn.loss_func
    return *fitted(learn, cbs=[MixUp(.4),Keep()])[:2],learn.mixed

@pytest.mark.whole
@pytest.mark.parametrize('smooth', (False,True))
@pytest.mark.by_default('True')
def test_mixup_within_the_slices_of_ranks(smooth):
    "Each rank mixes its own slice, with its own random numbers. One process that is given the mixed samples makes the same steps"
    a,b = on_ranks(lambda rank: mixed(rank, smooth), join=False)
    batches = [[torch.cat(o)[:_real(k, 101, 12)] for o in zip(x, y)] for k,(x,y) in enumerate(zip(a[2], b[2], strict=True))]
    learn = learner(12)
    learn.loss_func = LabelSmoothingCrossEntropyFlat() if smooth else learn.loss_func
    one = fitted(learn, ctx=False, cbs=[MixUp(.4),Replay(batches)])
    for o in (a,b):
        test_close(one[0], o[0], 1e-5)
        test_close(one[1], o[1], 1e-6)

def _real(k, n, g): return min(g, n-k%(-(-n//g))*g)
