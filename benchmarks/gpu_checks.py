"What `gpu.py` checks: each a function of its `Place`, that returns a figure, or raises `AssertionError`, or `NotHere`"
import gc,io,os,signal,subprocess,sys,time,warnings,torch
from contextlib import ExitStack,contextmanager,nullcontext,redirect_stdout,suppress
from datetime import timedelta
from pathlib import Path
from statistics import median
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity,profile
from accelerate.utils import AutocastKwargs,FullyShardedDataParallelPlugin,GradScalerKwargs,InitProcessGroupKwargs
from fastai.basics import *
from fastai.callback.all import *
from fastai.optimizer import RAdam,QHAdam,Larc,Lamb,ranger
from fastdist import *
from fastdist.base.overrides import changed_env
from fastdist.comm.collectives import gather_objs
from fastdist.comm.rng import preserved_random
from fastdist.launch.group import Membership
from fastdist.tools.checks import _off as off
from fastdist.tools.timeline import shown_parts
from fastdist.parallel.layout import Carrier,is_direct
from fastdist.parallel.passes import each_backward
from fastdist.parallel.foreach import lists_ctx
from fastdist.shard.model import RowCarrier,Shards
from work import cnn,mlp,resnet18

class NotHere(Exception): "Says why a check cannot tell anything on this machine"

Check = namedtuple('Check', 'f kind cuda stages secs alone')
checks = {}

def check(
    kind, # 'one' process, 'group' for one rank with a process group of its own, or 'ranks'
    cuda=False, # Whether it says nothing without a GPU
    stages=1, # Times that its processes are started, one after the other, in the same folder
    secs=90, # After which they are ended
    alone=False # Whether it takes times, so that nothing else may run
):
    "Register a function as a check"
    def _inner(f):
        checks[f.__name__] = Check(f, kind, cuda, stages, secs, alone)
        return f
    return _inner

class Place:
    "Where one process of a check runs; it is told of its job by `job`, so that what comes before runs as one process would"
    def __init__(self, rank=0, size=1, device='cpu', backend='gloo', folder='.', port=0, stage=0):
        store_attr()
        self.folder,index = Path(folder),rank%torch.cuda.device_count() if backend=='nccl' and device=='cuda' else 0
        self.device = torch.device(device, index) if device=='cuda' else torch.device(device)
        if device=='cuda': self._be_exact()
        self.options = dict(kwargs_handlers=[InitProcessGroupKwargs(backend=backend, timeout=timedelta(seconds=60))]) if size>1 else {}

    def _be_exact(self):
        torch.cuda.set_device(self.device)
        torch.backends.cudnn.deterministic,torch.backends.cudnn.allow_tf32 = True,False
        torch.use_deterministic_algorithms(True, warn_only=True)

    @property
    def vars(self):
        "What a launcher would tell this rank"
        env = dict(RANK=self.rank, WORLD_SIZE=self.size, LOCAL_RANK=self.rank, LOCAL_WORLD_SIZE=self.size, MASTER_ADDR='127.0.0.1', MASTER_PORT=self.port,
            FASTDIST_STORE=self.folder/f'store{self.stage}', DEFAULT_GPU=self.device.index)
        return {k:v for k,v in env.items() if v is not None} | ({} if self.device.type=='cuda' else dict(ACCELERATE_USE_CPU='true'))

    @contextmanager
    def job(self, learn, **kwargs):
        "Train `learn` on all ranks inside the context; in one process, as it is"
        if self.size==1: yield learn
        else:
            with changed_env(**self.vars), learn.distrib_ctx(**({} if dist.is_initialized() else self.options), **kwargs): yield learn

    @contextmanager
    def group(self):
        "A process group of this rank alone, over NCCL on a GPU"
        member = Membership(World(source='gpu.py'))
        with changed_env(MASTER_ADDR='127.0.0.1', MASTER_PORT=self.port, FASTDIST_STORE=self.folder/'store'):
            member._make_group(timedelta(seconds=60), self.backend)
            try: yield member
            finally: member._leave_group()

    def wait(self):
        if self.device.type=='cuda': torch.cuda.synchronize(self.device)

    def memory(self):
        "Bytes that tensors take on the device"
        gc.collect()
        return torch.cuda.memory_allocated(self.device) if self.device.type=='cuda' else 0

# Learners

class Net(nn.Module):
    "A convolution, batch norm, and two layers"
    def __init__(self, bn=True, drop=0.):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8) if bn else nn.Identity(), nn.ReLU(), nn.Flatten())
        self.body,self.head = nn.Sequential(nn.Linear(512,67), nn.GELU(), nn.Dropout(drop)),nn.Linear(67,10)
    def forward(self, x): return self.head(self.body(self.first(x)))

