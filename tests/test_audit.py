"The audit on scripts that are right and on scripts that are wrong, each in a way of its own: it finds the first difference and where it begins, and leaves nothing behind"
import random,pytest
from copy import deepcopy
from functools import partial
from fastai.vision.all import *
from fastdist import *
from fastdist.job.fork import on_ranks
from compare import cases

xs = torch.randn(90, 6, generator=torch.Generator().manual_seed(1))
data = [(x, x[:2].sum()[None], i%3) for i,x in enumerate(xs)]
bs = 8

def loaders(items, **kw): return DataLoaders.from_dsets(items[:70], items[70:], bs=bs, shuffle=True, num_workers=0, device='cpu', **kw)
def learner(model=None, loss=None, cbs=None, **kw):
    set_seed(4)
    model = model() if model else nn.Sequential(nn.Linear(6,5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5,1))
    return Learner(loaders([o[:2] for o in data], **kw), model, loss_func=loss or MSELossFlat(), metrics=mae, cbs=cbs, lr=1e-2)

# What mixes samples, and is wrong

class MinibatchStd(Module):
    def __init__(self): self.a,self.b = nn.Linear(6,5),nn.Linear(6,1)
    def forward(self, x):
        x = self.a(x)
        return self.b(torch.cat([x, x.std(0).mean().expand(len(x),1)], 1))

class OwnNorm(Module):
    def __init__(self): self.l = nn.Linear(6,1)
    def forward(self, x): return self.l((x-x.mean(0))/(x.std(0)+.1))

class Balance(Module):
    def __init__(self): self.l,self.gate,self.center = nn.Linear(6,1),nn.Linear(6,2),torch.zeros(1)
    def forward(self, x):
        res = self.l(x)*self.gate(x).softmax(1)[:,:1]
        if self.training: self.center = .9*self.center+.1*res.detach().mean(0)
        return res

def whiten(o): return (o-o.mean(0))/(o.std(0)+.1)

class Pairs(Module):
    def __init__(self): self.reduction = 'mean'
    def forward(self, pred, y): return ((pred-pred.T).pow(2)-(y-y.T).pow(2)).abs().mean()

class Counts(Callback):
    n = 0
    def after_pred(self):
        if self.training: self.n = self.n+int((self.pred>0).sum())

class Wider(Module):
    "Mixes samples in evaluation alone"
    def __init__(self): self.l = nn.Linear(6,1)
    def forward(self, x): return self.l(x if self.training else x-.1*x.mean(0))

class Skips(Callback):
    "Leaves out batches in which no sample is far off"
    def after_pred(self):
        if self.training and self.x[:,0].min()>-1.4: raise CancelBatchException

class Critic(Callback):
    def before_fit(self):
        if hasattr(self, 'net'): return
        self.net = nn.Linear(1,1)
        self.opt = torch.optim.SGD(self.net.parameters(), .1)
    def after_pred(self):
        if not self.training: return
        self.opt.zero_grad()
        self.net(self.pred.detach()).pow(2).mean().backward()
        self.opt.step()
        self.weight = self.net.weight.item()

class Spread(Callback):
    def after_loss(self): self.learn.loss_grad = self.loss_grad+F.relu(1-self.pred.std(0)).mean()

class ByLoss(Callback):
    def after_loss(self): self.learn.loss_grad = self.loss_grad*self.loss_grad.detach()

def clipped():
    learn = learner()
    learn.model[0].weight.register_hook(lambda g: g.clamp(-.01,.01))
    return learn

def counted(): return learner(cbs=[Counts()])

wrong = dict(minibatch_std=(partial(learner, MinibatchStd), 'begins in model (test_audit'), own_norm=(partial(learner, OwnNorm), 'begins in model (test_audit'), balance=(partial(learner, Balance), 'center'),
    whiten=(partial(learner, after_batch=whiten), 'begins in whiten'), pairs=(partial(learner, loss=Pairs()), 'in the loss'), counts=(counted, 'Counts'), critic=(lambda: learner(cbs=Critic()), 'Critic'),
    spread=(lambda: learner(cbs=Spread()), 'Spread.after_loss (test_audit'), by_loss=(lambda: learner(cbs=ByLoss()), 'gradient of'), clipped=(clipped, 'a hook on 0.weight'),
    wider=(partial(learner, Wider), 'first in predictions of batch 0 of the validation'), skips=(lambda: learner(cbs=Skips()), 'It begins in Skips, which leaves batches out'))

# What is right

class Ema(Callback):
    def before_fit(self): self.avg = deepcopy(self.model)
    def after_step(self):
        for a,p in zip(self.avg.parameters(), self.model.parameters()): a.data.lerp_(p.data, .1)

class Cut(Callback):
    def after_loss(self): self.learn.loss_grad = self.loss_grad+1e-2*sum(p.pow(2).sum() for p in self.model.parameters())

