"What mixes the samples of a batch is named by its cause, once, in the first epoch; what does not is silent"
import io,os,pytest,signal,tempfile,warnings
from dataclasses import dataclass
from contextlib import nullcontext,redirect_stderr
from accelerate import FullyShardedDataParallelPlugin
from fastcore.test import *
from fastcore.xtras import working_directory
from fastai.vision.all import *
from fastdist import *
from fastdist.evaluate import mixing
from compare import cases,sizes,usual
import learners

class HandNorm(nn.Module):
    "Batch norm by hand, in training only"
    def forward(self, x): return (x-x.mean(0))/(x.std(0)+1e-3) if self.training else x

class Centre(nn.Module):
    def forward(self, x): return x-x.mean(0)

class Spread(nn.Module):
    "StyleGAN's minibatch standard deviation"
    def forward(self, x): return torch.cat([x, x.std(0).mean().expand(len(x),1)], 1)

class Attends(nn.Module):
    def __init__(self, **kw):
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, **kw)
    def forward(self, x): return self.attn(*[x.view(len(x),1,8).expand(-1,4,-1)]*3, need_weights=False)[0][:,0]

class Experts(nn.Module):
    "Experts whose load is balanced by a term that is kept"
    def __init__(self):
        super().__init__()
        self.gate,self.experts = nn.Linear(8,2),nn.ModuleList([nn.Linear(8,8) for _ in range(2)])
    def forward(self, x):
        p = self.gate(x).softmax(1)
        self.balance = p.mean(0).square().sum()
        return sum(p[:,[i]]*e(x) for i,e in enumerate(self.experts))

class Noise(nn.Module):
    def forward(self, x): return x+torch.randn_like(x) if self.training else x
class OwnNoise(nn.Module):
    "Draws from a generator of its own"
    def __init__(self):
        super().__init__()
        self.g = torch.Generator()
    def forward(self, x): return x+torch.randn(x.shape, generator=self.g)

class TimeFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(8, 8)
    def forward(self, x): return self.rnn(x.expand(5, *x.shape))[0][-1]

class Flat(nn.Module):
    "Tokens of all samples in one dimension"
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
    def forward(self, x): return self.lin(x.view(-1,4)).view(-1,8)

@dataclass
class Power:
    by:float=2.

class Adds(Callback):
    def after_loss(self): self.learn.loss_grad = self.learn.loss_grad+self.pred.square().mean()
class Sees(Callback):
    "Reads the loss, and changes nothing"
    def after_loss(self): self.last = float(self.loss)
class Var(Callback):
    def after_loss(self): self.learn.loss_grad = self.learn.loss_grad+(1-self.pred.std(0)).relu().mean()
class ByItself(Callback):
    def after_loss(self): self.learn.loss_grad = self.learn.loss_grad/(1+self.loss)
class ByLoss(Callback):
    def before_backward(self): self.learn.loss_grad = self.learn.loss_grad*float(self.loss)
class Whitens(Callback):
    def before_batch(self): self.learn.xb = ((self.x-self.x.mean(0))/(self.x.std(0)+1e-3),)
class Centres(Callback):
    def after_pred(self): self.learn.pred = self.pred-self.pred.mean(0)
class Weighs(Callback):
    "Weights that are divided by their sum in the batch"
    def after_loss(self):
        w = self.x[:,0].abs()+.1
        self.learn.loss_grad = (self.learn.loss_grad*w).sum()/w.sum()
class PredictsTwice(Callback):
    "Centres the batch by what the model makes of it, which a probe cannot run"
    def before_batch(self): self.learn.xb = (self.x-self.model(self.x).mean(),)
class Writes(Callback):
    "Adds what depends on the other samples, and writes it to a file"
    def after_loss(self):
        term = self.pred.std(0).mean()
        Path(f'term{rank_distrib()}.txt').write_text(f'{term}')
        self.learn.loss_grad = self.learn.loss_grad+term
class Scales(Callback):
    "Twice the loss, and inputs with another range"
    def before_batch(self): self.learn.xb = (2*self.x-1,)
    def after_pred(self): self.learn.pred = self.pred/2
    def before_backward(self): self.learn.loss_grad = 2*self.learn.loss_grad
class Jitters(Callback):
    def before_batch(self): self.learn.xb = (self.x+.1*torch.randn_like(self.x),)