def samples(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    return list(zip(torch.randn(n,1,8,8, generator=g), torch.randint(0, 10, (n,), generator=g)))

def learner(at, parts, bn=True, drop=0., bs=24, n=101, opt=SGD, loss=None, **kw):
    "A Learner with batches of `bs` in `parts` ranks, the same in each process"
    set_seed(1)
    dls = DataLoaders.from_dsets(samples(n), samples(37, 1), bs=bs//parts, shuffle=True, drop_last=False, num_workers=0, device=at.device, **kw)
    return Learner(dls, Net(bn, drop), loss_func=loss or CrossEntropyLossFlat(), opt_func=opt, metrics=accuracy)

@contextmanager
def quiet(learn):
    with learn.no_bar(), learn.no_logging(), redirect_stdout(io.StringIO()): yield learn

def whole(t):
    "All values of `t`, also where it is in shards: `full_tensor` ends the process where gloo has tensors of a GPU (torch 2.11)"
    return torch.cat(gather_objs(t.to_local().cpu())) if hasattr(t, 'to_local') else t

def outcome(learn):
    "Weights and buffers, losses and metrics, and predictions"
    weights = torch.cat([whole(o).detach().cpu().double().flatten() for o in learn.model.state_dict().values()])
    return weights,torch.tensor([*L(learn.recorder.values).concat(), *learn.recorder.losses]).double(),learn.get_preds()[0].double()

def fit(learn): learn.fit(2, .02)

def fitted(at, ranks, f=fit, cbs=noop, ctx=None, **kw):
    "The outcome of `f`, on all ranks or in one process with as large a batch"
    learn = learner(at, at.size if ranks else 1, **kw)
    learn.add_cbs(L(cbs()))
    with at.job(learn, **(ctx or {})) if ranks else nullcontext(), quiet(learn):
        f(learn)
        return outcome(learn)

def largest(a, b): return max(off(x, y) for x,y in zip(a, b))

def law(at, tol=1e-5, **kw):
    "Check that N ranks compute what one process computes"
    one,many = fitted(at, False, **{k:v for k,v in kw.items() if k!='ctx'}),fitted(at, True, **kw)
    d = [off(a, b) for a,b in zip(many, one)]
    assert max(d)<=tol, 'weights, reports and predictions differ by '+', '.join(f'{o:.2g}' for o in d)+f'; {tol:g} allowed'
    return f'{max(d):.1g} from one process, {tol:g} allowed'

# Replicas

class IsDirect(Callback):
    "Checks that DDP's forward pass is called without its detours"
    def after_pred(self):
        if self.training: assert self.learn.distributed.layout.direct

@check('ranks')
def weights_losses_metrics(at):
    "Batch norm, momentum, a ragged end, predictions in order"
    return law(at, opt=partial(SGD, mom=.9))

@check('ranks')
def batch_norm_of_ranks_without_samples(at):
    "A last batch of one sample: what the other ranks compute only to make the step counts for nothing"
    return law(at, n=97)

@check('ranks')
def each_optimizer(at):
    "fastai's optimizers over lists, on ranks"
    fs = dict(Adam=Adam, RAdam=RAdam, QHAdam=QHAdam, RMSProp=RMSProp, Larc=Larc, Lamb=Lamb, ranger=partial(ranger, k=2))
    return '; '.join(f'{k} {law(at, 1e-3, opt=f, bn=False).split(" ")[0]}' for k,f in fs.items())

@check('ranks', cuda=True)
def half_precision(at):
    "`to_fp16` with its scaler, and `to_bf16`: as near as half precision is"
    scales = []
    class Scale(Callback):
        def after_batch(self):
            if self.training: scales.append(self.learn.scaler.get_scale())
    res = law(at, 2e-2, cbs=lambda: [MixedPrecision(), Scale()], bn=False)
    n = len(scales)//2
    assert scales[:n]==scales[n:], f'scales {scales[:n]} in one process, {scales[n:]} on ranks'
    return f'fp16 {res}, scales are the same; bf16 '+law(at, 5e-2, cbs=lambda: MixedPrecision('bf16'), bn=False)

@check('ranks', cuda=True, secs=150)
def precision_with_kwargs(at):
    "`to_fp16` with `GradScalerKwargs` and `AutocastKwargs`, and batch norm under both precisions"
    handlers = [*at.options['kwargs_handlers'], GradScalerKwargs(init_scale=128., growth_interval=2), AutocastKwargs(cache_enabled=False)]
    at.options,scales = dict(kwargs_handlers=handlers),[]
    class Scale(Callback):
        def after_batch(self):
            if self.training: scales.append(self.learn.scaler.get_scale())
    learn = learner(at, at.size).to_fp16()
    with at.job(learn), quiet(learn): learn.fit(1, .02, cbs=Scale())
    assert scales[:4]==[128.,256.,256.,512.], scales
    at.options = dict(kwargs_handlers=handlers[:1])
    return f'scales {scales[:5]}; batch norm fp16 {law(at, 3e-2, cbs=MixedPrecision).split(" ")[0]}, bf16 {law(at, 5e-2, cbs=lambda: MixedPrecision("bf16")).split(" ")[0]}'

@check('ranks')
def accumulation(at):
    "`GradientAccumulation` and clipping"
    return law(at, cbs=lambda: [GradientAccumulation(48), GradientClip(.5)], bn=False)

class Centres(nn.Module):
    "A loss with parameters of its own"
    def __init__(self):
        super().__init__()
        self.at = nn.Parameter(torch.ones(10))
    def forward(self, out, y): return F.cross_entropy(out*self.at, y)

@check('ranks')
def parameters_of_the_loss(at):
    "Gradients that DDP does not see, in one flat exchange"
    def both(m): return [params(m),[*losses[-1].parameters()]]
    losses,runs = [],[]
    for ranks in (False,True):
        losses.append(Centres().to(at.device))
        def f(learn):
            learn.splitter = both
            fit(learn)
        runs.append((*fitted(at, ranks, f, loss=losses[-1], bn=False), losses[-1].at.detach().cpu().double()))
    assert (d := largest(*runs))<1e-5 and (runs[0][-1]!=1).all(), d
    return f'{d:.1g} from one process'

@check('ranks')
def learning_rate_search(at):
    "`lr_find`: the same curve, and everything put back"
    def search(learn):
        before = [p.detach().clone() for p in learn.model.to(at.device).parameters()]
        learn.lr_find(num_it=12, show_plot=False)
        assert all(map(torch.equal, before, learn.model.parameters()))
        curves.append(torch.tensor([float(o) for o in learn.recorder.losses]).double())
        fit(learn)
    curves = []
    res = law(at, f=search, bn=False)
    assert (d := off(*curves))<1e-5, d
    return f'curves differ by {d:.1g}; then {res}'

@check('ranks')
def random_streams(at):
    "Each rank draws its own on the device; rank 0 as one process, and all go on from its state"
    def drawn(ranks):
        learn,draws = learner(at, at.size if ranks else 1),[]
        class Draw(Callback):
            def after_batch(self): draws.append(torch.rand((), device=at.device).item())
        with at.job(learn) if ranks else nullcontext(), quiet(learn):
            learn.fit(1, cbs=Draw())
            return gather_objs((draws,torch.rand(3, device=at.device).tolist())) if ranks else draws
    one,many = drawn(False),drawn(True)
    assert len({o[0][0] for o in many})==at.size, 'ranks draw alike'
    assert len({tuple(o[1]) for o in many})==1, 'ranks go on from other states'
    assert many[0][0][:2]==one[:2], 'rank 0 draws other numbers than one process'
    return f'{at.size} streams'

@check('ranks')
def ranks_that_differ(at):
    "A weight that one rank changes is told of"
    learn = learner(at, at.size)
    class Change(Callback):
        def after_step(self):
            if at.rank: self.learn.model.head.bias.data += 1e-3
    with at.job(learn), quiet(learn):
        try: learn.fit(1, cbs=Change())
        except DesyncError as e: assert 'head.bias' in str(e), e
        else: raise AssertionError('no DesyncError')
    return 'DesyncError names it'

class OwnNorm(nn.BatchNorm2d):
    "A forward pass of its own, as timm's norms with an activation have"
    def forward(self, x):
        y = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps)
        return F.leaky_relu(y, .1)

class Typed(Callback):
    "Batches of a subclass of a tensor"
    def before_batch(self): self.learn.xb = (TensorBase(self.x),)

def with_norm(make):
    def f(learn):
        learn.model.first[1],learn.model.first[2] = make(8).to(next(learn.model.parameters()).device),nn.ReLU(inplace=True)
        fit(learn)
    return f

@check('ranks')
def norms_of_other_kinds(at):
    "A batch norm with a forward pass of its own, and batches of a subclass of a tensor, also in bf16"
    norms = dict(plain=nn.BatchNorm2d, own=OwnNorm, cumulative=partial(nn.BatchNorm2d, momentum=None), bare=partial(nn.BatchNorm2d, affine=False))
    res = [f'{k}{" subclass" if cbs else ""} {law(at, f=with_norm(f), cbs=lambda: cbs).split(" ")[0]}' for k,f in norms.items() for cbs in ([],[Typed()])]
    if at.device.type=='cuda': res += [f'{k} bf16 {law(at, 5e-2, f=with_norm(f), cbs=lambda: [Typed(),MixedPrecision("bf16")]).split(" ")[0]}' for k,f in norms.items()]
    return ', '.join(res)

@check('ranks', cuda=True)
def synchronised_by_torch(at):
    "The model's own `nn.SyncBatchNorm`"
    return law(at, n=96, f=with_norm(nn.SyncBatchNorm))

# One seed

class Recurrent(nn.Module):
    def __init__(self, cls):
        super().__init__()
        self.rnn,self.out = cls(8, 12, 2, dropout=.4, batch_first=True),nn.Linear(12, 10)
    def forward(self, x): return self.out(self.rnn(x[:,0])[0].mean(1))

class Encoder(nn.Module):
    "Attention with dropout, by a kernel that draws inside where it is not under a seed"
    def __init__(self):
        super().__init__()
        self.layer,self.out = nn.TransformerEncoderLayer(8, 2, 16, .2, batch_first=True),nn.Linear(64, 10)
    def forward(self, x): return self.out(self.layer(x[:,0]).flatten(1))

class Noise(Callback):
    "Noise on the device for each sample, by torch's generator there and by one of its own, and for the batch"
    def before_fit(self): self.g = torch.Generator(self.dls.device)
    def before_batch(self):
        x = self.x
        if self.training: self.learn.xb = (x+.1*torch.randn_like(x)*torch.rand((), device=x.device)+.1*torch.rand(x.shape, device=x.device, generator=self.g),)
    def after_pred(self): self.learn.pred = self.pred*(1+.01*torch.normal(0., torch.ones_like(self.pred)))

def conv(layer): return nn.Sequential(nn.Conv2d(1, 6, 3, 2), layer, nn.Flatten(), nn.Linear(54, 10))

def seeded(at, model, tol=1e-5, cbs=noop, shard=False):
    "Check that ranks with `seed=42` compute what one process with it computes"
    def run(ranks):
        learn = learner(at, at.size if ranks else 1)
        set_seed(3)
        learn.model = model().to(at.device)
        learn.add_cbs(L(cbs()))
        with at.job(learn, seed=42, **(dict(shard=True) if shard else {})) if ranks else learn.distrib_ctx(seed=42), quiet(learn):
            fit(learn)
            return outcome(learn)
    d = [off(a, b) for a,b in zip(run(True), run(False))]
    assert max(d)<=tol, 'weights, reports and predictions differ by '+', '.join(f'{o:.2g}' for o in d)+f'; {tol:g} allowed'
    return f'{max(d):.1g}'

dropouts = dict(Dropout=nn.Dropout, Dropout2d=nn.Dropout2d, AlphaDropout=nn.AlphaDropout, FeatureAlphaDropout=nn.FeatureAlphaDropout)
sequences = dict(lstm=partial(Recurrent, nn.LSTM), gru=partial(Recurrent, nn.GRU), rnn=partial(Recurrent, nn.RNN), encoder=Encoder)

@check('ranks', secs=200)
def seeded_dropout(at):
    "With `seed=` each kind of dropout is that of one process"
    return ', '.join(f'{k} {seeded(at, lambda: conv(f()))}' for k,f in dropouts.items())

@check('ranks', secs=200)
def seeded_sequences(at):
    "Recurrent layers and attention, whose kernels draw inside"
    return ', '.join(f'{k} {seeded(at, f, 1e-4)}' for k,f in sequences.items())

@check('ranks', secs=150)
def seeded_noise(at):
    "Numbers that a callback draws on the device"
    return seeded(at, lambda: conv(nn.Dropout()), cbs=Noise)

@check('ranks', secs=150)
def seeded_in_shards(at):
    "Dropout of a model in shards"
    return seeded(at, lambda: Net(False, .3), 1e-4, shard=True)

@check('ranks', cuda=True, secs=200)
def seeded_in_half_precision(at):
    "Under autocast, with its scaler"
    return ', '.join(f'{k} {seeded(at, f, 3e-2, MixedPrecision)}' for k,f in dict(dropout=lambda: Net(False, .3), encoder=Encoder).items())

@check('ranks', cuda=True, secs=240)
def seeded_and_compiled(at):
    "What `torch.compile` makes of dropout"
    return seeded(at, lambda: torch.compile(Net(False, .3)), 1e-4)

class Several(nn.Module):
    "Kinds of dropout, and noise, in one compiled model"
    def __init__(self):
        super().__init__()
        self.c,self.l = nn.Conv2d(1,6,3,2),nn.Linear(54,10)
    def forward(self, x):
        x = F.dropout2d(self.c(x), .3, self.training)
        if self.training: x = x+.1*torch.randn_like(x)+.1*torch.rand(x.shape, device=x.device)
        return self.l(F.dropout(x.flatten(1), .2, self.training))

@check('ranks', secs=240)
def seeded_and_compiled_noise(at):
    "Kinds of dropout and noise that `torch.compile` draws"
    return f'eager {seeded(at, Several, 1e-4)}, compiled {seeded(at, lambda: torch.compile(Several()), 1e-4)}'

# Errors

class Oops(Callback):
    "Does something in a step, on the last rank or on each"
    run_valid = False
    def __init__(self, do, here=True, step=2): store_attr()
    def after_backward(self):
        if self.here and self.iter==self.step: self.do()

def oops(): raise ValueError('oops')
def interrupt(): signal.raise_signal(signal.SIGINT)

def after_error(at, do, here, expected, **ctx):
    "Let a fit end with an error; the Learner, its memory and the job are then as before, and train on"
    learn,begun = learner(at, at.size, opt=Adam),Begun()
    with at.job(learn, **ctx), quiet(learn):
        learn.fit(1)
        before,start = at.memory(),time.monotonic()
        try: learn.fit(1, cbs=Oops(do, here))
        except expected as e: text = f'{type(e).__name__}: {e}'
        else: raise AssertionError('the fit went on')
        secs,left,mine = time.monotonic()-start,at.memory()-before,local_values(learn)
        learn.fit(1, cbs=begun)
        weights,later = outcome(learn)[0],at.memory()-before
        if at.size>1: assert len({tuple(o.tolist()) for o in gather_objs(weights)})==1, 'ranks have other weights'
        whose = f'; all go on from rank {[torch.equal(o, begun.values) for o in gather_objs(mine)].index(True)}' if at.size>1 and not ctx else ''
    kept = f'{left/2**20:.2f} MiB more than before, {later/2**20:.2f} after the next fit'
    assert weights.isfinite().all() and (later if at.backend=='nccl' else max(left, later))<=2**16, kept # NCCL's group keeps what it exchanged until it is renewed
    return f'after {secs:.1f} s, {kept}{whose}',text

def local_values(learn): return torch.cat([getattr(o, '_local_tensor', o).detach().cpu().double().flatten() for o in learn.model.state_dict().values()])

class Begun(Callback):
    "The values with which a fit begins"
    def before_batch(self):
        if self.training and not self.train_iter: self.values = local_values(self.learn)

@check('ranks', secs=150)
def error_of_one_rank(at):
    "All ranks hear of it, its memory is freed, and the next fit trains"
    res,text = after_error(at, oops, at.rank==at.size-1, Exception)
    assert 'oops' in text, text
    return res

@check('ranks', secs=150)
def error_in_shards(at):
    "The same in shards, whose process groups are aborted"
    res,text = after_error(at, oops, at.rank==at.size-1, Exception, shard=True)
    assert 'oops' in text, text
    return res

@check('ranks', secs=150)
def interrupted_on_ranks(at):
    "Ctrl-C of all ranks: the memory is freed, and they train on"
    return after_error(at, interrupt, True, KeyboardInterrupt)[0]

@check('one')
def interrupted(at):
    "Ctrl-C in a fit: plain, lean and with a `Timeline`"
    for f in (nullcontext, Learner.lean_ctx):
        learn = learner(at, 1)
        with f(learn), quiet(learn):
            learn.fit(1, cbs=Timeline())
            before = at.memory()
            with suppress(KeyboardInterrupt): learn.fit(1, cbs=[Timeline(), Oops(interrupt)])
            learn.remove_cbs(L(learn.cbs).filter(lambda o: isinstance(o, (Oops,Timeline))))
            assert (left := at.memory()-before)<=2**16, f'{left/2**20:.1f} MiB more than before'
            learn.fit(1)
    return f'{left/2**20:.2f} MiB more than before'

@check('ranks', secs=150, alone=True)
def watchdog_in_a_wait_for_the_device(at):
    "A rank that stands in a synchronisation longer than `patience` is named, by its callback"
    def stand():
        if at.device.type!='cuda': return time.sleep(7) # in the place of the device
        torch.cuda._sleep(int(1.4e10)) # about seven seconds
        torch.cuda.synchronize()
    learn,start = learner(at, at.size),time.monotonic()
    with suppress(RankError), at.job(learn, patience=4), quiet(learn):
        try: learn.fit(1, cbs=Oops(stand, at.rank==at.size-1))
        except Exception as e: text = str(e)
        else: raise AssertionError('the fit went on')
        raise RankError(0, text)
    assert 'Oops.after_backward' in text and 'did not move' in text, text
    return f'named after {time.monotonic()-start:.0f} s'

class Stuck:
    "Samples of which data workers read the first for ever"
    def __len__(self): return 24
    def __getitem__(self, i):
        if i==0 and torch.utils.data.get_worker_info(): os.kill(os.getpid(), signal.SIGSTOP)
        return samples(24)[i]

@check('ranks', secs=150)
def data_workers(at):
    "Workers beside a rank that has used its device: their batches are those of one process, and one that is stuck is named"
    def f(learn):
        for dl in learn.dls.loaders: dl.fake_l.num_workers = 1
        learn.fit(1, .02)
    res = law(at, f=f)
    learn = learner(at, at.size)
    learn.dls = DataLoaders.from_dsets(samples(24), Stuck(), bs=4, num_workers=1, device=at.device)
    with suppress(RankError), at.job(learn, patience=8), quiet(learn):
        try: learn.fit(1, .1)
        except Exception as e: text = f'{type(e).__name__}: {e}'
        else: raise AssertionError('the fit went on')
        raise RankError(0, text)
    assert 'is stopped' in text, text
    return f'{res}; {text.splitlines()[0][:150]}'

# Shards

def in_shards(at, tol=1e-3, opt=Adam, **kw):
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **kw)
    return law(at, tol, ctx=dict(fsdp_plugin=plugin), opt=opt, bn=False)

