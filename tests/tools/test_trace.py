"Traces of scripts that are right and of scripts that are wrong, each in a way of its own: a comparison finds the first difference and where it begins, and a traced run touches nothing else"
import logging,os,pytest,re,shutil,sqlite3,subprocess,sys
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from safetensors.torch import save_file
from fastai.vision.all import *
from fastdist import *
from fastdist.launch.fork import on_ranks
from fastdist.tools.trace import *
from fastdist.tools.comparison import *
from fastdist.check import main
from compare import cases,usual

xs = torch.randn(90, 6, generator=torch.Generator().manual_seed(1))
data = [(x, x[:2].sum()[None], i%3) for i,x in enumerate(xs)]
bs = 8

def loaders(items, **kw): return DataLoaders.from_dsets(items[:70], items[70:], bs=bs, shuffle=True, num_workers=0, device='cpu', **kw)
def learner(model=None, loss=None, cbs=None, opt=Adam, **kw):
    set_seed(4)
    model = model() if model else nn.Sequential(nn.Linear(6,5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5,1))
    return Learner(loaders([o[:2] for o in data], **kw), model, loss_func=loss or MSELossFlat(), metrics=mae, cbs=cbs, lr=1e-2, opt_func=opt)

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

wrong = dict(minibatch_std=(partial(learner, MinibatchStd), 'begins in model (test_trace'), own_norm=(partial(learner, OwnNorm), 'begins in model (test_trace'), balance=(partial(learner, Balance), 'center'),
    whiten=(partial(learner, after_batch=whiten), 'begins in whiten'), pairs=(partial(learner, loss=Pairs()), 'in the loss'), counts=(counted, 'Counts'), critic=(lambda: learner(cbs=Critic()), 'Critic'),
    spread=(lambda: learner(cbs=Spread()), 'Spread.after_loss (test_trace'), by_loss=(lambda: learner(cbs=ByLoss()), 'gradient of'), clipped=(clipped, 'a hook on 0.weight'),
    wider=(partial(learner, Wider), 'in batch 1 of the validation, by'), skips=(lambda: learner(cbs=Skips()), 'It begins in after_pred (test_trace'))

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

class Table(Module):
    "With gradients that are sparse"
    def __init__(self): self.rows,self.l = nn.Embedding(3, 4, sparse=True),nn.Linear(4,1)
    def forward(self, x): return self.l(self.rows(x.argmax(1)%3))
def table(): return learner(Table, cbs=[], opt=SGD)

graph_items = [(torch.cat([x.view(2,3)]*(1+i%3)), i%3) for i,x in enumerate(xs)]
def as_one(b):
    "Return the nodes of all graphs in one tensor, the number of each one's graph, and a target for each graph"
    return torch.cat([x for x,_ in b]),torch.cat([torch.full((len(x),), i) for i,(x,_) in enumerate(b)]),tensor([[float(y)] for _,y in b])

class Pools(Module):
    def __init__(self): self.l = nn.Linear(3,1)
    def forward(self, x, g): return torch.zeros(int(g.max())+1, 1).index_add(0, g, self.l(x))

def of_nodes(b):
    x,g,_ = as_one(b)
    return x,g,x.sum(1, keepdim=True)
class Nodes(Module):
    def __init__(self): self.l = nn.Linear(3,1)
    def forward(self, x, g): return self.l(x)

def graphs(collate, model):
    set_seed(4)
    return Learner(loaders(graph_items[:72], create_batch=collate), model(), loss_func=MSELossFlat(), opt_func=SGD) # one graph a rank to validate

class Half(Callback):
    "Enters an autocast in one event and leaves it in another"
    def before_batch(self):
        self.ctx = torch.autocast('cpu', dtype=torch.bfloat16)
        self.ctx.__enter__()
    def after_loss(self): self.ctx.__exit__(None, None, None)

def by_chance():
    set_seed(4)
    model = nn.Sequential(nn.Linear(6,5), nn.Dropout(), nn.Linear(5,3))
    return Learner(loaders([(x,c) for x,_,c in data]), model, loss_func=CrossEntropyLossFlat(), metrics=accuracy, cbs=EarlyStoppingCallback('accuracy'))
def blended():
    learn = by_chance()
    return learn.add_cb(MixUp())

right = dict(plain=learner, table=table, pooled=partial(graphs, as_one, Pools), nodes=partial(graphs, of_nodes, Nodes),
    ema=lambda: learner(cbs=Ema()), decay=lambda: learner(cbs=Cut()), classes=classes, clip=lambda: learner(cbs=GradientClip(.1)),
    saves=lambda: learner(cbs=[SaveModelCallback(),CSVLogger(append=True)]), rows=lambda: learner(cbs=ShortEpochCallback(.7)), dropped=dropped,
    by_chance=by_chance, blended=blended, half=lambda: learner(cbs=Half()), accumulated=lambda: learner(cbs=GradientAccumulation(6*bs), opt=SGD))

