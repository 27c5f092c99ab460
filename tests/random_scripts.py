"""Scripts that nobody wrote, as values: each is played in one process by plain fastai and on forked ranks, and compared after each step

`python tests/random_scripts.py --minutes 30 --ranks 3 --shard` looks for one that differs, prints it shrunk, and ends with 1."""
import fastdist,os,time,warnings
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from hypothesis import HealthCheck,settings
from hypothesis.stateful import RuleBasedStateMachine,initialize,rule,run_state_machine_as_test
from hypothesis.strategies import booleans,integers,sampled_from,tuples
from fastai.callback.all import *
from compare import *

tol = dict(rtol=1e-3, atol=2e-4) # float32, some dozen steps: what sums in another order leave, also after division by Adam's small averages

class Tied(nn.Module):
    "An embedding whose weights are its head's too"
    def __init__(self):
        super().__init__()
        self.emb,self.head = nn.Embedding(6,8),nn.Linear(8,6)
        self.head.weight = self.emb.weight
    def forward(self, x): return self.head(self.emb((x.abs()*9).long()%6).mean(1))

models = dict(mlp=lambda k: nn.Sequential(nn.Linear(8,8), nn.ReLU(), nn.Linear(8,k)), tied=lambda k: nn.Sequential(Tied(), nn.Linear(6,k)),
    norm=lambda k: nn.Sequential(nn.Linear(8,8,bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8,k)),
    cnn=lambda k: nn.Sequential(nn.Unflatten(1, (2,2,2)), nn.Conv2d(2,4,2), nn.Flatten(), nn.ReLU(), nn.Linear(4,k)))
losses = dict(mean=CrossEntropyLossFlat, ignored=partial(CrossEntropyLossFlat, ignore_index=1), sums=lambda: partial(F.cross_entropy, reduction='sum'),
    classes=lambda: CrossEntropyLossFlat(weight=tensor([1.,3.,.5])), regression=MSELossFlat)
opts = dict(sgd=partial(SGD, mom=.9), adam=Adam, wrapped=partial(OptimWrapper, opt=torch.optim.AdamW))
def halves(m): return [params(m[:1]),params(m[1:])]
def margin(p, y): return (p.max(1).values-p.mean(1)).mean()

class Average(Callback):
    "An average of the weights, as users write it"
    def before_fit(self): self.mean = [p.detach().clone() for p in self.model.parameters()]
    def after_batch(self):
        if self.training: self.mean = [torch.lerp(m.to(p.device), p.detach(), .1) for m,p in zip(self.mean, self.model.parameters())]

callbacks = dict(clip=lambda: GradientClip(.5), window=lambda: GradientAccumulation(12), best=lambda: SaveModelCallback(fname='best'), csv=CSVLogger,
    early=lambda: EarlyStoppingCallback(patience=1), plateau=lambda: ReduceLROnPlateau(patience=1), nan=TerminateOnNaNCallback)
events = 'before_fit before_epoch before_batch after_pred after_loss after_backward after_step after_batch after_train before_validate after_validate after_epoch'.split()

ours = Path(fastdist.__file__).parent

class Crash(Callback):
    "A user's mistake at an event, on all ranks or on one"
    order = 70
    def __init__(self, event, who, rank): self.event,self.mine = event,who is None or rank is None or rank==who
    def __call__(self, event):
        if event==self.event and self.mine: raise ValueError('a mistake')

def loaders(kind, n, bs, drop, regression):
    g = torch.Generator().manual_seed(n)
    xs,ys = torch.randn(2*n, 8, generator=g),torch.rand(2*n, 1, generator=g) if regression else torch.randint(0, 3, (2*n,), generator=g)
    parts = [list(zip(xs[i:i+n], ys[i:i+n])) for i in (0,n)]
    if kind=='torch': return DataLoaders(*(torch.utils.data.DataLoader(o, batch_size=bs, drop_last=drop and not i) for i,o in enumerate(parts)))
    return DataLoaders.from_dsets(*parts, bs=bs, drop_last=(drop,False), num_workers=0, device='cpu')