@check('ranks', secs=150)
def shards(at):
    "FSDP2: weights, losses, metrics and predictions"
    return in_shards(at)

@check('ranks', secs=150)
def shards_kept_whole(at):
    "`reshard_after_forward=False`"
    return in_shards(at, reshard_after_forward=False)

@check('ranks', cuda=True, secs=150)
def shards_offloaded(at):
    "`cpu_offload`"
    return in_shards(at, cpu_offload=True)

@check('ranks', secs=150)
def shards_in_bf16(at):
    "A policy of bf16"
    return in_shards(at, 5e-2, SGD, mixed_precision_policy='bf16')

@check('ranks', cuda=True, secs=150)
def shards_with_a_scaler(at):
    "`to_fp16` in shards: an overflow on one rank is one on all"
    return law(at, 2e-2, cbs=MixedPrecision, bn=False, ctx=dict(shard=True))

@check('ranks', cuda=True, secs=150)
def memory_in_shards(at):
    "Parameters, gradients and optimizer state of a rank"
    big = nn.Sequential(*[nn.Linear(1024,1024) for _ in range(16)])
    learn = learner(at, at.size, opt=Adam)
    learn.model = nn.Sequential(nn.Flatten(), nn.Linear(64,1024), *[nn.Sequential(o, nn.ReLU()) for o in big], nn.Linear(1024,10))
    nn.Linear(8,8).to(at.device)(torch.ones(8,8, device=at.device)).sum().backward() # now libraries have their workspaces
    before,size = at.memory(),sum(p.nbytes for p in learn.model.parameters())
    with at.job(learn, shard=True), quiet(learn):
        learn.fit(1)
        mine = at.memory()-before
    assert mine<=4*size/at.size+24*2**20, f'{mine/size:.2f} times the parameters of one process'
    return f'{mine/size:.2f} times the parameters of one process, which takes 4'