def traced(rank, cases, folder, n, again=False, **kw):
    "Trace a short fit of each of `cases`, whose batch is divided by `n`"
    for k,make in cases.items():
        learn = make()
        for dl in learn.dls.loaders: dl.bs = bs*3//n
        cb = ShortTrace(folder/k, 2, again=again)
        with suppress(TraceEnd), learn.no_bar(), learn.no_logging(), learn.distrib_ctx(**kw): learn.fit_one_cycle(1, cbs=cb)

def compared(cases, path, n, **kw):
    "Compare `n` ranks with one process, and return the reports"
    one,again,many = [path/o for o in ('one','again','many')]
    seed = {k:v for k,v in kw.items() if k=='seed'}
    on_ranks(partial(traced, cases=cases, folder=one, n=1, **seed), 1, timeout=300)
    on_ranks(partial(traced, cases=cases, folder=again, n=1, again=True, **seed), 1, timeout=300)
    on_ranks(partial(traced, cases=cases, folder=many, n=n, **kw), n, join=False, timeout=300)
    return {k:Comparison(one/k, many/k, again/k) for k in cases}

sizes = pytest.mark.parametrize('size', [(2,False), (3,False), (2,True)], ids=['two','three','shards'])

@sizes
@cases(**usual(wrong, 'own_norm', 'critic', 'clipped'))
def test_what_is_wrong_is_found_at_its_first_step(cases, size, tmp_path):
    res = compared({k:f for k,(f,_) in cases.items()}, tmp_path, size[0], shard=size[1])
    bad = [f'{k}: {res[k]}' for k,(_,what) in cases.items() if res[k].ok or what not in str(res[k])]
    assert not bad, '\n'.join(bad)

@pytest.mark.replicas # it says itself what is in shards, and one of its callbacks uses parameters that small units have let go of
@sizes
@cases(**usual(right, 'pooled', 'classes', 'accumulated'))
def test_what_is_right_is_not_named(cases, size, tmp_path):
    n,shard = size
    cases = {k:f for k,f in cases.items() if not shard or k!='ema'} # a model in shards is not copied
    res = compared(cases, tmp_path, n, shard=shard)
    bad = [f'{k}: {o}' for k,o in res.items() if not o.ok]
    assert not bad, '\n'.join(bad)
    draws = dict(dropped=['model.1'], by_chance=['model.1'], blended=['MixUp.before_batch','model.1'])
    assert {k:[o.partition(' ')[0] for o in o.draws] for k,o in res.items() if o.draws}=={k:v for k,v in draws.items() if k in cases}

# What is random, and what is another in each run

class Unseeded(Callback):
    def before_batch(self): self.learn.xb = (self.x*torch.tensor([*os.urandom(len(self.x))])[:,None]/100,)

def test_a_script_that_no_seed_repeats_is_said_to_be_one(tmp_path):
    res, = compared(dict(it=lambda: learner(cbs=Unseeded())), tmp_path, 2).values()
    assert not res.ok and 'no seed of Python, NumPy or torch decides' in str(res), str(res)

class ByTorch:
    def __len__(self): return 70
    def __getitem__(self, i): return data[i][:2]
