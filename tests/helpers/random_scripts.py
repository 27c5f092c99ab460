"""Scripts that nobody wrote, as values: each is played in one process by plain fastai and on forked ranks, and compared after each step

`python tests/helpers/random_scripts.py --minutes 30 --ranks 3 --shard` looks for one that differs, prints it shrunk, and ends with 1."""
import fastdist,itertools,json,os,signal,time,warnings
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from hypothesis import HealthCheck,settings,strategies
from hypothesis.stateful import RuleBasedStateMachine,initialize,rule,run_state_machine_as_test
from hypothesis.strategies import booleans,integers,lists,none,sampled_from,tuples
from fastai.callback.all import *
from half import halved
from compare import *

law = {False:dict(rtol=1e-5, atol=1e-6), True:dict(rtol=2.**-7, atol=2.**-10)} # whether in bfloat16, whose eight bits round the gradients of each part of a batch
wide = dict(rtol=1e-3, atol=2e-4) # where one process that rounds otherwise is not even of the same form, as after a stop one epoch earlier

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
    def state_dict(self): return dict(mean=self.mean)
    def load_state_dict(self, state): self.mean = list(state['mean'])

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

class Kill(Callback):
    "Ends the process, or rank `who`, at the `n`-th `event` that it comes to"
    order,_left = 2*Checkpoint.order,0
    def __init__(self, how, event, n, who, rank): self._how,self._event,self._left,self._mine = how,event,n,who is None or rank==who
    def __call__(self, event):
        self._left -= event==self._event
        if self._left or event!=self._event or not self._mine: return
        if self._how=='raise': raise KeyboardInterrupt
        os.kill(os.getpid(), getattr(signal, self._how))
Kill.__module__ = 'fastdist.tests' # its count is this process's, and no state of the training

class Nudge(Callback):
    "Rounds each pass otherwise: its weights are `eps` off, and themselves again before the step or after the batch"
    kept = ()
    def __init__(self, eps, seed): self.eps,self.g = eps,torch.Generator().manual_seed(seed)
    def before_batch(self):
        self.kept = [(p,p.detach().clone()) for p in self.model.parameters()]
        for p,_ in self.kept: p.data.mul_(1+self.eps*torch.randn(p.shape, generator=self.g))
    def after_backward(self):
        for p,was in self.kept: p.data.copy_(was)
        self.kept = ()
    def after_batch(self): self.after_backward()
Nudge.__module__ = 'fastdist.tests'

def loaders(kind, n, bs, drop, regression):
    g = torch.Generator().manual_seed(n)
    xs,ys = torch.randn(2*n, 8, generator=g),torch.rand(2*n, 1, generator=g) if regression else torch.randint(0, 3, (2*n,), generator=g)
    parts = [list(zip(xs[i:i+n], ys[i:i+n])) for i in (0,n)]
    if kind=='torch': return DataLoaders(*(torch.utils.data.DataLoader(o, batch_size=bs, drop_last=drop and not i) for i,o in enumerate(parts)))
    return DataLoaders.from_dsets(*parts, bs=bs, drop_last=(drop,False), num_workers=0, device='cpu')

def build(made, bs):
    "The Learner that `made` tells of"
    set_seed(3)
    model,loss,opt,kind,split,n,drop,*half = made
    reg = loss=='regression'
    counts = [] if any(half) else [accuracy,F1Score(average='macro')] # in bfloat16 rounding decides between classes
    metrics = [*([mse,mae] if reg else counts),AvgMetric(margin)]
    learn = Learner(loaders(kind, n, bs, drop, reg), models[model](1 if reg else 3), loss_func=losses[loss](), opt_func=opts[opt], metrics=metrics,
        splitter=halves if split else trainable_params)
    return halved(learn, 'bf16') if any(half) else learn

class Player:
    "Makes each step of a script, in one process or on a rank, and tells what a user sees of it"
    def __init__(self, made, bs, rank=None, every=None, kill=None, nudge=None):
        self.made,self.bs,self.rank,self.learn,self.saved,self.every = made,bs,rank,build(made, bs),False,every
        self.apart = False # whether a mistake on one rank has parted them, so that nobody can put shards together
        self.kill = [Kill(*kill, rank)] if kill else []
        if nudge: self.learn.add_cb(Nudge(*nudge))
    def states(self): return [Checkpoint('states', every=self.every, keep=10),*self.kill] if self.every else []
    def fit(self, kind, epochs, names): getattr(self.learn, kind)(epochs, 1e-3 if kind=='fine_tune' else .01, cbs=[callbacks[o]() for o in names]+self.states())
    def average(self):
        self.learn.fit(1, .01, cbs=[cb := Average(),*self.states()])
        return cb.mean
    def freeze(self, to): self.learn.freeze_to(to)
    def data(self, n, kind): self.learn.dls = loaders(kind, n, self.bs, self.made[6], self.made[1]=='regression')
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
        self.apart = name=='crash' and args[1] is not None or self.apart and name in ('freeze','data','load')
        weights = {} if self.apart else {k:v.detach().clone() for k,v in self.learn.model.state_dict().items()}
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