def build(made, bs):
    "The Learner that `made` tells of"
    set_seed(3)
    model,loss,opt,kind,split,n,drop = made
    reg = loss=='regression'
    metrics = [mse,mae,AvgMetric(margin)] if reg else [accuracy,F1Score(average='macro'),AvgMetric(margin)]
    return Learner(loaders(kind, n, bs, drop, reg), models[model](1 if reg else 3), loss_func=losses[loss](), opt_func=opts[opt], metrics=metrics,
        splitter=halves if split else trainable_params)

class Player:
    "Makes each step of a script, in one process or on a rank, and tells what a user sees of it"
    def __init__(self, made, bs, rank=None): self.made,self.bs,self.rank,self.learn,self.saved = made,bs,rank,build(made, bs),False
    def fit(self, kind, epochs, names): getattr(self.learn, kind)(epochs, 1e-3 if kind=='fine_tune' else .01, cbs=[callbacks[o]() for o in names])
    def average(self):
        self.learn.fit(1, .01, cbs=(cb := Average()))
        return cb.mean
    def freeze(self, to): self.learn.freeze_to(to)
    def data(self, n, kind): self.learn.dls = loaders(kind, n, self.bs, self.made[-1], self.made[1]=='regression')
    def save(self):
        self.learn.save('kept')
        self.saved = True
    def load(self): self.saved and self.learn.load('kept')
    def validate(self): return L(self.learn.validate()).map(float)
    def preds(self, ds): return self.learn.get_preds(ds)
    def lr_find(self): self.learn.lr_find(num_it=4, show_plot=False)
    def crash(self, event, who):
        try: self.learn.fit(1, .01, cbs=Crash(event, who, self.rank))
        except Exception as e: return [type(e).__name__ in ('ValueError','RankError')]

    def step(self, name, *args):
        res = [getattr(self, name)(*args)]
        rec = self.learn.recorder if name in ('fit','average') else None
        weights = {k:v.detach().clone() for k,v in self.learn.model.state_dict().items()}
        seen = dict(result=res, weights=weights, frozen=[p.requires_grad for p in self.learn.model.parameters()])
        if rec: seen |= dict(values=[list(o) for o in rec.values], losses=L(rec.losses).map(float), lrs=list(rec.lrs))
        return whole(seen)

@contextmanager
def entered(learn, rank, shard):
    "The context on a rank, silent"
    with learn.distrib_ctx(**(dict(shard=True) if shard else {})) if rank is not None else nullcontext(), learn.no_bar(), learn.no_logging(): yield

def contexts(steps):
    "The steps of each context that the script enters"
    res = [[]]
    for o in steps: res.append([]) if o[0]=='context' else res[-1].append(o)
    return res

def play(script, bs, rank=None, shard=False):
    "What is seen after each step, and what was said; an error ends it"
    made,steps = script
    seen = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        try:
            player = Player(made, bs, rank)
            for part in contexts(steps):
                with entered(player.learn, rank, shard):
                    for o in part: seen.append(player.step(*o))
        except Exception as e: seen.append(Failure(f'{type(e).__name__}: {e}'[-1500:]))
    return seen,[str(o.message) for o in said if Path(o.filename).is_relative_to(ours)] # no other warning excuses a difference

def expected(steps, i, one, first):
    "What step `i` is compared with: one process; after a mistake on one rank, which ends others a little later, rank 0 from the next fit on"
    at = next((j for j,o in enumerate(steps) if o[0]=='crash' and o[2] is not None), None)
    if at is None or i<at: return one
    return first if len(first)>i and any(o[0]=='fit' for o in steps[at+1:i+1]) else None