class Follows(nn.Module):
    "The weights of `k` follow those of `q`, each in the way of `write`"
    def __init__(self, write):
        super().__init__()
        self.q,self.k = [nn.Sequential(nn.Flatten(), nn.Linear(64,7), nn.Tanh(), nn.Linear(7,10)) for _ in range(2)]
        self.k.requires_grad_(False)
        self.write = write
    @torch.no_grad()
    def follow(self):
        for q,k in zip(self.q.parameters(), self.k.parameters()): self.write(q, k)
    def forward(self, x):
        if self.training: self.follow()
        return self.q(x)+self.k(x.flip(-1))

def in_place(q, k): k.mul_(.5).add_(q, alpha=.5)
def on_data(q, k): k.data.mul_(.5).add_(q.data, alpha=.5)
def new_data(q, k): k.data = k.data*.5+q.data*.5
def clipped_too(q, k): in_place(q.clamp_(-.1,.1), k)

def sharded_law(at, f, tol=1e-4, opt=SGD, cbs=noop, ctx=dict(shard=True)):
    "Check in shards that N ranks compute what one process does, with the model that `f` makes"
    def run(ranks):
        learn = learner(at, at.size if ranks else 1, bn=False, opt=opt)
        learn.add_cbs(L(cbs()))
        set_seed(4)
        if f: learn.model = f().to(at.device)
        with at.job(learn, **ctx) if ranks else nullcontext(), quiet(learn):
            fit(learn)
            return outcome(learn)
    d = [off(a, b) for a,b in zip(run(True), run(False))]
    assert max(d)<=tol, 'weights, reports and predictions differ by '+', '.join(f'{o:.2g}' for o in d)+f'; {tol:g} allowed'
    return f'{max(d):.1g}'