@contextmanager
def hearing():
    "The warnings of fastdist as they come, in the file `said` too, which a killed process leaves behind; no other warning excuses a difference"
    said = []
    def hear(message, category, filename, *args):
        if not Path(filename).is_relative_to(ours) or 'some were skipped' in str(message): return # that excuses nothing
        said.append(str(message))
        with open('said', 'a') as f: f.write(json.dumps(said[-1])+'\n')
    with warnings.catch_warnings():
        warnings.simplefilter('always')
        warnings.showwarning = hear
        yield said

def play(script, bs, rank=None, shard=False, **kw):
    "What is seen after each step, and what was said; an error ends it"
    made,steps = script
    seen = []
    with hearing() as said:
        try:
            player = Player(made, bs, rank, **kw)
            for part in contexts(steps):
                with entered(player.learn, rank, shard):
                    for o in part: seen.append(player.step(*o))
        except Exception as e: seen.append(Failure(f'{type(e).__name__}: {e}'[-1500:]))
    return seen,said

def expected(steps, i, one, first):
    "What step `i` is compared with: one process; after a mistake on one rank, which ends others a little later, rank 0 from the next fit on"
    at = next((j for j,o in enumerate(steps) if o[0]=='crash' and o[2] is not None), None)
    if at is None or i<at: return one
    return first if len(first)>i and any(o[0]=='fit' for o in steps[at+1:i+1]) else None

def is_half(made): return any(made[7:])

def floats(o):
    "Numbers of `o` as one tensor, `None` where it holds others"
    if isinstance(o, (torch.Tensor,np.ndarray,float)): return torch.as_tensor(o).as_subclass(Tensor)
    return tensor(list(o), dtype=torch.float64) if is_listy(o) and len(o) and all(isinstance(v, float) for v in o) else None

def unlike(a, b, near, half):
    "Tell where `b` differs from `a` by more than the law and eight times what one process that rounds otherwise does, in `near`"
    if isinstance(b, Failure): return str(b)
    if any(type(o)!=type(a) or is_listy(a) and len(o)!=len(a) for o in near): return difference(a, b, **wide)
    x,y = floats(a),floats(b)
    if x is not None and y is not None and x.shape==y.shape and x.is_floating_point():
        gap = max(((floats(o)-x).abs().nan_to_num().max().item() for o in near if x.numel()), default=0)
        return difference(x, y, rtol=law[half]['rtol'], atol=law[half]['atol']+8*gap)
    if isinstance(a, dict) and isinstance(b, dict) and list(a)==list(b):
        return first(f'{k}: {d}' for k in a if (d := unlike(a[k], b[k], [o[k] for o in near], half)))
    if is_listy(a) and type(a) is type(b) and len(a)==len(b): return first(d for o in zip(a, b, *near) if (d := unlike(o[0], o[1], o[2:], half)))
    return difference(a, b, **law[half])

def reference(script, bs):
    "What one process sees in each step of `script`, and what it sees where each pass rounds otherwise, twice"
    half,res = is_half(script[0]),[]
    for nudge in (None,1,2):
        how = nudge and (2.**-9 if half else 2e-7, nudge)
        with in_folder(): res.append(on_ranks(lambda _: play(script, bs, nudge=how), 1, timeout=90, join=False)[0][0]) # a mistake within an autocast leaves it to the process
    return res[0],res[1:]

def verdict(script, bs, many):
    "Return the first difference between one process with `bs` samples a batch and each rank, and what the ranks have said"
    one,near = reference(script, bs)
    said = sorted({o for seen,rank in many for o in rank+[o for o in seen if isinstance(o, Failure) and o.startswith(('RankError','DesyncError')) and 'a mistake' not in o]})
    steps = [o for o in script[1] if o[0]!='context']
    for (rank,(seen,_)),i in itertools.product(enumerate(many), range(len(one))):
        if isinstance(one[i], Failure): break
        want = expected(steps, i, one, many[0][0])
        d = want and (f'missing, after {seen[-1:]}' if i>=len(seen) else unlike(want[i], seen[i], [o[i] for o in near if len(o)>i], is_half(script[0])))
        if d: return f'rank {rank}, step {i}, {steps[i]}: {d}',said
    return None,said

def compare(script, size=2, bs=3, shard=False):
    "`verdict` on the ranks of one job"
    with in_folder(): many = on_ranks(lambda rank: play(script, bs, rank, shard), size, timeout=90, join=False)
    return verdict(script, bs*size, many)