class Teaches(Callback):
    "Calls the model in `after_pred`, which is not tried"
    def after_pred(self): self.seen = self.model(self.x).mean()
class Distils(Callback):
    "Blends the loss with one by a model that it holds"
    def __init__(self, term): self.term,self.teacher = term,nn.Linear(6,3)
    def after_loss(self): self.learn.loss_grad = torch.lerp(self.learn.loss_grad, self.term(self.pred, self.teacher(self.x)), .3)
def by_sample(p, t): return F.kl_div(F.log_softmax(p, -1), F.softmax(t, -1), reduction='batchmean')
def by_pairs(p, t): return F.mse_loss(torch.cdist(p, p), torch.cdist(t, t))
class Distance(nn.Module):
    "A loss whose exponent lies in a data class"
    def __init__(self):
        super().__init__()
        self.how = Power()
    def forward(self, p, y): return F.cross_entropy(p, y, reduction='none').pow(self.how.by).mean()
class Enters(Callback):
    "Holds a context, which a trial must not enter"
    def before_fit(self): self.autocast = torch.autocast('cpu', dtype=torch.bfloat16)
    def before_batch(self): self.autocast.__enter__()
    def after_loss(self): self.autocast.__exit__(None, None, None)
class Covariance(Callback):
    "The term of VICReg"
    def after_loss(self):
        z = self.pred-self.pred.mean(0)
        self.learn.loss_grad = self.learn.loss_grad+(z.T@z/(len(z)-1)).fill_diagonal_(0).square().sum()

class WhitenBatch(ItemTransform):
    def encodes(self, b): return ((b[0]-b[0].mean(0))/(b[0].std(0)+1e-3), *b[1:])
class ScaleBatch(ItemTransform):
    def encodes(self, b): return (b[0]/2, *b[1:])
def transformed(tfm): # after the loaders were made
    learn = learner()
    learn.dls.add_tfms([tfm], 'after_batch')
    return learn

class ByWeights(nn.Module):
    "A mean by weights that depend on the class, and does not say so"
    def forward(self, p, y): return (F.cross_entropy(p, y, reduction='none')*(w := y+.5)/w.sum()).sum()
class InBatch(nn.Module):
    "Each sample against the others of its batch"
    def forward(self, p, y): return F.cross_entropy(F.normalize(p)@F.normalize(p).T, torch.arange(len(p)))

def learner(*ms, out=8, loss_func=None, **kw):
    set_seed(3)
    x,y = torch.randn(64,6),torch.arange(64)%3
    dls = DataLoaders.from_dsets(list(zip(x,y)), list(zip(x,y)), bs=8, num_workers=0, device='cpu')
    return Learner(dls, nn.Sequential(nn.Linear(6,8), *ms, nn.Linear(out,3)), loss_func=loss_func or CrossEntropyLossFlat(), **kw)

def hooked(f, late=False):
    learn = learner()
    getattr(learn.model[0].weight, 'register_post_accumulate_grad_hook' if late else 'register_hook')(f)
    return learn
def clamp_late(p): p.grad.clamp_(-.01, .01)

def fit_twice(learn, **kw):
    "Return warnings that speak of one process, and lines about what is unsettled"
    with redirect_stderr(io.StringIO()) as out, warnings.catch_warnings(record=True) as w, learn.distrib_ctx(**kw), learn.no_bar(), learn.no_logging():
        warnings.simplefilter('always')
        learn.fit(1, .01)
        learn.fit(1, .01)
    lines = [o for o in out.getvalue().splitlines() if 'No probe settles' in o]
    return [str(o.message) for o in w if 'process' in str(o.message) and o.category is not DeprecationWarning],lines # Python 3.12 and later have one at each fork beside a thread

def said(learn, **kw): return fit_twice(learn, **kw)[0]

