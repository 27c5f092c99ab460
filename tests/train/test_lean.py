"A Learner that is lean does what it does without, to the bit, with every callback, and nothing is left on it"
import pickle,pytest,random,shutil,threading
from contextlib import nullcontext
from copy import deepcopy
from fastai.callback.all import *
from fastai.callback.fp16 import AMPMode
from fastai.losses import *
from fastai.optimizer import *
from torch.utils.data import TensorDataset,DataLoader as TorchLoader
from learners import *
from fastdist import *
from fastdist.train.step import Lean

def exact(a, b, at=''):
    "`b` is `a`: types, and values to the bit"
    assert type(a) is type(b), f'{at}: {type(a)} {type(b)}'
    if isinstance(a, dict):
        assert list(a)==list(b), at
        for k in a: exact(a[k], b[k], f'{at}.{k}')
    elif isinstance(a, (list,tuple,L)):
        assert len(a)==len(b), f'{at}: {len(a)} {len(b)}'
        for i,(x,y) in enumerate(zip(a, b)): exact(x, y, f'{at}[{i}]')
    elif isinstance(a, (Tensor,np.ndarray)):
        x,y = [torch.as_tensor(o).as_subclass(Tensor) for o in (a,b)]
        assert x.shape==y.shape and x.dtype==y.dtype and torch.equal(x.nan_to_num(123.), y.nan_to_num(123.)), f'{at}: {x} {y}'
    else: assert a==b or a!=a and b!=b, f'{at}: {a} {b}'

def halves(m): return [params(m[:2]),params(m[2:])] if isinstance(m, nn.Sequential) else params(m)