def started(script, size, total, shard, every, kill):
    "What ranks see of the script, which is started in a folder that may have states; nothing of ranks that a kill has ended"
    def job(rank):
        try: return play(script, total//size, rank, shard, every=every, kill=kill)
        except (KeyboardInterrupt,SystemExit): return [],[]
    try: return on_ranks(job, size, timeout=90, join=False)
    except RankError:
        if not kill: raise
        return []

def compare_resumed(script, every, kills, sizes, total=12, shard=False):
    "`verdict` on the last of several starts, on `sizes` ranks, each but the last ended by one of `kills`, where it comes to it"
    with in_folder():
        many = [started(script, n, total, shard, every, kill) for n,kill in zip(sizes, (*kills,None))][-1]
        before = [json.loads(o) for o in Path('said').read_text().splitlines()] if Path('said').exists() else []
    d,said = verdict(script, total, many)
    return d,sorted({*said, *before})

@contextmanager
def in_folder():
    "A new working folder, and the old one again"
    old = os.getcwd()
    with TemporaryDirectory() as d:
        os.chdir(d)
        try: yield
        finally: os.chdir(old)

def holds(script, size=2, bs=3, shard=False, resumed=None):
    "Raise `AssertionError` with the script where it differs and nothing was said"
    try: d,said = compare_resumed(script, *resumed, shard=shard) if resumed else compare(script, size, bs, shard)
    except (TimeoutError,RankError) as e: d,said = str(e),[]
    assert not d or said, f'{script!r}\non {size} ranks, bs={bs}, shard={shard}, resumed={resumed}: {d}'
    return d,said

quick = dict(deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=False, report_multiple_bugs=False)

kills = tuples(sampled_from(('raise','SIGTERM','SIGKILL')), sampled_from(events+['after_fit']), integers(1, 12), sampled_from((None,0)))
learners = tuples(*map(sampled_from, map(list, (models,losses,opts))), sampled_from(('fastai','torch')), booleans(), integers(13, 40), booleans(),
    integers(0, 3).map(lambda o: o==3)) # one of four in bfloat16
resumes = tuples(integers(1, 4), lists(kills, min_size=1, max_size=2), tuples(*[integers(1, 4)]*2))

class Scripts(RuleBasedStateMachine):
    "Writes a script, and plays it when it is written"
    size,bs,shard,made = 2,3,False,None
    resumed = none() # strategy for steps between states, kills, and ranks of each start but the first
    @initialize(made=learners, data=strategies.data())
    def make(self, made, data):
        self.made,self.steps,self.ends = made,[],data.draw(self.resumed)
        if self.ends: self.ends = self.ends[0],self.ends[1],(self.size,*self.ends[2][:len(self.ends[1])])
    @rule(kind=sampled_from(('fit','fit_one_cycle','fine_tune')), epochs=integers(1, 2), names=sampled_from(((),)+tuple((o,) for o in callbacks)+(('clip','best'),('clip','window'))))
    def fit(self, kind, epochs, names): self.steps.append(('fit',kind,epochs,names))
    @rule(step=sampled_from([(o,) for o in 'average save load validate lr_find context'.split()]))
    def plain(self, step):
        if not (step==('average',) and self.shard and self.ends): self.steps.append(step) # rows in a callback are no value to keep, which is said
    @rule(to=sampled_from((0,-1)))
    def freeze(self, to): self.steps.append(('freeze',to))
    @rule(n=integers(13, 40), kind=sampled_from(('fastai','torch')))
    def data(self, n, kind): self.steps.append(('data',n,kind))
    @rule(ds=integers(0, 1))
    def preds(self, ds): self.steps.append(('preds',ds))
    @rule(event=sampled_from(events), who=sampled_from((None,0,1)))
    def crash(self, event, who): self.steps.append(('crash',event,None if self.ends else who))
    def teardown(self):
        if self.made and self.steps: self.played(holds((self.made,self.steps), self.size, self.bs, self.shard, self.ends))
    @classmethod
    def played(cls, res): pass

def search(seconds, size=2, shard=False, steps=6, resumed=None, **kw):
    "Look for a script that does not hold, for `seconds`; return the number of those that were played and what was said in those that differ"
    end,count,excused = time.monotonic()+seconds,[],[]
    class Timed(Scripts):
        def teardown(self):
            if time.monotonic()<end: super().teardown()
        @classmethod
        def played(cls, res):
            count.append(1)
            if res[0]: excused.append(res)
    Timed.size,Timed.shard,Timed.resumed = size,shard,none() if resumed is None else resumed
    while time.monotonic()<end: run_state_machine_as_test(Timed, settings=settings(max_examples=kw.pop('max_examples', 40), stateful_step_count=steps, **quick, **kw))
    return len(count),excused

@call_parse
def main(
    minutes:float=5, # How long to look
    ranks:int=2, # Number of ranks
    shard:store_true=False, # Models in shards
    killed:store_true=False, # With a `Checkpoint`, killed and started again, also on another number of ranks
):
    "Look for a script that one process and ranks do not agree on"
    n,excused = search(minutes*60, ranks, shard, resumed=resumes if killed else None)
    print(f'{n} scripts played; {len(excused)} differ and it was said:', *excused, sep='\n')