def plugin(**kw): return dict(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, **kw))

@check('ranks', secs=240)
def weights_written_in_shards(at):
    "What a forward pass writes to weights stays, as a momentum encoder's"
    ways = dict(shard=dict(shard=True), kept=plugin(reshard_after_forward=False))
    if at.device.type=='cuda': ways['offload'] = plugin(cpu_offload=True)
    return ', '.join(f'{w.__name__} {k} {sharded_law(at, partial(Follows, w), ctx=c)}' for w in (in_place,on_data,new_data,clipped_too) for k,c in ways.items())

class Viewed(nn.Module):
    "Units whose output is a view, of a subclass of a tensor, as of a chunk"
    def __init__(self):
        super().__init__()
        self.a,self.b,self.c = Halves(),Halves(),nn.Linear(12,10)
    def forward(self, x):
        x,y = self.a(x.flatten(1))
        u,v = self.b(torch.cat([F.relu(x), y*2, x.new_zeros(len(x), 52)], 1))
        return self.c(torch.cat([u+1, v], 1))

class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(64,12)
    def forward(self, x): return self.l(x).chunk(2, 1)

@check('ranks', secs=150)
def views_in_shards(at):
    "Units whose outputs are views, plain and of a subclass"
    ctx = plugin(auto_wrap_policy='transformer_based_wrap', transformer_cls_names_to_wrap=['Halves'])
    return f'subclass {sharded_law(at, Viewed, cbs=Typed, ctx=ctx)}, plain {sharded_law(at, Viewed, ctx=ctx)}'

class Coupled(torch.optim.Optimizer):
    "Steps by the norm of all gradients, with a state in another shape than the parameter"
    def __init__(self, params, lr=.1): super().__init__(params, dict(lr=lr))
    @torch.no_grad()
    def step(self, closure=None):
        ps = [p for g in self.param_groups for p in g['params'] if p.grad is not None]
        size = sum(p.grad.norm().square() for p in ps).sqrt()
        for p in ps:
            s = self.state[p]
            s['rows'] = s.get('rows', 0)*.9+p.grad.reshape(len(p), -1).square().mean(1).add_(1e-3)
            s['mom'] = s.get('mom', 0)*.9+p.grad
            p.sub_((s['mom'].view(len(p), -1)/s['rows'].sqrt()[:,None]).view_as(p)*(self.param_groups[0]['lr']/(1+size.item())))

class NoBias(nn.Sequential):
    def __init__(self): super().__init__(nn.Flatten(), nn.Linear(64,21,bias=False), nn.Tanh(), nn.Linear(21,10,bias=False))

def adamw(params, **kw): return OptimWrapper(params, torch.optim.AdamW, **kw)
def coupled(params, **kw): return OptimWrapper(params, Coupled, **kw)
def muon(params, **kw): return OptimWrapper(params, torch.optim.Muon, **kw)

@check('ranks', secs=240)
def optimizers_in_shards(at):
    "Steps on whole parameters, on rows, and norms over all ranks; clipped, and offloaded"
    if (at.device.type,at.backend)==('cuda','gloo'): raise NotHere('over gloo these processes ended without a word on an H200 with torch 2.11, which is not explained')
    opts = dict(lamb=Lamb, larc=Larc, ranger=ranger, adamw=adamw, coupled=coupled)
    res = [f'{k} {sharded_law(at, None, 1e-3, opt=o, cbs=lambda: GradientClip(.5))}' for k,o in opts.items()]
    res.append(f'muon {sharded_law(at, NoBias, 2e-2, opt=muon)}') # it computes in bfloat16
    if at.device.type=='cuda': res += [f'{k} offload {sharded_law(at, None, 1e-3, opt=o, ctx=plugin(cpu_offload=True))}' for k,o in dict(lamb=Lamb, adamw=adamw, coupled=coupled).items()]
    return ', '.join(res)

# One rank over NCCL

def _batch(at, n=16):
    x,y = zip(*samples(n))
    return torch.stack(x).to(at.device),torch.stack(y).to(at.device)

def _grads(at, run):
    "Loss and gradients of a model without batch norm, which `run` is asked for"
    set_seed(1)
    model,(x,y) = Net(bn=False).to(at.device),_batch(at)
    run(model, x, y)
    return [p.grad.detach().clone() for p in model.parameters()]

def _plain(model, x, y): F.cross_entropy(model(x), y).backward()

@check('group')
def carried_numbers(at):
    "DDP's direct forward pass, a backward pass over loss and numbers, with and without `device_ids`"
    one = _grads(at, _plain)
    def run(ids, model, x, y):
        ddp = DistributedDataParallel(Carrier(model), device_ids=ids)
        assert is_direct(ddp)
        args,kwargs = ddp._pre_forward(x)
        loss = F.cross_entropy(ddp._post_forward(model(*args, **kwargs)), y)
        numbers = torch.arange(len(ddp.module.carry), dtype=torch.float32, device=at.device)
        with each_backward(lambda run, t, g, kw: run((t,ddp.module.carry), (torch.ones_like(t),numbers))): loss.backward()
        ddp._check_reducer_finalized()
        assert torch.equal(ddp.module.carry.grad, numbers)
    with at.group():
        for ids in [None]+[[at.device.index]]*(at.device.type=='cuda'):
            assert all(map(torch.equal, one, _grads(at, partial(run, ids)))), ids
    return 'gradients and numbers, to the bit'