def toy(n=37, bs=4, loss=None, model=None, data=None, **kw):
    "Two features, ragged last batches, dropout"
    x = torch.linspace(-1, 1, 2*n).view(n, 2)
    data = data or [(o,o.sum(0, keepdim=True)) for o in x]
    dls = DataLoaders.from_dsets(data, data[:n//2+1], bs=bs, shuffle=True, num_workers=0, device='cpu')
    model = model or nn.Sequential(nn.Linear(2,6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(.2), nn.Linear(6,1))
    return Learner(dls, model, loss_func=loss or MSELossFlat(), splitter=halves, **kw)

def state(learn):
    rec,opt = getattr(learn, 'recorder', None),learn.opt
    recorded = {k:vars(rec)[k] for k in ('lrs','losses','values','iters') if k in vars(rec)} if rec else {}
    res = dict(rec=recorded, weights=dict(learn.model.state_dict()), opt=opt.state_dict() if opt else None)
    at = {k:vars(learn).get(k) for k in ('loss','smooth_loss','train_iter','pct_train','n_iter','epoch','training','xb','yb','pred')}
    rngs = random.getstate(),list(np.random.get_state()[1]),torch.get_rng_state()
    return dict(res, at=at, rngs=rngs, grads=[None if p.grad is None else p.grad.clone() for p in learn.model.parameters()])

def outcome(mk, f, lean):
    set_seed(7)
    learn = mk()
    for dl in learn.dls.loaders: dl.rng = random.Random(5)
    before = set(vars(learn))
    with learn.no_logging(), nullcontext() if getattr(f, 'bar', False) else learn.no_bar():
        if lean: learn.lean()
        res = f(learn)
        if lean: learn.unlean()
    if lean: check_clean(learn)
    return dict(res=res, **state(learn))

def ours(v):
    while isinstance(v, partial): v = v.func
    return any(type(o).__module__.startswith('fastdist') for o in (v, getattr(v, '__self__', None)))

def check_clean(learn):
    "Nothing of ours on the Learner, its optimizer or its callbacks"
    for o in (learn, learn.opt, learn.loss_func, *learn.cbs, *learn.metrics):
        assert not [k for k,v in getattr(o, '__dict__', {}).items() if ours(v)], o

def same(mk, f):
    a,b = [outcome(mk, f, o) for o in (False,True)]
    exact(a, b)
    return a

def fits(n=2, **kw): return lambda learn: learn.fit(n, 1e-2, **kw)
def each(d): return pytest.mark.parametrize('f', d.values(), ids=list(d))

def many(learn):
    learn.fit_one_cycle(1, slice(1e-3,1e-2))
    learn.freeze()
    learn.fit_flat_cos(1, 1e-2)
    learn.unfreeze()
    learn.fit_sgdr(2, 1, 1e-2)
    learn.fit(1, wd=.1, reset_opt=True)

def preds(learn):
    learn.fit(1, 1e-2)
    dl = learn.dls.train
    kws = dict(), dict(with_loss=True), dict(with_input=True, with_decoded=True), dict(dl=dl), dict(ds_idx=0, reorder=False)
    return [learn.get_preds(**kw) for kw in kws]

fronts = dict(fits=many, tune=lambda l: l.fine_tune(2, 1e-2), find=lambda l: (tuple(l.lr_find(num_it=20, show_plot=False)), l.fit(1)),
    validate=lambda l: [list(l.validate()), list(l.validate(dl=l.dls.train)), l.fit(1), list(l.validate())], preds=preds)

@each(fronts)
def test_fronts(f): same(partial(toy, metrics=[mae,rmse]), f)

opts = dict(sgd=SGD, mom=partial(SGD, mom=.9, wd=.1, decouple_wd=False), rms=RMSProp, adam=Adam, radam=RAdam, qhadam=QHAdam, larc=Larc,
    lamb=Lamb, ranger=ranger,    wrapped=partial(OptimWrapper, opt=torch.optim.AdamW))
@each(opts)
def test_opts(f): same(partial(toy, opt_func=f), lambda l: (l.fit_one_cycle(1, 1e-2), l.freeze(), l.fit(1), l.get_preds())[-1])

def classes(y):
    data = [(torch.tensor([i/20,1.-i/20]),y(i)) for i in range(21)]
    return lambda **kw: toy(data=data, model=nn.Sequential(nn.Linear(2,8), nn.Linear(8,3)), **kw)
def label(i): return i%3
def hot(i): return torch.tensor([float(i%2),1.,0.])
losses = dict(ce=(CrossEntropyLossFlat,label), smooth=(LabelSmoothingCrossEntropyFlat,label), focal=(FocalLossFlat,label), torch_ce=(nn.CrossEntropyLoss,label))
losses |= dict(smooth_=(LabelSmoothingCrossEntropy,label), focal_=(FocalLoss,label), fun=(lambda: F.cross_entropy,label))
losses |= dict(mse=(MSELossFlat,hot), l1=(L1LossFlat,hot), bce=(BCEWithLogitsLossFlat,hot), mine=(lambda: lambda p,y: ((p-y)**2).sum(),hot))
losses |= dict(weighed=(partial(CrossEntropyLossFlat, weight=torch.tensor([1.,2.,.5])),label), sums=(partial(CrossEntropyLossFlat, reduction='sum'),label))
losses |= dict(ints=(CrossEntropyLossFlat,lambda i: torch.tensor(i%3, dtype=torch.int16)))
@each(losses)
def test_losses(f): same(lambda: classes(f[1])(loss=f[0]()), lambda l: (l.fit(2, 1e-2), l.get_preds(with_loss=f[0] not in (losses['mine'][0],)))[-1])

@each({k:losses[k] for k in ('ce','smooth','focal','mse','l1','bce','weighed')})
@pytest.mark.by_default('ce', 'mse', 'weighed')
def test_losses_of_a_double_model(f):
    "fastai's losses compute in single precision"
    def mk():
        learn = classes(f[1])(loss=f[0]())
        learn.model.double()
        learn.add_cb(Callback(before_batch=lambda self: setattr(self.learn, 'xb', tuple(o.double() for o in self.xb))))
        return learn
    same(mk, lambda l: l.fit(2, 1e-2))

class Counted(Metric):
    def reset(self): self.n,self.seen = 0,[]
    def accumulate(self, learn): self.n,self.seen = self.n+len(learn.y),[*self.seen,type(learn.pred).__name__,type(learn.loss).__name__]
    @property
    def value(self): return self.n+len(set(self.seen))
class Doubled(AvgMetric):
    def accumulate(self, learn):
        super().accumulate(learn)
        self.total = self.total*2
def at_times(p, y): return 0. if y.ravel()[0]==0 else (p.argmax(1)==y.ravel()).float().mean()
mets = [accuracy,error_rate,partial(top_k_accuracy, k=2),lambda p,y: (p.argmax(1)==y).float().mean(),F1Score(average='macro'),
    Precision(average='micro'),Counted,Doubled(accuracy),
    AccumMetric(lambda p,y: p.sum()-y.sum(), flatten=False),at_times,Perplexity(),lambda p,y: p.mean().item(),ValueMetric(lambda: 3, 'three')]
@pytest.mark.whole
@each(dict(valid={}, both=dict(train_metrics=True), train=dict(train_metrics=True, valid_metrics=False), times=dict(add_time=False)))
def test_metrics(f):
    def fit(l):
        rec = l.recorder
        for k,v in f.items(): setattr(rec, k, v)
        l.fit(2, 1e-2)
        return l.recorder.metric_names
    same(lambda: classes(label)(loss=CrossEntropyLossFlat(), metrics=deepcopy(mets)), fit)

# Callbacks of fastai

class Track(TrackerCallback):
    def after_epoch(self):
        super().after_epoch()
        self.learn.tracked = [*getattr(self.learn, 'tracked', []), float(self.best), self.new_best]
plain_cbs = CSVLogger,BnFreeze,FetchPredsCallback,MCDropoutCallback,CollectDataCallback,ShortEpochCallback,TerminateOnNaNCallback,CastToTensor
theirs = {o.__name__:o for o in plain_cbs}
theirs |= dict(bf16=lambda: MixedPrecision(AMPMode.BF16), accumulate=lambda: GradientAccumulation(10), clip=lambda: GradientClip(.1))
theirs |= dict(skip=lambda: SkipToEpoch(1))
theirs |= dict(save=lambda: SaveModelCallback(fname='m'), hooks=lambda: ActivationStats(with_hist=True), track=lambda: Track('valid_loss'))
theirs |= dict(best=lambda: [SaveModelCallback(every_epoch=True),EarlyStoppingCallback(patience=1, min_delta=9.)])
theirs |= dict(plateau=lambda: ReduceLROnPlateau(patience=1, min_delta=9.), short=lambda: ShortEpochCallback(.4, short_valid=False))
scheds = {'lr':SchedCos(1e-2, 1e-4), 'mom':combine_scheds([.3,.7], [SchedLin(.9,.8),SchedNo(.8,.8)])}
theirs |= dict(param=lambda: ParamScheduler(scheds))

def with_theirs(f):
    def run(l):
        cbs = L(f())
        l.fit(3, 1e-2, cbs=cbs)
        stats = [{k:x if isinstance(x, float) else list(x) for k,x in t.items()} for o in cbs if isinstance(o, ActivationStats) for st in o.stats for t in st]
        return [{k:v for k,v in vars(o).items() if k in ('best','count','wait','preds','targets','losses','inputs','data')} for o in cbs],stats,vars(l).get('tracked'),l.get_preds()
    return run

@each(theirs)
@pytest.mark.by_default('CSVLogger', 'FetchPreds', 'ShortEpoch', 'TerminateOnNaN', 'bf16', 'accumulate', 'skip', 'hooks')
def test_callbacks(f): same(partial(toy, metrics=mae), with_theirs(f))

@pytest.mark.parametrize('cb', [MixUp,CutMix], ids=['mixup','cutmix'])
def test_mixed(cb):
    data = [(torch.full((1,6,6), i/20.),i%3) for i in range(21)]
    mk = lambda: toy(data=data, loss=CrossEntropyLossFlat(), model=nn.Sequential(nn.Conv2d(1,3,3), nn.Flatten(), nn.Linear(48,3)), metrics=accuracy)
    same(mk, lambda l: (l.fit(2, 1e-2, cbs=cb()), l.get_preds(with_loss=True))[1])

def test_exploding(): same(lambda: toy(loss=lambda p,y: (p-y).mean()/0), lambda l: l.fit(2, cbs=TerminateOnNaNCallback()))

def test_progress_bar(capsys):
    def run(l): l.fit(2, 1e-2),l.validate(),l.get_preds()
    run.bar = True
    outs = []
    for o in (False,True):
        outcome(partial(toy, metrics=mae), run, o)
        outs.append([x for x in capsys.readouterr().out.splitlines() if '0:0' not in x])
    assert outs[0]==outs[1]

# Data

class Two(Module):
    def __init__(self): self.a,self.b = nn.Linear(2,3),nn.Linear(3,1)
    def forward(self, x, z): return self.b(self.a(x)+z)
class FromDict(Module):
    def __init__(self): self.a = nn.Linear(2,1)
    def forward(self, d): return self.a(d['x'])
class Tuple(Module):
    def __init__(self): self.a = nn.Linear(2,2)
    def forward(self, x): return (o := self.a(x))[:,:1],o[:,1:]
xs = torch.linspace(-1, 1, 74).view(37, 2)
def torch_dls(l=None):
    ds = TensorDataset(xs, xs.sum(1, keepdim=True))
    return Learner(DataLoaders(TorchLoader(ds, batch_size=4, shuffle=True), TorchLoader(ds, batch_size=5)), nn.Linear(2,1), loss_func=nn.MSELoss(), metrics=mae)
def own_n_inp():
    learn = toy(data=[(o,o.sum()*torch.ones(3),o[:1]) for o in xs], model=Two(), loss=MSELossFlat())
    learn.dls.n_inp = 2
    return learn
data = dict(torch=torch_dls, n_inp=own_n_inp, vision=vision, tabular=tabular, collab=collab, language=language_model, classifier=text_classifier)
data |= dict(inputs=lambda: toy(data=[(o,o.sum()*torch.ones(3),o[:1]) for o in xs], model=Two()), targets=lambda: _targets())
data |= dict(dicts=lambda: toy(data=[(dict(x=o),o[:1]) for o in xs], model=FromDict()))
def _targets():
    learn = toy(data=[(o,o[:1],o[1:]) for o in xs], model=Tuple(), loss=lambda p,a,b: F.mse_loss(p[0],a)+F.l1_loss(p[1],b))
    learn.dls.n_inp = 1
    return learn

def use(l):
    torch.set_num_threads(1)
    l.fit_one_cycle(1, 1e-2)
    return list(l.validate()),l.get_preds(dl=l.dls.valid)

@each(data)
@pytest.mark.by_default('vision', 'language', 'dicts', 'torch')
def test_data(f): same(f, use)

def shown(l):
    l.fit(1, 1e-2)
    res = l.predict(l.dls.valid_ds[0][0]),l.tta(n=2),l.get_preds(with_loss=True, with_input=True, with_decoded=True)
    l.show_results()
    return res
@pytest.mark.whole
def test_vision_results(): same(vision, shown)
@pytest.mark.whole
def test_no_targets(): same(vision, lambda l: (l.fit(1), l.get_preds(dl=l.dls.test_dl(L(range(6)))))[1][0])

# Callbacks of users

class Trace(Callback):
    "Notes each event with what a callback sees there"
    order = 60
    def __init__(self): self.seen = []
    def __call__(self, event_name):
        at = vars(self.learn)
        loss,pred = at.get('loss'),at.get('pred')
        value = None if loss is None else float(loss.detach().mean())
        self.seen.append((event_name,*[at.get(k) for k in ('iter','epoch','training')],type(loss),type(pred),value))

def own(f, *cbs, n=2, mk=None):
    "The same with and without; errors are a part of what is compared, and the Learner is used again"
    def run(l):
        tr,said = Trace(),[]
        l.add_cb(tr)
        try: res = f(l, said)
        except Exception as e: res = type(e),str(e)
        l.remove_cb(tr)
        check_usable(l)
        l.fit(1, 1e-3)
        return res,tr.seen,said,[type(o).__name__ for o in l.cbs if type(o).__name__!='Lean']
    return same(mk or partial(toy, metrics=mae), run)
def check_usable(l): assert isinstance(l.model, nn.Module) and l.logger is noop

class Caller(Callback):
    def __init__(self, said): self.said = said
    def __call__(self, event_name): self.said.append((event_name,getattr(self, 'iter', None)))
def on(event_name, f, **kw):
    "A callback that calls `f(cb)` at an event"
    cb = Callback()
    for k,v in kw.items(): setattr(cb, k, v)
    setattr(cb, event_name, lambda: f(cb))
    return cb

def test_own_call(): own(lambda l, said: l.fit(2, cbs=Caller(said)))

def toggling(l, said):
    class Toggled(Callback):
        def after_pred(self): said.append(('pred',self.iter,self.training))
        def after_batch(self): said.append(('batch',self.iter,self.training))
        def after_fit(self): said.append('fit')
    t = Toggled()
    def toggle(cb):
        k = ('run','run_train','run_valid')[(cb.iter+cb.epoch)%3]
        setattr(t, k, not getattr(t, k))
    l.fit(3, cbs=[t,on('before_batch', toggle, order=-3)])
    l.fit(1, cbs=t)
def test_toggled(): own(toggling)

def come_and_go(l, said):
    class Guest(Callback):
        order = 3
        def after_pred(self): said.append(('pred',self.iter,self.training))
        def after_loss(self): said.append(('loss',self.iter))
        def after_batch(self): said.append(('batch',self.iter))
    guest = Guest()
    def come(cb):
        if cb.iter==2: cb.learn.add_cb(guest)
        if cb.iter==4: cb.learn.remove_cb(guest)
    for e in ('before_batch','after_pred','after_loss','after_batch'): l.fit(1, cbs=on(e, come))
def test_added_and_removed(): own(come_and_go)

def test_removes_itself():
    def once(cb): cb.learn.remove_cb(cb)
    def run(l, said):
        for e in ('before_batch','after_loss','after_batch'): l.add_cb(on(e, lambda cb: (said.append(cb.iter), once(cb)))).fit(1)
    own(run)

everywhere = [o for o in 'before_fit before_epoch before_train before_batch after_pred after_loss before_backward after_backward before_step after_step after_batch after_train before_validate after_validate after_epoch after_fit'.split()]
@pytest.mark.parametrize('e', everywhere)
@pytest.mark.by_default('before_fit', 'before_batch', 'after_step', 'after_epoch')
def test_raises(e):
    def fail(cb):
        if getattr(cb, 'iter', 0)==1 or not e.endswith(('batch','pred','loss','step','backward')): raise ValueError('no')
    def run(l, said):
        try: l.fit(2, cbs=on(e, fail))
        finally: l.remove_cbs([o for o in l.cbs if type(o) is Callback])
    own(run)
def test_raises_nothing():
    def fail(cb): assert cb.iter<2
    own(lambda l, said: l.fit(2, cbs=on('after_batch', fail)))

stops = CancelStepException,CancelBackwardException,CancelBatchException,CancelTrainException,CancelValidException,CancelEpochException,CancelFitException
@pytest.mark.whole
@pytest.mark.parametrize('ex', stops)
@pytest.mark.by_default('CancelStep', 'CancelBatch', 'CancelFit')
def test_cancels(ex):
    def run(l, said):
        for e in everywhere:
            def stop(cb):
                if getattr(cb, 'iter', 0) in (1,3) or e in everywhere[:3]+everywhere[-5:]: raise ex
            try: l.fit(2, 1e-3, cbs=on(e, stop))
            except Exception as x: said.append((e,type(x)))
            said.append([type(o).__name__ for o in l.cbs if type(o).__name__!='Lean'])
    own(run)

def replacing(l, said):
    def xb(cb): cb.learn.xb,cb.learn.yb = tuple(o*2 for o in cb.xb),tuple(TensorBase(o) for o in cb.yb)
    def yb(cb): cb.learn.xb,cb.learn.yb = [tuple(o[:1] for o in b) for b in (cb.xb,cb.yb)]
    def pred(cb): cb.learn.pred = cb.pred*.5
    def typed_pred(cb): cb.learn.pred = TensorImage(cb.pred)
    def loss(cb): cb.learn.loss_grad,cb.learn.loss = cb.loss_grad*3,cb.loss_grad.clone().as_subclass(Tensor)
    def big(cb): cb.learn.loss = cb.loss*2
    for e,f in dict(before_batch=xb, after_pred=pred, after_loss=loss, before_backward=big).items(): l.fit(1, 1e-2, cbs=on(e, f, order=20))
    l.fit(1, 1e-2, cbs=on('after_pred', typed_pred, order=20))
    l.fit(1, 1e-2, cbs=[BnFreeze(),on('before_batch', yb, order=20)])
    return l.get_preds()
def test_replaces(): own(replacing)

def exchanging(l, said):
    def f(cb):
        if cb.iter==2: cb.learn.loss_func = [F.l1_loss,MSELossFlat(),nn.MSELoss(),lambda p,y: ((p-y)**2).mean()][(cb.epoch+cb.training)%4]
        if cb.iter==3 and cb.training: cb.learn.model = deepcopy(cb.learn.model)
        if cb.iter==3 and cb.training: cb.learn.create_opt()
    for e in ('before_batch','after_pred','after_batch'): l.fit(2, 1e-2, cbs=on(e, f))
    return l.get_preds(with_loss=False)
def test_exchanges(): own(exchanging)

def instance_methods(l, said):
    cb,late = Callback(),Callback()
    cb.after_batch = lambda: said.append(('batch',cb.iter))
    def f(_):
        if l.iter==1: late.after_loss = lambda: said.append(('late',l.iter,l.training))
        if l.iter==2: late.after_loss = lambda: said.append(('later',l.iter))
        if l.iter==3: vars(late).pop('after_loss', None)
        if l.iter==3: late.order = 55
        if l.iter==4: l.recorder.after_batch = lambda: (said.append('own'), type(l.recorder).after_batch(l.recorder))
    l.fit(2, cbs=[cb,late,on('before_batch', f)])
    vars(l.recorder).pop('after_batch', None)
def test_instance_methods(): own(instance_methods)

class SubStep(Learner):
    def _step(self):
        self.steps = getattr(self, 'steps', 0)+1
        super()._step()
class SubBatch(Learner):
    def _do_one_batch(self):
        self.batches = getattr(self, 'batches', 0)+1
        super()._do_one_batch()
class SubSplit(Learner):
    def _split(self, b): self.xb,self.yb = tuple(o*2 for o in b[:1]),b[1:]
class SubOne(Learner):
    def one_batch(self, i, b): super().one_batch(i, b) if i!=1 else None
class SubAll(Learner):
    def all_batches(self):
        self.n_iter = 2
        for i,b in zip(range(2), self.dl): self.one_batch(i, b)
class SubBack(Learner):
    def _backward(self): (self.loss_grad*2).backward()
class SubCall(Learner):
    def __call__(self, event_name):
        self.called = getattr(self, 'called', [])+[event_name]
        super().__call__(event_name)
class SubCallOne(Learner):
    def _call_one(self, event_name):
        self.called = getattr(self, 'called', [])+[event_name]
        super()._call_one(event_name)
class SubEvents(Learner):
    def _with_events(self, f, event_type, *args, **kwargs):
        self.called = getattr(self, 'called', [])+[event_type]
        super()._with_events(f, event_type, *args, **kwargs)
class SubGrad(Learner):
    def _do_grad_opt(self):
        for f in (self._backward,self._step,self.opt.zero_grad): f()
class SubDevice(Learner):
    def _set_device(self, b): return tuple(o+1 for o in super()._set_device(b))
def kind(cls, **kw):
    def mk():
        l = toy(metrics=mae)
        return cls(l.dls, l.model, loss_func=l.loss_func, metrics=mae, **kw)
    return mk
counts = 'steps','batches','called'
def counted(l, said):
    l.fit(2, 1e-2)
    l.validate()
    return l.get_preds(),[vars(l).get(k) for k in counts]
@pytest.mark.whole
@each({o.__name__:o for o in (SubStep,SubBatch,SubSplit,SubOne,SubAll,SubBack,SubCall,SubCallOne,SubEvents,SubGrad,SubDevice)})
@pytest.mark.by_default('SubStep', 'SubBatch', 'SubAll', 'SubEvents')
def test_subclasses(f): own(counted, mk=kind(f))

own_methods = '_do_one_batch','_split','one_batch','_step','_backward','_call_one','_with_events','all_batches','_set_device','_do_grad_opt'
@pytest.mark.whole
@pytest.mark.parametrize('k', own_methods)
@pytest.mark.by_default('one_batch', '_step', '_call_one')
def test_instance_of_learner(k):
    "Before it becomes lean, and by a callback from before_fit to after_fit"
    def put(l, said):
        old = getattr(l, k)
        def new(*args, **kwargs):
            said.append(k)
            return old(*args, **kwargs)
        setattr(l, k, new)
    def mk():
        l = toy()
        put(l, l.__dict__.setdefault('said', []))
        return l
    own(lambda l, said: (l.fit(1), len(l.said))[1], mk=mk)
    def run(l, said):
        class Put(Callback):
            def before_fit(self):
                self.old = vars(l).get(k)
                put(l, said)
            def after_fit(self): vars(l).pop(k) if self.old is None else setattr(l, k, self.old)
        l.fit(2, cbs=Put())
        l.get_preds()
    own(run)

class Odd(Callback):
    @property
    def training(self): return True
    run_valid = False
    def after_batch(self): self.learn.odd = vars(self.learn).get('odd', 0)+1
class Runs(Callback):
    times = 0
    @property
    def run(self): return self.iter%2 if 'iter' in vars(self.learn) else True
    @run.setter
    def run(self, v): pass
    def after_batch(self): self.learn.odd = vars(self.learn).get('odd', 0)+1
@pytest.mark.parametrize('cb', [Odd,Runs])
def test_properties(cb): own(lambda l, said: (l.fit(2, cbs=cb()), l.odd)[1])

def nested(l, said):
    class Nests(Callback):
        done = False
        def after_train(self):
            if self.done: return
            self.done = True
            said.append([float(o) for o in self.learn.validate()])
            self.learn.fit(1)
    l.fit(3, cbs=Nests())
@pytest.mark.filterwarnings('ignore')
def test_nested(): own(nested, mk=toy)

def test_calls_itself(): own(lambda l, said: l.fit(1, cbs=on('before_backward', lambda cb: (cb.learn('after_pred'), cb.learn(['after_loss'])))))
def test_split_outside():
    def run(l, said):
        b = l.dls.one_batch()
        for _ in range(2): said.append((l._split(b), len(l.xb), len(l.yb), type(l._set_device(b))))
        l.one_batch(0, b)
        with l: l.one_batch(3, b)
    own(run)

def test_equal_callbacks():
    from dataclasses import dataclass
    @dataclass
    class Same(Callback):
        n:int = 0
        def __post_init__(self): pass
        def after_batch(self): said.append(id(self)==id(at[0]))
    at,said = [],[]
    def run(l, s):
        said.clear()
        def swap(cb):
            if cb.iter: l.remove_cb(Same)
            at[:] = [Same()]
            l.add_cb(at[0])
        l.fit(1, cbs=on('before_batch', swap))
        l.remove_cb(Same)
        return list(said)
    own(run)

# The Learner

@pytest.mark.parametrize('f', [lambda l: l.lean().lean(), lambda l: ctx_in(l)], ids=['lean','ctx'])
def test_twice(f):
    learn = toy().lean()
    f(learn)
    test_eq(len(learn._grab_cbs(Lean)), 1)
    assert not learn.unlean()._grab_cbs(Lean) and callable(learn.lean)
    check_clean(learn)
def ctx_in(l):
    with l.lean_ctx(), l.lean_ctx(): l.fit(1)
    assert is_lean(l)

def is_lean(l): return '_call_one' in vars(l) and '_do_one_batch' in vars(l)

def copies(l, said):
    l.fit(1, 1e-2)
    for f in (deepcopy,lambda o: pickle.loads(pickle.dumps(o))):
        c = f(l)
        for o in vars(c).values(): assert getattr(o, '__self__', None) not in (l,*l.cbs)
        with c.no_bar(), c.no_logging(): c.fit(1, 1e-2)
        said.append(list(c.recorder.values[0]))
        c.one_batch(0, c.dls.one_batch())
        l.fit(1, 1e-2)
        l.load(l.save('whole').stem)
@pytest.mark.filterwarnings('ignore')
def test_copies():
    mk = lambda: toy(data=list(zip(xs, xs.sum(1, keepdim=True))), model=nn.Linear(2,1))
    def run(l, said):
        tr = first(l._grab_cbs(Trace))
        l.remove_cb(tr)
        copies(l, said)
        l.add_cb(tr)
    own(run, mk=mk)

def test_export():
    def run(l):
        l.fit(1, 1e-2)
        l.export('e.pkl')
        r = load_learner('e.pkl')
        assert not [k for k,v in vars(r).items() if ours(v)]
        with r.no_bar(): p = r.get_preds(dl=r.dls.test_dl(pd.DataFrame(dict(size=[1,2], kind=['x','y']))))
        l.fit(1)
        return p[0],[type(o).__name__ for o in r.cbs]
    same(tabular, run)

def test_left_in_a_fit():
    def run(l, said):
        def leave(cb): l.remove_cbs([o for o in l.cbs if type(o).__name__=='Lean']) if cb.iter==2 else None
        for e in ('before_batch','after_loss','before_step','after_batch'):
            was = is_lean(l)
            l.fit(1, 1e-2, cbs=on(e, leave))
            assert not is_lean(l)
            check_clean(l)
            if was: l.lean()
    own(run)
def test_comes_in_a_fit():
    def run(l, said):
        for e in ('before_batch','after_loss','before_step','after_batch'): l.fit(2, 1e-2, cbs=on(e, lambda cb: cb.learn.lean() if cb.iter==2 else cb.learn.unlean() if cb.iter==4 else None))
    a,b = outcome(partial(toy, metrics=mae), run_plain, False),outcome(partial(toy, metrics=mae), lambda l: run(l, []), False)
    exact(a, b)
def run_plain(l):
    for _ in range(4): l.fit(2, 1e-2)

def test_parallel():
    def run(l):
        with l.parallel_ctx(): l.fit(1, 1e-2)
        with l.parallel_ctx():
            if l._grab_cbs(Lean): l.unlean().lean()
            l.fit(1, 1e-2)
        l.fit(1, 1e-2)
        return bool(is_lean(l))==bool(l._grab_cbs(Lean))
    same(toy, run)
    learn = toy()
    with learn.parallel_ctx(): learn.lean()
    assert is_lean(learn)
    learn.to_parallel().unlean().detach_parallel()
    check_clean(learn)

def test_threads():
    "Two Learners, each in a thread of its own"
    def fit(l, res, i):
        l.fit(2, 1e-2)
        res[i] = len(l.recorder.losses),bool(torch._C._is_torch_function_enabled()) if hasattr(torch._C, '_is_torch_function_enabled') else True
    res = {}
    ls = [toy(model=nn.Linear(2,1)).lean() for _ in range(2)]
    with ls[0].no_bar(), ls[0].no_logging(), ls[1].no_bar(), ls[1].no_logging():
        ts = [threading.Thread(target=fit, args=(l,res,i)) for i,l in enumerate(ls)]
        for t in ts: t.start()
        for t in ts: t.join(30)
    test_eq(sorted(res), [0,1])
    test_eq(res[0], res[1])

def test_events_cost_nothing_more():
    "A lean Learner calls a user's callback as often, and looks for what has no answer not at all"
    asked = []
    class Asked(Callback):
        def __getattr__(self, k):
            asked.append(k)
            return super().__getattr__(k)
        def after_loss(self): pass
    learn = toy(cbs=Asked()).lean()
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    assert not set(asked)&{'after_pred','before_step','after_batch','before_backward'}

# Ranks

def whole_run(rank, how):
    set_seed(3)
    learn = toy(bs=4 if rank is None else 2, metrics=mae)
    for dl in learn.dls.loaders: dl.rng = random.Random(5)
    learn.model = nn.Sequential(nn.Linear(2,6), nn.ReLU(), nn.Linear(6,1))
    learn.model.load_state_dict({k:torch.linspace(-.5, .5, v.numel()).view(v.shape) for k,v in learn.model.state_dict().items()})
    if how=='before': learn.lean()
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx() if rank is not None else nullcontext():
        if how=='inside': learn.lean()
        learn.fit_one_cycle(1, 1e-2)
        if how=='left': learn.unlean() if learn._grab_cbs(Lean) else learn.lean()
        if how=='inside': learn.unlean().lean()
        learn.fit(1, 1e-2, cbs=[GradientClip(.5)])
        res = learn.recorder.losses,learn.recorder.values,learn.get_preds()[0]
        if how=='before': learn.unlean()
    weights = dict(learn.model.state_dict())
    if rank is not None:
        assert is_lean(learn)==bool(learn._grab_cbs(Lean)), how
        vars(learn.unlean()).pop('dl', None) # the share that was evaluated last
        check_clean(learn)
    return [[float(o) for o in res[0]],[[float(x) for x in v] for v in res[1]],res[2].as_subclass(Tensor),weights]

hows = 'none','before','inside','left'
def test_ranks():
    plain = whole_run(None, 'none')
    for res in on_ranks(lambda rank: [whole_run(rank, o) for o in hows], 2, timeout=60):
        for o in res: exact(res[0], o)
        from torch.testing import assert_close
        for a,b in zip(plain[0]+sum(plain[1], []), res[0][0]+sum(res[0][1], [])): assert abs(a-b)<1e-5, (a,b)
        for k in plain[3]: assert_close(plain[3][k], res[0][3][k], rtol=1e-5, atol=1e-6)

# Checkpoints

class Killed(Exception): pass
def script(lean, cut):
    "A run that is cut off at its seventh step"
    set_seed(4)
    learn = toy(metrics=mae, cbs=Checkpoint('states', every=3))
    for dl in learn.dls.loaders: dl.rng = random.Random(5)
    if lean: learn.lean()
    def stop(cb):
        if cut and cb.train_iter==7: raise Killed('cut')
    with learn.no_bar(), learn.no_logging():
        learn.fit_one_cycle(2, 1e-2, cbs=on('before_step', stop))
        learn.fit(1)
    res = state(learn.unlean())
    del res['at']
    return res

def cut_off(lean):
    with pytest.raises(Killed): script(lean, True)

def resumed(first_lean, then_lean):
    "The state after the script, in a process of its own, and before in one that was cut off"
    shutil.rmtree('states', ignore_errors=True)
    if first_lean is not None: on_ranks(lambda rank: cut_off(first_lean), 1, timeout=60)
    return on_ranks(lambda rank: script(then_lean, False), 1, timeout=60)[0]

@pytest.mark.whole
@pytest.mark.filterwarnings('ignore')
def test_resumes():
    whole = resumed(None, False)
    for a,b in ((None,True),(True,True),(False,True),(True,False)): exact(whole, resumed(a, b))