@pytest.mark.whole
@pytest.mark.parametrize('workers', (0,1))
def test_what_is_random_behind_a_loader_of_torch(workers, tmp_path):
    def run(rank, name, n):
        set_seed(4)
        dls = DataLoaders(*[torch.utils.data.DataLoader(ByTorch(), batch_size=24//n, shuffle=o, num_workers=workers) for o in (True,False)])
        model,cb = nn.Sequential(nn.Linear(6,5), nn.Dropout(), nn.Linear(5,1)),ShortTrace(tmp_path/name, 2, again=name=='again')
        learn = Learner(dls, model, loss_func=MSELossFlat(), cbs=cb)
        with suppress(TraceEnd), learn.no_bar(), learn.no_logging(), learn.distrib_ctx(): learn.fit(1)
    for name,n in dict(one=1, again=1, many=2).items(): on_ranks(partial(run, name=name, n=n), n, timeout=200)
    res = Comparison(*(tmp_path/o for o in ('one','many','again')))
    assert res.ok and any(o.name=='the samples of the batch' for o in res.compared) and any(o.random for o in res.rows if o.name=='loss'), str(res)


def noisy(x): return x+.1*torch.randn_like(x)

@pytest.mark.whole
@pytest.mark.parametrize('size', (2,3))
def test_a_seed_lets_all_be_compared(size, tmp_path):
    cases = dict(dropped=dropped, noise=lambda: learner(after_batch=noisy))
    for res in compared(cases, tmp_path, size, seed=42).values(): assert res.ok and not any(o.random and o.name in ('loss','0.weight') for o in res.rows), str(res)

@pytest.mark.whole
def test_who_draws_is_named(tmp_path):
    class Noise(Callback):
        def before_batch(self): self.learn.xb = (noisy(self.x),)
    res = compared(dict(tfm=lambda: learner(after_batch=noisy), cb=lambda: learner(cbs=Noise())), tmp_path, 2)
    assert [[o.partition(' ')[0] for o in r.draws] for r in res.values()]==[['noisy'],['Noise.before_batch']]

# What objects hold

class Holder(Callback):
    def before_fit(self): self.intersection,self.members,self.section,self.time_ratio = 0,[],{},0.
    def after_batch(self):
        if not self.training: return
        right = int((self.pred>0).sum())
        self.intersection += right
        self.members += [right]
        self.section['all'] = right
        self.time_ratio += right/8

def test_an_attribute_is_compared_whatever_it_is_called(tmp_path):
    res, = compared(dict(it=lambda: learner(cbs=Holder())), tmp_path, 2).values()
    named = {o.name for o in res.compared if o.differs and not o.step}
    assert not res.ok and {f'Holder.{o}' for o in ('intersection','members','section.all','time_ratio')}<=named, named

class Clock(Callback):
    def before_fit(self): self.began = time.perf_counter()
    def after_batch(self): self.spent = time.perf_counter()-self.began

@pytest.mark.whole
def test_clocks_are_not_accused(tmp_path):
    res, = compared(dict(it=lambda: learner(lambda: nn.Linear(6,1), cbs=Clock())), tmp_path, 2).values()
    assert res.ok, str(res)
    two = Comparison(tmp_path/'one/it', tmp_path/'many/it')
    assert two.ok and 'Clock.spent' in str(two), str(two)

critic = nn.Linear(1, 1)
class OfScript(Callback):
    "Trains a global of the script, by an optimizer of its own"
    def before_fit(self): self.oc = torch.optim.SGD(critic.parameters(), .1, momentum=.9)
    def after_pred(self):
        if not self.training: return
        critic(self.pred.detach()).pow(2).mean().backward()
        self.oc.step()
        self.oc.zero_grad()

@pytest.mark.whole
def test_a_model_is_found_through_its_optimizer(tmp_path):
    res, = compared(dict(it=lambda: learner(cbs=OfScript())), tmp_path, 2).values()
    assert res.first.name.startswith('OfScript.oc') and not res.ok, str(res)

class Features(Callback):
    "Holds what the last batch gave, which ranks have a part of each"
    def after_pred(self): self.last = self.pred.detach()

@pytest.mark.whole
def test_samples_of_a_batch_are_put_together(tmp_path):
    res, = compared(dict(it=lambda: learner(cbs=Features())), tmp_path, 2).values()
    assert res.ok and any(o.name=='Features.last' for o in res.compared), str(res)

# What a loader gives

@pytest.mark.whole
def test_other_samples_begin_with_the_loader(tmp_path):
    for n in (1,2):
        def run(rank):
            learn = learner()
            learn.dls.train.shuffle,learn.dls.train.bs = n==1,24//n
            with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(): learn.fit(1, cbs=Trace(tmp_path/f'{n}', 1))
        on_ranks(run, n, join=False)
    res = Comparison(tmp_path/'1', tmp_path/'2')
    assert not res.ok and res.first.name=='the samples of the batch' and 'begins with the loader' in str(res), str(res)

# Files

class Writes(Callback):
    "Writes, moves and removes files in each step, in ways that go past Python's `open`"
    def before_fit(self):
        shutil.rmtree(sorted(Path('runs').iterdir())[0])
        self.log = logging.getLogger('steps')
        self.log.addHandler(logging.FileHandler('steps.log'))
    def after_step(self):
        w = self.model[0].weight.detach().clone()
        save_file(dict(w=w), 'last.safetensors')
        torch.save(w, 'last.pth')
        np.save('last.npy', w.numpy())
        self.log.warning('a step')
        with suppress(FileExistsError): Path('new/folder').mkdir(parents=True)
        with sqlite3.connect('steps.db') as db:
            db.execute('create table if not exists steps (loss real)')
            db.execute('insert into steps values (1.)')

def test_a_trace_touches_no_file_and_a_short_one_leaves_what_an_ended_run_leaves(tmp_path, monkeypatch):
    left = {}
    for name in ('plain','traced','short'):
        d = tmp_path/name
        for i in range(3): (d/'runs'/f'{i}').mkdir(parents=True)
        def run(rank):
            os.chdir(d)
            learn = learner(cbs=Writes())
            cbs = dict(traced=Trace, short=partial(ShortTrace, steps=2)).get(name, lambda path: None)(tmp_path/f'{name}.trace')
            with suppress(TraceEnd), learn.no_bar(), learn.no_logging(): learn.fit(1, cbs=cbs)
        on_ranks(run, 1)
        with sqlite3.connect(d/'steps.db') as db: n = db.execute('select count(*) from steps').fetchone()[0]
        left[name] = sorted(str(o.relative_to(d)) for o in d.rglob('*')),n,(d/'steps.log').read_text().count('a step'),torch.load(d/'last.pth').tolist(),np.load(d/'last.npy').tolist()
    assert left['traced']==left['plain'] and left['short'][0]==left['plain'][0]
    assert left['plain'][1:3]==(8,8) and left['short'][1:3]==(2,2)

def test_a_trace_changes_no_number_and_leaves_nothing_on_the_learner(tmp_path):
    def run(rank, cbs):
        learn = dropped()
        before = [type(o) for o in learn.cbs],list(vars(learn.model[0]))
        with learn.no_bar(), learn.no_logging(): learn.fit(2, cbs=cbs)
        assert before==([type(o) for o in learn.cbs],list(vars(learn.model[0]))) and not {'trace','_with_events','event_hooks'}&{*vars(learn)}
        return [o.tolist() for o in learn.model.parameters()],[float(o) for o in learn.recorder.losses],torch.get_rng_state().tolist()
    assert on_ranks(partial(run, cbs=Trace(tmp_path/'a')), 1)==on_ranks(partial(run, cbs=None), 1)

# Traces by hand

def test_the_environment_traces_each_fit(tmp_path, monkeypatch):
    monkeypatch.setenv('FASTDIST_TRACE', str(tmp_path/'a'))
    def run(rank):
        learn = learner()
        with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(): learn.fine_tune(1)
        return len(learn.recorder.losses)
    assert on_ranks(run, 2)==[4,4] # training goes on
    monkeypatch.delenv('FASTDIST_TRACE')
    assert [(tmp_path/o).exists() for o in ('a','a.1')]==[True]*2
    res = Comparison(tmp_path/'a', tmp_path/'a')
    assert res.ok and {o.fit for o in res.rows}=={0,1} and res.table().step.max()==2 and 'with 0' not in str(res)

def test_a_short_trace_ends_after_its_fits(tmp_path):
    def run(rank):
        learn = learner()
        with pytest.raises(TraceEnd), learn.no_bar(), learn.no_logging(): learn.fine_tune(3, cbs=ShortTrace(tmp_path/'a', 1, fits=2))
        return len(learn.recorder.losses)
    on_ranks(run, 1)
    assert {o.fit for o in Comparison(tmp_path/'a', tmp_path/'a').rows}=={0,1}

def test_what_is_no_trace_is_named(tmp_path):
    with pytest.raises(ValueError, match='must be a trace'): Comparison(tmp_path/'no', tmp_path/'no')
    (tmp_path/'text').write_text('no')
    with pytest.raises(ValueError, match='must be a trace'): Comparison(tmp_path/'text', tmp_path/'text')
    with pytest.raises(ValueError, match='at least 1, got 0'): Trace('a', steps=0)

# The command

script = """
import sys
from fastai.vision.all import *
from fastdist import *
class Hits(Callback):
    n = 0
    def after_pred(self): self.n += int((self.pred>0).sum())
xs = torch.randn(80, 4)
dls = DataLoaders.from_dsets([(x, x[:1]) for x in xs[:60]], [(x, x[:1]) for x in xs[60:]], bs=8, num_workers=0, device='cpu')
learn = Learner(dls, nn.Linear(4, 1), loss_func=MSELossFlat(), cbs=Hits() if 'count' in sys.argv else None)
with learn.distrib_ctx(), learn.no_bar(): learn.fit(9)
Path('saved').touch()
"""

@pytest.mark.slow
@pytest.mark.timeout(650)
def test_the_command(tmp_path, capsys):
    (tmp_path/'train.py').write_text(script)
    def run(*args): return subprocess.run([sys.executable,'-m','fastdist.check',*args], cwd=tmp_path, env={**os.environ, 'PYTHONWARNINGS':'ignore'}, capture_output=True, text=True, timeout=600)
    ran = run('--audit','2','--nprocs','2','--folder',str(tmp_path/'traces'),'--','train.py','count')
    assert ran.returncode==1 and 'first in Hits.n after step 1, with' in ran.stdout, ran
    assert not (tmp_path/'saved').exists()
    def compare(*names):
        with pytest.raises(SystemExit) as e: main(*[str(tmp_path/'traces'/o) for o in names], compare=True)
        return int(e.value.code)
    assert compare('one','again')==0 # all but the last digits
    assert re.search('again compute what .*one computes', capsys.readouterr().out)
    assert compare('one','ranks')==1