wrong = dict(norm=(lambda: learner(HandNorm()), '1 .HandNorm. mixes'), spread=(lambda: learner(Spread(), out=9), '1 .Spread. mixes'),
    attention=(lambda: learner(Attends()), '1.attn .MultiheadAttention. mixes'), experts=(lambda: learner(Experts()), '1 .Experts. mixes'),
    second=(lambda: learner(nn.Sequential(nn.ReLU(), HandNorm()), HandNorm()), '1.1 .HandNorm. mixes'),
    var=(lambda: learner(cbs=Var()), '^Var changes the loss'), itself=(lambda: learner(cbs=ByItself()), '^ByItself changes the loss'),
    by_loss=(lambda: learner(cbs=ByLoss()), '^ByLoss makes something else of a batch in before_backward'), whitens=(lambda: learner(cbs=Whitens()), '^Whitens makes .* before_batch'),
    centres=(lambda: learner(cbs=Centres()), '^Centres makes .* after_pred'), covariance=(lambda: learner(cbs=Covariance()), '^Covariance changes the loss'),
    weighs=(lambda: learner(cbs=Weighs(), loss_func=CrossEntropyLossFlat(reduction='none')), '^Weighs changes the loss'), transform=(lambda: transformed(WhitenBatch()), '^WhitenBatch makes'),
    pairs=(lambda: learner(cbs=Distils(by_pairs)), '^Distils changes the loss'),
    by_weights=(lambda: learner(loss_func=ByWeights()), '^Your loss is neither'), in_batch=(lambda: learner(loss_func=InBatch()), '^Your loss is neither'),
    clamp=(lambda: hooked(lambda g: g.clamp(-.01,.01)), 'hook that you registered on 0.weight'), late_clamp=(lambda: hooked(clamp_late, late=True), 'hook that you registered on 0.weight'))
unsettled = dict(predicts=(lambda: learner(cbs=[PredictsTwice(),Writes()]), 'PredictsTwice changes the batch in before_batch; Writes changes the loss in after_loss'),
    writes=(lambda: hooked(lambda g: open('norms.txt', 'a') and g/2), 'your hook on 0.weight sees the gradient of one rank'))
right = dict(batchnorm=lambda: learner(nn.BatchNorm1d(8), nn.Dropout()), attention=lambda: learner(Attends(batch_first=True)), noise=lambda: learner(Noise()),
    own=lambda: learner(OwnNoise()), time=lambda: learner(TimeFirst()), flat=lambda: learner(Flat()), adds=lambda: learner(cbs=Adds()),
    sees=lambda: learner(cbs=Sees()), scales=lambda: learner(cbs=Scales()), jitters=lambda: learner(cbs=Jitters()), teaches=lambda: learner(cbs=Teaches()),
    distils=lambda: learner(cbs=Distils(by_sample)), data_class=lambda: learner(loss_func=Distance()),
    enters=lambda: learner(cbs=Enters()), transform=lambda: transformed(ScaleBatch()), half=lambda: hooked(lambda g: g/2),
    **{k:getattr(learners, k) for k in ('vision','tabular','collab','language_model','text_classifier')})

@pytest.mark.replicas # test_in_shards has what can be tried there
@sizes
@cases(**usual(wrong, 'norm', 'second', 'itself', 'by_loss', 'centres', 'transform', 'in_batch', 'late_clamp'))
def test_what_mixes_is_named_once(cases, size):
    res = on_ranks(lambda rank: {k:said(mk()) for k,(mk,_) in cases.items()}, size, timeout=120, join=False)
    for k,(_,what) in cases.items():
        test_eq([len(o[k]) for o in res], [1]+[0]*(size-1))
        assert re.search(what, res[0][k][0]), f'{k}: {res[0][k]}'

@pytest.mark.replicas
@sizes
@cases(**unsettled)
def test_what_no_probe_settles_is_said_once(cases, size):
    "In one line of one rank, with the command that settles it, and no warning"
    res = on_ranks(lambda rank: {k:fit_twice(mk()) for k,(mk,_) in cases.items()}, size, timeout=120, join=False)
    for k,(_,what) in cases.items():
        warned,lines = zip(*[o[k] for o in res])
        test_eq(warned, ([],)*size)
        test_eq([len(o) for o in lines], [1]+[0]*(size-1))
        assert what in lines[0][0] and 'fastdist-check --audit --' in lines[0][0], f'{k}: {lines[0]}'

def test_what_does_not_mix_is_silent():
    silent = usual(right, 'attention', 'own', 'adds', 'distils', 'enters', 'transform', 'half')
    res = on_ranks(lambda rank: {k:said(mk()) for k,mk in silent.items()}, 2, timeout=240, join=False)
    test_eq(res, [{k:[] for k in silent}]*2)

# In shards all ranks make the passes of a trial