def sharded_step(at, carried=False, **how):
    "Gradients of a step of FSDP2 with our record of it, taken off again"
    from torch.distributed.device_mesh import init_device_mesh
    def run(model, x, y):
        def fill(ts):
            for t in ts: t.data = t.data.to(at.device)
        s = Shards(model, [model.first,model.body], **how|(dict(carrier=partial(RowCarrier, ranks=1, device=at.device)) if carried else {}))
        s.wrap(init_device_mesh(at.device.type, (1,), mesh_dim_names=('shard',)), fill)
        first,body,_ = s.parts
        first.set_modules_to_forward_prefetch([body])
        body.set_modules_to_backward_prefetch([first])
        with each_backward(lambda run, t, g, kw: run(t, g)): F.cross_entropy(model(x).float(), y).backward()
        grads = {p:q.grad.to_local().to(at.device) for p,q in s.params.items()}
        s.unwrap({p:q.detach().to_local().to(at.device) for p,q in s.params.items()})
        for p,g in grads.items(): p.grad = g
    return _grads(at, run)

@check('group')
def fsdp2_on_and_off(at):
    "Prefetch, the carrier, offload and bf16; nothing is left on the model"
    from torch.distributed.fsdp import CPUOffloadPolicy,MixedPrecisionPolicy
    one,bf16 = _grads(at, _plain),MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ways = dict(plain={}, kept=dict(reshard_after_forward=False), carrier=dict(carried=True), bf16=dict(mp_policy=bf16))
    if at.device.type=='cuda': ways['offload'] = dict(offload_policy=CPUOffloadPolicy())
    with at.group(): far = {k:largest(sharded_step(at, **kw), one) for k,kw in ways.items()}
    assert all(v<=(2e-2 if k=='bf16' else 1e-6) for k,v in far.items()), far
    return ', '.join(f'{k} {v:.1g}' for k,v in far.items())

@check('group')
def abort_and_renew(at):
    "`abort` ends a process group, and `restart` makes another"
    with at.group() as member:
        t = torch.ones(1000, device=at.device)
        dist.all_reduce(t)
        at.wait()
        start = time.monotonic()
        member.abort()
        member.restart()
        dist.all_reduce(t)
        at.wait()
        assert t.sum().item()==1000
    return f'{time.monotonic()-start:.2f} s'

@check('group')
def learner_beside_a_group(at):
    "`fit`, `validate` and `get_preds` with a group of one rank are those without"
    one = fitted(at, False)
    with at.group():
        learn = learner(at, 1)
        with learn.distrib_ctx(), quiet(learn):
            fit(learn)
            d = largest(outcome(learn), one)
    assert d==0, d
    return 'to the bit'

# One process

def network():
    "Parameters of a small network, with gradients of its first steps"
    return nn.ModuleList([*[nn.Linear(96,96) for _ in range(30)], *[nn.Conv2d(8,8,3) for _ in range(10)]])

def _steps(at, f, lists, n=6):
    set_seed(2)
    m = network().to(at.device)
    opt,g = f(params(m), lr=.01),torch.Generator().manual_seed(0)
    for _ in range(n):
        for p in m.parameters(): p.grad = torch.randn(p.shape, generator=g).to(at.device)
        with lists_ctx(opt) if lists else nullcontext(): opt.step()
    weights = torch.cat([p.detach().double().flatten() for p in m.parameters()])
    with lists_ctx(opt) if lists else nullcontext(): return weights,_timed(at, opt.step),_launches(at, opt.step)

def _timed(at, f, n=20):
    "Median seconds of `f`, until the device is done"
    times = []
    for _ in range(n+2):
        at.wait()
        start = time.perf_counter()
        f()
        at.wait()
        times.append(time.perf_counter()-start)
    return median(times[2:])

def _launches(at, f):
    kinds = [ProfilerActivity.CPU]+[ProfilerActivity.CUDA]*(at.device.type=='cuda')
    with profile(activities=kinds) as prof: f()
    name = 'cudaLaunchKernel' if at.device.type=='cuda' else 'aten::'
    return sum(o.count for o in prof.key_averages() if o.key.startswith(name))

opts = dict(SGD=partial(SGD, mom=.9, wd=.1), RMSProp=RMSProp, Adam=Adam, RAdam=RAdam)

@check('one', secs=150, alone=True)
def steps_over_lists(at):
    "Values, time and launches of a step over lists, beside fastai's own"
    res,far = [],{}
    for k,f in opts.items():
        (a,t,n),(b,u,m) = [_steps(at, f, o) for o in (False,True)]
        far[k] = off(b, a)
        res.append(f'{k} {"to the bit" if not far[k] else f"{far[k]:.0e}"}, time x {u/t:.2f}, launches {n} -> {m}')
    assert max(far.values())<=1e-5, far
    return '; '.join(res)

@check('one')
def lean_is_plain(at):
    "`lean()` gives the numbers of plain fastai"
    one,learn = fitted(at, False, opt=partial(SGD, mom=.9), drop=.2),learner(at, 1, opt=partial(SGD, mom=.9), drop=.2)
    with learn.lean_ctx(), quiet(learn):
        fit(learn)
        d = largest(outcome(learn), one)
    assert d<=1e-6, d
    return 'to the bit' if d==0 else f'{d:.1g}'

def _waits(learn, steps):
    "Synchronisations of a training step"
    learn._do_epoch_validate = noop
    with warnings.catch_warnings(record=True) as ws, quiet(learn):
        warnings.simplefilter('always')
        learn.fit(1)
        n = len(ws)
        torch.cuda.set_sync_debug_mode('warn')
        try: learn.fit(1)
        finally: torch.cuda.set_sync_debug_mode('default')
    return sum('synchroniz' in str(o.message) for o in ws[n:])/steps

@check('one', cuda=True)
def waits_for_the_device(at):
    "Synchronisations of a step: lean has no more than fastai"
    plain,lean = learner(at, 1, n=240),learner(at, 1, n=240)
    n = _waits(plain, 10)
    with lean.lean_ctx(): m = _waits(lean, 10)
    assert m<=n, f'{m} a step, {n} in fastai'
    return f'{m} a step, {n} in fastai'

@check('one')
def pinned_and_placed(at):
    "Batches from pinned memory; what is on the device is not copied"
    one = fitted(at, False)
    kw = dict(pin_memory=True) if at.device.type=='cuda' else {}
    learn = learner(at, 1, **kw)
    with learn.lean_ctx(), quiet(learn):
        fit(learn)
        d = largest(outcome(learn), one)
    from fastdist.data.fetch import on_device
    b = _batch(at)
    assert d<=1e-6 and all(x is y for x,y in zip(on_device(b, at.device), b)), d
    return 'the same batches'

@check('one')
def random_state_of_the_device(at):
    "`preserved_random` restores it"
    torch.rand(1, device=at.device)
    with preserved_random(): a = torch.rand(5, device=at.device)
    assert torch.equal(a, torch.rand(5, device=at.device))
    return 'to the bit'