def classes():
    set_seed(4)
    items = [(x,c) for x,_,c in data]
    model,loss = nn.Sequential(nn.Linear(6,5), nn.ReLU(), nn.Linear(5,3)),CrossEntropyLossFlat(weight=tensor([1.,2.,3.]))
    return Learner(loaders(items), model, loss_func=loss, metrics=[accuracy,F1Score(average='macro')])

def dropped(): return learner(lambda: nn.Sequential(nn.Linear(6,5), nn.Dropout(), nn.Linear(5,1)))

right = dict(plain=learner, ema=lambda: learner(cbs=Ema()), decay=lambda: learner(cbs=Cut()), classes=classes, clip=lambda: learner(cbs=GradientClip(.1)),
    saves=lambda: learner(cbs=[SaveModelCallback(),CSVLogger(append=True)]), rows=lambda: learner(cbs=ShortEpochCallback(.7)), dropped=dropped)

def state(learn):
    r = learn.recorder
    ps = [p.detach().clone() for p in learn.model.parameters()]
    return ps,L(r.losses).map(float),L(r.values),torch.get_rng_state(),np.random.get_state()[1],random.getstate()

def audited(rank, make, audit=2, **kw):
    learn = make()
    with learn.no_bar(),learn.no_logging(),learn.distrib_ctx(audit=audit, **kw): learn.fit_one_cycle(1)
    return learn

def reports(rank, cases, **kw):
    res = {}
    for k,make in cases.items():
        a = audited(rank, make, **kw).audit
        res[k] = a.ok,str(a),a.draws
    return res

sizes = pytest.mark.parametrize('size', [(2,False), (3,False), (2,True)], ids=['two','three','shards'])

@sizes
@cases(**wrong)
def test_what_is_wrong_is_found_at_its_first_step(cases, size):
    n,shard = size
    res = on_ranks(partial(reports, cases={k:f for k,(f,_) in cases.items()}, shard=shard), n, join=False, timeout=100)
    assert all(o==res[0] for o in res)
    bad = [f'{k}: {res[0][k][1]}' for k,(_,what) in cases.items() if res[0][k][0] or what not in res[0][k][1]]
    assert not bad, '\n'.join(bad)

@pytest.mark.replicas # it says itself what is in shards, and one of its callbacks uses parameters that small units have let go of
@sizes
@cases(**right)
def test_what_is_right_is_not_named(cases, size):
    n,shard = size
    cases = {k:f for k,f in cases.items() if not shard or k!='ema'} # a model in shards is not copied
    res, = {tuple(o[1] for o in r.values()):r for r in on_ranks(partial(reports, cases=cases, shard=shard), n, join=False, timeout=100)}.values()
    bad = [f'{k}: {o[1]}' for k,o in res.items() if not o[0]]
    assert not bad, '\n'.join(bad)
    assert {k:o[2] for k,o in res.items() if o[2]}==({'dropped':['model.1']} if 'dropped' in cases else {})

def both(rank, make):
    learn,plain = [audited(rank, make, audit=k) for k in (2,0)]
    a,b = state(learn),state(plain)
    return all(map(torch.equal, a[0], b[0])),a[1:3]==b[1:3],torch.equal(a[3], b[3]),np.array_equal(a[4], b[4]),a[5]==b[5],sorted(map(str, Path().rglob('*')))

@pytest.mark.parametrize('k', ['plain','saves','dropped'])
def test_nothing_is_left_behind(k):
    before = on_ranks(lambda rank: audited(rank, right[k], audit=0) and sorted(map(str, Path().rglob('*'))), join=False)[0]
    for *same,files in on_ranks(partial(both, make=right[k]), join=False): assert same==[True]*5 and files==before

class Small(Module):
    def __init__(self): self.l = nn.Linear(6,1)
    def forward(self, x):
        if len(x)>bs: raise ValueError('only small batches')
        return self.l(x)

def test_a_script_that_one_process_cannot_run_goes_on():
    for learn in on_ranks(lambda rank: (a := audited(rank, partial(learner, Small)).audit) and (a.ok, a.note), join=False):
        assert learn==(False,'One process fails in these steps: ValueError: only small batches')

def test_a_number_of_steps_is_asked_for(monkeypatch):
    with pytest.raises(OptionError, match='number of steps'): learner().to_distributed(audit='all')
    monkeypatch.setenv('FASTDIST_AUDIT', '1')
    (a,b) = on_ranks(lambda rank: len({o.step for o in audited(rank, learner, audit=None).audit.rows}), join=False)
    assert a==b==1

def test_one_process_has_nothing_to_compare(capsys): assert audited(0, learner).audit.ok and 'nothing to compare' in capsys.readouterr().out