in_model = 'norm','spread','attention','experts','second'
not_in_model = 'batchnorm','attention','noise','own','time','flat','text_classifier','vision','tabular'

@pytest.mark.whole
@sizes
@cases(**usual({k:wrong[k] for k in in_model}, 'norm', 'experts'))
def test_in_shards(cases, size):
    res = on_ranks(lambda rank: {k:said(mk(), shard=True) for k,(mk,_) in cases.items()}, size, timeout=120, join=False)
    for k,(_,what) in cases.items():
        test_eq([len(o[k]) for o in res], [1]+[0]*(size-1))
        assert re.search(what, res[0][k][0]), f'{k}: {res[0][k]}'

@pytest.mark.whole
@sizes
@cases(**usual({k:right[k] for k in not_in_model}, 'batchnorm', 'own'))
def test_in_shards_what_does_not_mix_is_silent(cases, size):
    test_eq(on_ranks(lambda rank: {k:said(mk(), shard=True) for k,mk in cases.items()}, size, timeout=240, join=False), [{k:[] for k in cases}]*size)

class Unit(nn.Linear): "A unit in shards"
class FailsOnFew(nn.Module):
    "Raises an error for few samples, behind the first of its units, where it `raises`"
    def __init__(self, fails):
        super().__init__()
        self.raises,self.units = fails,nn.Sequential(*[Unit(8,8) for _ in range(3)])
    def forward(self, x):
        for i,l in enumerate(self.units):
            if i and len(x)<3 and self.raises: raise ValueError('too few samples')
            x = l(x)
        return x

def fit_in_units(rank, on=()):
    set_seed(3) # whichever test it is in
    learn = learner(FailsOnFew(rank in on), HandNorm())
    found = said(learn, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy='transformer_based_wrap', transformer_cls_names_to_wrap=['Unit']))
    return [o for o in found if 'mixes' in o],[p.detach() for p in learn.model.parameters()]

@pytest.fixture(scope='module')
def untried():
    "Weights of a fit without a trial"
    def fails(*_): raise ValueError('no trial')
    with pytest.MonkeyPatch.context() as m:
        m.setattr('fastdist.train.gradients.first_mixing', fails)
        plain = on_ranks(fit_in_units, 3, timeout=60, join=False)
    test_eq([o for o,_ in plain], [[],[],[]])
    return [ps for _,ps in plain]

@pytest.mark.whole
@pytest.mark.parametrize('on', ((),(0,),(1,),(1,2),(0,1,2)))
@pytest.mark.by_default('on0')
def test_in_shards_a_rank_that_fails_serves_the_others(on, untried):
    "What mixes is named unless rank 0 fails, and weights are those of a fit without a trial"
    res = on_ranks(partial(fit_in_units, on=on), 3, timeout=60, join=False)
    test_eq([len(o) for o,_ in res], [int(0 not in on),0,0])
    for (_,a),b in zip(res, untried): assert all(map(torch.equal, a, b))

def fit_few(rank):
    "Two samples a rank in the only batch, none on the last of three ranks"
    set_seed(3)
    data = list(zip(torch.randn(4,6), torch.arange(4)%3))
    dls = DataLoaders.from_dsets(data, data, bs=2, drop_last=False, num_workers=0, device='cpu')
    learn = Learner(dls, nn.Sequential(nn.Linear(6,8), Centre(), nn.Linear(8,3)), loss_func=CrossEntropyLossFlat())
    return [o for o in said(learn, shard=True) if 'mixes' in o],[p.detach() for p in learn.model.parameters()]

@pytest.mark.whole
@pytest.mark.parametrize('fit', (fit_in_units,fit_few))
def test_in_shards_what_cannot_be_told_on_rank_0_ends_the_trial_on_all(fit, monkeypatch):
    plain = on_ranks(fit, 3, timeout=60, join=False)
    test_eq([len(o) for o,_ in plain], [1,0,0])
    def fails(*_): raise RuntimeError('outputs that cannot be compared')
    monkeypatch.setattr(mixing, '_differs', fails)
    res = on_ranks(fit, 3, timeout=60, join=False)
    test_eq([o for o,_ in res], [[],[],[]])
    for (_,a),(_,b) in zip(res, plain): assert all(map(torch.equal, a, b))