def compare(script, size=2, bs=3, shard=False):
    "Return the first difference between one process and each rank, and what the ranks have said"
    with in_folder(): one,_ = play(script, bs*size)
    with in_folder(): many = on_ranks(lambda rank: play(script, bs, rank, shard), size, timeout=90, join=False)
    said = sorted({o for seen,rank in many for o in rank+[o for o in seen if isinstance(o, Failure) and o.startswith(('RankError','DesyncError'))]})
    steps = [o for o in script[1] if o[0]!='context']
    for (rank,(seen,_)),i in itertools.product(enumerate(many), range(len(one))):
        if isinstance(one[i], Failure): break
        want = expected(steps, i, one, many[0][0])
        d = want and (f'missing, after {seen[-1:]}' if i>=len(seen) else difference(want[i], seen[i], **tol))
        if d: return f'rank {rank}, step {i}, {steps[i]}: {d}',said
    return None,said

@contextmanager
def in_folder():
    "A new working folder, and the old one again"
    old = os.getcwd()
    with TemporaryDirectory() as d:
        os.chdir(d)
        try: yield
        finally: os.chdir(old)

def holds(script, size=2, bs=3, shard=False):
    "Raise `AssertionError` with the script where it differs and nothing was said"
    try: d,said = compare(script, size, bs, shard)
    except TimeoutError as e: d,said = str(e),[]
    assert not d or said, f'{script!r}\non {size} ranks, bs={bs}, shard={shard}: {d}'
    return d,said

quick = dict(deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=False, report_multiple_bugs=False)

class Scripts(RuleBasedStateMachine):
    "Writes a script, and plays it when it is written"
    size,bs,shard,made = 2,3,False,None
    @initialize(made=tuples(*map(sampled_from, map(list, (models,losses,opts))), sampled_from(('fastai','torch')), booleans(), integers(13, 40), booleans()))
    def make(self, made): self.made,self.steps = made,[]
    @rule(kind=sampled_from(('fit','fit_one_cycle','fine_tune')), epochs=integers(1, 2), names=sampled_from(((),)+tuple((o,) for o in callbacks)+(('clip','best'),('clip','window'))))
    def fit(self, kind, epochs, names): self.steps.append(('fit',kind,epochs,names))
    @rule(step=sampled_from([(o,) for o in 'average save load validate lr_find context'.split()]))
    def plain(self, step): self.steps.append(step)
    @rule(to=sampled_from((0,-1)))
    def freeze(self, to): self.steps.append(('freeze',to))
    @rule(n=integers(13, 40), kind=sampled_from(('fastai','torch')))
    def data(self, n, kind): self.steps.append(('data',n,kind))
    @rule(ds=integers(0, 1))
    def preds(self, ds): self.steps.append(('preds',ds))
    @rule(event=sampled_from(events), who=sampled_from((None,0,1)))
    def crash(self, event, who): self.steps.append(('crash',event,who))
    def teardown(self):
        if self.made and self.steps: self.played(holds((self.made,self.steps), self.size, self.bs, self.shard))
    @classmethod
    def played(cls, res): pass

def search(seconds, size=2, shard=False, steps=6, **kw):
    "Look for a script that does not hold, for `seconds`; return the number of those that were played and what was said in those that differ"
    end,count,excused = time.monotonic()+seconds,[],[]
    class Timed(Scripts):
        def teardown(self):
            if time.monotonic()<end: super().teardown()
        @classmethod
        def played(cls, res):
            count.append(1)
            if res[0]: excused.append(res)
    Timed.size,Timed.shard = size,shard
    while time.monotonic()<end: run_state_machine_as_test(Timed, settings=settings(max_examples=kw.pop('max_examples', 40), stateful_step_count=steps, **quick, **kw))
    return len(count),excused

@call_parse
def main(
    minutes:float=5, # How long to look
    ranks:int=2, # Number of ranks
    shard:store_true=False, # Models in shards
):
    "Look for a script that one process and ranks do not agree on"
    n,excused = search(minutes*60, ranks, shard)
    print(f'{n} scripts played; {len(excused)} differ and it was said:', *excused, sep='\n')