class Stop(Callback):
    "Ends the process's fit after some steps, as a kill would"
    order,run_valid = 10**7,False
    def after_batch(self):
        if self.epoch==1 and self.iter==2: raise SystemExit(3)

def _resumed(at, **ctx):
    "In three lives: undisturbed; stopped; gone on, and compared to the bit"
    learn = learner(at, at.size, drop=.3, opt=Adam)
    cbs = [Checkpoint(at.folder/'states', every=2, minutes=None)]*(at.stage>0)+[Stop()]*(at.stage==1)
    with suppress(SystemExit), at.job(learn, **ctx), quiet(learn): learn.fit_one_cycle(3, .01, cbs=cbs)
    if at.stage==1: return 'stopped'
    now,was = (learn.model.state_dict(),[float(o) for o in learn.recorder.losses],learn.recorder.values),at.folder/f'whole{at.rank}.pt'
    if not at.stage: return torch.save(now, was) or 'undisturbed'
    then = torch.load(was, weights_only=False, map_location='cpu')
    assert now[1:]==(then[1],then[2]), 'losses or metrics differ'
    assert all(torch.equal(v.cpu(), then[0][k]) for k,v in now[0].items()), 'weights differ'
    return 'to the bit'

@check('one', stages=3)
def resume(at):
    "A fit that goes on behind a `Checkpoint`, with dropout: weights, losses and metrics"
    return _resumed(at)

@check('ranks', stages=3)
def resume_on_ranks(at):
    "The same on ranks"
    return _resumed(at)

@check('ranks', stages=3, secs=150)
def resume_in_shards(at):
    "The same in shards, with a seed: states of tensors that are in parts on the device"
    return _resumed(at, shard=True, seed=42)

@check('ranks', cuda=True, stages=3, secs=150)
def resume_offloaded(at):
    "States in shards that are in the CPU's memory"
    return _resumed(at, **plugin(cpu_offload=True))

class Killed(Stop):
    "Kills a process in the midst of a fit; its `said` is written before"
    def __init__(self, at): self.at = at
    def after_batch(self):
        if self.epoch==1 and self.iter==2:
            (self.at.folder/f'said{self.at.stage}.{self.at.rank}').write_text('{"result":"held","figure":"killed"}')
            os.kill(os.getpid(), signal.SIGKILL)

class Wide(nn.Module):
    "Of 70 MB on a GPU"
    def __init__(self):
        super().__init__()
        n = 4096 if torch.cuda.is_available() else 256
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64,n), nn.ReLU(), nn.Dropout(.2), nn.Linear(n,n), nn.ReLU(), nn.Linear(n,10))
    def forward(self, x): return self.net(x)

def _killed(at, who, make=None, n=101, every=2, then=None, tol=0, **ctx):
    "As `_resumed`, after a SIGKILL of the ranks `who`; `then`: the context in which it goes on and with which it is compared"
    learn = learner(at, at.size, drop=0. if then is not None else .3, bn=then is None, opt=Adam, n=n)
    if make: learn.model = make().to(at.device)
    cbs = [Checkpoint(at.folder/'states', every=every, minutes=None)]*(at.stage>0)+[Killed(at)]*(at.stage==1 and at.rank in who)
    if at.stage==2 and then is not None: ctx = then
    try:
        with at.job(learn, **ctx), quiet(learn):
            learn.fit_one_cycle(3, .001, cbs=cbs)
            if at.stage==1: raise AssertionError('the fit went on')
            weights = [whole(o).cpu() for o in learn.model.state_dict().values()]
    except Exception as e:
        if at.stage==1 and not isinstance(e, AssertionError): return f'{type(e).__name__}'
        raise
    now,was = (weights,[float(o) for o in learn.recorder.losses],learn.recorder.values),at.folder/f'whole{at.rank}.pt'
    if not at.stage: return torch.save(now, was) or 'undisturbed'
    ws,ls,vs = torch.load(was, weights_only=False)
    d = [max(map(off, weights, ws)),off(tensor(now[1]), tensor(ls)),off(tensor([list(o) for o in now[2]]), tensor([list(o) for o in vs]))]
    assert max(d)<=tol, f'weights, losses and metrics differ by {d}'
    return 'to the bit' if max(d)==0 else f'{max(d):.1g}'

@check('one', stages=3)
def resume_after_a_kill(at):
    "A process that is killed"
    return _killed(at, [0])

@check('ranks', stages=3, secs=150)
def resume_after_a_kill_of_a_rank(at):
    "A rank that is killed, of which the others are told"
    return _killed(at, [at.size-1])

@check('ranks', stages=3, secs=150)
def resume_in_replicas(at):
    "A state in shards, gone on with by replicas"
    return _killed(at, [*range(at.size)], then={}, tol=1e-4, shard=True)

@check('one', stages=3, secs=150)
def states_beside_steps(at):
    "States of a large model, each written while steps go on"
    return _killed(at, [0], Wide, n=150, every=1)

@check('ranks', stages=3, secs=150)
def resume_in_shards_after_a_kill(at):
    "A rank that is killed in shards"
    return _killed(at, [at.size-1], shard=True)

@check('ranks', stages=3, secs=150)
def states_in_shards_beside_steps(at):
    "The same in shards"
    return _killed(at, [at.size-1], Wide, n=150, every=1, shard=True)

# The timeline

def _timeline(at):
    learn = learner(at, at.size, bs=96, n=960)
    if at.device.type=='cuda': learn.model.body[0] = nn.Sequential(nn.Linear(512,4096), nn.ReLU(), nn.Linear(4096,67))
    with at.job(learn), quiet(learn):
        def secs(*cbs):
            at.wait()
            start = time.perf_counter()
            learn.fit(1, cbs=cbs)
            at.wait()
            return time.perf_counter()-start
        secs(),secs(Timeline())
        ratios = [secs(Timeline())/secs() for _ in range(7)]
        learn.fit(1, cbs=Timeline())
        s = learn.timeline.steps
        parts = sum(s.part(o).mean() for o in shown_parts)/s.total.mean()
    assert abs(parts-1)<.02, f'parts are {parts:.3f} of a step'
    return f'parts are {parts:.3f} of a step of {s.total.mean():.2f} ms, an epoch takes {median(ratios):.3f} times as long'

@check('one', alone=True)
def timeline(at):
    "Its parts make up a step; what it costs"
    return _timeline(at)

@check('ranks', alone=True)
def timeline_on_ranks(at):
    "The same, with the wait for the exchange"
    return _timeline(at)

# Launches

def _where():
    w = this_world()
    return str(w.device),dist.get_backend() if w.size>1 else 'no group',torch.ones(3, device=w.device).sum().item()