def test_of_two_samples_what_gives_nan_for_one_is_named():
    names = [mixing.first_mixing(mixing.CopyProbe(nn.Sequential(nn.Linear(6,8), m)), (torch.randn(2,6),)) for m in (HandNorm(),nn.LayerNorm(8))]
    test_eq(names, ['1',None])

def test_a_trial_leaves_nothing():
    "Weights are those of plain training, where the model counts its calls and holds a list, and a hook of the user's sees only what one process shows it"
    class Counts(nn.Module):
        n = 0
        def __init__(self):
            super().__init__()
            self.sizes = []
        def forward(self, x):
            self.n += 1
            self.sizes.append(len(x))
            return F.dropout(x, .5, training=self.training)
    def fit(rank=None):
        learn = learner(Counts(), nn.BatchNorm1d(8))
        seen = []
        learn.model[0].register_forward_hook(lambda m,i,o: seen.append(len(o)))
        with learn.distrib_ctx() if rank is not None else nullcontext(), learn.no_bar(), learn.no_logging(): learn.fit(1, .01)
        return learn.model[1].n,learn.model[1].sizes,seen
    one,many = fit(),on_ranks(fit, 2, join=False)
    for n,sizes,seen in many: test_eq((n,len(sizes),len(seen)), (len(sizes),)*3)
    test_eq(many[0][:2], many[1][:2])
    test_eq(one[0], len(one[2]))

calls = []
class Tallies(nn.Module):
    "Counts its calls in its class and in the script"
    sizes = []
    def forward(self, x):
        calls.append(len(x))
        self.sizes.append(len(x))
        return x
class Autocasts(Callback):
    "Enters an autocast in one event and leaves it in another"
    def before_batch(self):
        self.low = torch.autocast('cpu', dtype=torch.bfloat16)
        self.low.__enter__()
    def after_pred(self):
        self.low.__exit__(None, None, None)
        self.learn.pred = self.pred.float()

@pytest.mark.whole
@pytest.mark.parametrize('shard', (False,True))
def test_a_trial_leaves_nothing_in_a_class_in_the_script_and_in_precision(shard):
    def fit(rank):
        learn = learner(Tallies(), cbs=Autocasts())
        with learn.distrib_ctx(shard=shard), learn.no_bar(), learn.no_logging(): learn.fit(1, .01)
        return len(calls),len(Tallies.sizes),torch.is_autocast_enabled('cpu')
    test_eq(on_ranks(fit, 2, join=False), [(8,8,False)]*2) # four batches to train and four to validate

@pytest.mark.whole
@pytest.mark.parametrize('f', [lambda x: signal.raise_signal(signal.SIGURG), lambda x: torch.save(x, 'x.pth'), lambda x: np.save('x.npy', x.numpy()),
    lambda x: x.numpy().tofile('x')])
@pytest.mark.by_default('<lambda>1')
def test_what_writes_is_called_as_often_as_in_one_process(f):
    "A callback is never called for a probe, and a loss or a model that writes a file writes as often as it is called"
    class Marks(Callback):
        n = 0
        def before_batch(self):
            self.n += 1
            f(self.x)
    def fit(rank=None):
        with tempfile.TemporaryDirectory() as d, working_directory(d):
            learn = learner(cbs=Marks())
            with learn.distrib_ctx() if rank is not None else nullcontext(), learn.no_bar(), learn.no_logging(): learn.fit(1, .01)
            return learn.marks.n,sorted(os.listdir())
    one,many = fit(),on_ranks(fit, 2, join=False)
    test_eq(many, [(8,one[1])]*2) # four batches to train and four to validate

def test_a_trial_costs_little(monkeypatch):
    "A model that is right runs on two times six samples; one that mixes on five times, one that draws on six"
    sizes,outputs = [],mixing.module_outputs
    def counted(model, xb, training):
        sizes.append(len(xb[0]))
        return outputs(model, xb, training)
    monkeypatch.setattr(mixing, 'module_outputs', counted)
    def cost(*ms):
        sizes.clear()
        return mixing.first_mixing(mixing.CopyProbe(nn.Sequential(*ms)), (torch.randn(16,8),)),sum(sizes)
    test_eq(cost(nn.Linear(8,8), nn.Dropout()), (None,12))
    test_eq(cost(nn.Linear(8,8), HandNorm()), ('1',30))
    test_eq(cost(nn.Linear(8,8), Noise()), (None,36))