@check('one', secs=240)
def distribute_after_the_device_was_used(at):
    "Ranks of a head that has used the GPU; what they train returns to it"
    torch.ones(3, device=at.device).sum().item()
    n,kw = _as_many(at)
    setup = dict(compute_setup='gpu' if at.device.type=='cuda' else 'cpu')
    with changed_env(**kw.pop('env')):
        places = Accelerator(nprocs=n, **setup, **kw).distribute(_where)()
        learn = learner(at, n)
        learn.model.to(at.device)
        before = [p.detach().clone() for p in learn.model.parameters()]
        with redirect_stdout(io.StringIO()): Accelerator(nprocs=n, **setup, **kw).distribute(learn.fit)(1)
    ps = [*learn.model.parameters()]
    assert places[2]==3 and {p.device for p in ps}=={at.device} and not all(map(torch.equal, ps, before)), places
    return f'{n} ranks on {places[0]} over {places[1]}, and home on {at.device}'

def _as_many(at):
    "Two ranks, on devices of their own; one where there is one device"
    return (1 if torch.cuda.device_count()==1 else 2),dict(env={})

@check('one', cuda=True, secs=150)
def notebook_launcher_after_the_device_was_used(at):
    "It cannot fork then, and says so"
    from accelerate import notebook_launcher
    torch.ones(3, device=at.device).sum().item()
    try: notebook_launcher(_where, num_processes=2)
    except Exception as e: return f'{type(e).__name__}: {str(e)[:60]}'
    raise AssertionError('it started ranks')

def _command(*args, rc=0):
    p = subprocess.run([sys.executable, '-m', 'fastdist.check', *args], capture_output=True, text=True, timeout=200, env=os.environ|dict(PYTHONWARNINGS='ignore'))
    assert p.returncode==rc, f'exit code {p.returncode}\n{p.stdout[-2000:]}\n{p.stderr[-2000:]}'
    return p.stdout+p.stderr

@check('one', secs=240)
def fastdist_check(at):
    "The command, with one rank and as many as there are devices"
    cpu = {} if at.device.type=='cuda' else dict(ACCELERATE_USE_CPU='true')
    with changed_env(**cpu):
        _command()
        n = torch.cuda.device_count() if cpu=={} else 2
        if n>1: _command('--nprocs', str(n))
    return f'All is well with 1{f" and {n}" if n>1 else ""}'

@check('one', cuda=True, secs=240)
def more_ranks_than_devices(at):
    "An error that counts them"
    n = torch.cuda.device_count()+1
    out = _command('--nprocs', str(n), rc=1)
    assert f'this machine has {n-1} GPU' in out and 'Traceback' not in out, out[-2000:]
    return 'named'

# Ratios

def _loop(at, model, opt, batches, backward=None):
    "A function that makes the steps of a loop by hand"
    def run():
        for x,y in batches:
            loss = F.cross_entropy(model(x.to(at.device)), y.to(at.device))
            loss.backward() if backward is None else backward(loss)
            opt.step()
            opt.zero_grad()
    return run

def _peers(at, make, shape, bs, steps, wrap):
    "Name -> function that makes `steps` steps"
    from accelerate import Accelerator as HFAccelerator
    g = torch.Generator().manual_seed(at.rank)
    data = list(zip(torch.randn(bs*steps, *shape, generator=g), torch.randint(0, 10, (bs*steps,), generator=g)))
    torch_loader = lambda: torch.utils.data.DataLoader(data, bs)
    def hand(model): return _loop(at, model, torch.optim.SGD(model.parameters(), .01), torch_loader())
    with changed_env(ACCELERATE_TORCH_DEVICE=at.device, ACCELERATE_BYPASS_DEVICE_MAP='true'): # two ranks may have one device
        acc = HFAccelerator(cpu=at.device.type=='cpu')
        model,opt = acc.prepare(m := make().to(at.device), torch.optim.SGD(m.parameters(), .01))
    return {'by hand':hand(wrap(make().to(at.device))), 'Accelerate':_loop(at, model, opt, torch_loader(), acc.backward)}

def _fits(at, make, shape, bs, steps):
    "A Learner, and a function that makes `steps` steps a rank"
    g = torch.Generator().manual_seed(0)
    n = bs*steps*at.size
    data = list(zip(torch.randn(n, *shape, generator=g), torch.randint(0, 10, (n,), generator=g)))
    dls = DataLoaders.from_dsets(data, [], bs=bs, num_workers=0, device=at.device)
    learn = Learner(dls, make(), loss_func=CrossEntropyLossFlat(), opt_func=SGD, lr=.01)
    learn._do_epoch_validate = noop
    return learn

def _lean(learn):
    with learn.lean_ctx(): learn.fit(1)

def _ratios(at, runs, steps, rounds=3):
    "Milliseconds of a step of each of `runs`, in turn, the median of what more steps take: `runs(n)` has functions that make `n` steps"
    short,long = runs(steps),runs(3*steps)
    times = {k:[] for k in short}
    for fs in (short,long):
        for f in fs.values(): f()
    for _ in range(rounds):
        for k in short: times[k].append((_timed(at, long[k], 1)-_timed(at, short[k], 1))/(2*steps))
    base,*_ = ms = [median(o)*1e3 for o in times.values()]
    return ', '.join(f'{k} {o:.2f} ms ({o/base:.2f})' for k,o in zip(short, ms))

works = dict(mlp=(mlp,(64,),64,40), cnn=(cnn,(3,32,32),64,20), resnet18=(resnet18,(3,64,64),64,10))

def _of_works(at, runs):
    chosen = works if at.device.type=='cuda' else dict(mlp=works['mlp'])
    return '; '.join(f'{k}: '+_ratios(at, partial(runs, *how), steps) for k,(*how,steps) in chosen.items())

@check('one', alone=True, secs=240)
def ratios(at):
    "A step by hand, with Accelerate, plain fastai and lean, in turn"
    def runs(*how):
        learn = _fits(at, *how)
        def quietly(f):
            with quiet(learn): f(learn)
        return _peers(at, *how, noop)|dict(fastai=lambda: quietly(lambda o: o.fit(1)), lean=lambda: quietly(_lean))
    return _of_works(at, runs)

@check('ranks', alone=True, secs=240)
def ratios_on_ranks(at):
    "The same on ranks, over the same process group"
    ids = [at.device.index] if at.device.type=='cuda' else None
    with ExitStack() as stack:
        def runs(*how):
            learn = _fits(at, *how)
            for o in (at.job(learn, sync_bn=False, desync_check=False),quiet(learn)): stack.enter_context(o)
            return _peers(at, *how, partial(DistributedDataParallel, device_ids=ids))|dict(fastdist=lambda: learn.fit(1))
        return _of_works(at, runs)
