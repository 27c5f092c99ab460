"Everything that can go wrong, everywhere, on each rank: what the ranks do, and how long they take: `python tests/helpers/faults.py --save`"
import json,os,signal,threading,time
from functools import cache
from importlib import import_module
from multiprocessing import get_context
from fastai.basics import *
from fastai.callback.core import *
from fastai.callback.tracker import TerminateOnNaNCallback
from fastdist import *
from fastdist.train.events import cancels
from fastdist.comm.job import current_job
from fastdist.parallel.passes import local
from accelerate.state import PartialState

for o in ('torch._dynamo','fastdist.shard.layout'): import_module(o) # imported when a model is wrapped, for two seconds; forked ranks have them then
bs,n_steps,n_valid,patience = 4,4,24,5.
survivable = [c.__name__ for c in cancels]+['RuntimeError','NaN','SIGINT']
fatal = ['SIGTERM','SIGKILL','dead loop']
calls_back = 'before_fit','callback','validation','get_preds'
places = ['data set','data worker','before_fit','forward','backward','callback','metric','validation','get_preds']

some = [('RuntimeError','forward'), ('RuntimeError','validation'), ('CancelBatchException','callback'), ('SIGKILL','backward'), ('dead loop','forward')]

def hidden(kind, place):
    "Nobody can agree on it there, so it is an error"
    return kind.startswith('Cancel') and place not in calls_back

class Fault:
    "Goes wrong once, in the process and at the time that it is made for"
    def __init__(self, kind, place, here): self.kind,self.place,self.live = kind,place,here
    def __call__(self, place, when=True):
        if not (self.live and when and place==self.place): return False
        self.live = self.kind=='dead loop' or place=='metric' # a metric is tried out first, and errors are forgiven there
        if self.kind.startswith('Cancel'): raise next(c for c in cancels if c.__name__==self.kind)('on purpose')
        if self.kind=='RuntimeError': raise RuntimeError('on purpose')
        if self.kind.startswith('SIG'): os.kill(os.getpid(), getattr(signal, self.kind))
        while self.kind=='dead loop': time.sleep(0.01)
        return self.kind=='NaN'

class Data:
    def __init__(self, xs, ys, fault=None, bad=None): self.xs,self.ys,self.fault,self.bad = xs,ys,fault,bad
    def __len__(self): return len(self.xs)
    def __getitem__(self, i):
        nan = self.fault and self.fault(self.fault.place if self.fault.place.startswith('data') else None, i==self.bad)
        return self.xs[i]*math.nan if nan else self.xs[i],self.ys[i]

class Faulty(Callback):
    decides = True
    def __init__(self, fault): self.fault = fault
    def _spoil(self, nan):
        if nan: self.learn.loss = self.learn.loss*math.nan
    def before_fit(self): self._spoil(self.fault('before_fit') and False)
    def after_pred(self):
        if self.fault('get_preds', not self.training): self.learn.pred = self.pred*math.nan
    def after_batch(self): self._spoil(self.fault('callback', self.training and self.iter==2) or self.fault('validation', not self.training and self.iter==1))

class Noting(Metric):
    "A mean, which may fail"
    def __init__(self, fault): self.fault = fault
    def reset(self): self.total,self.n = 0.,0
    def accumulate(self, learn):
        nan = self.fault('metric')
        self.total += learn.pred.mean().item()*len(learn.pred)*(math.nan if nan else 1)
        self.n += len(learn.pred)
    @property
    def value(self): return self.total/self.n if self.n else None

class Net(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.layers,self.fault,self.calls = nn.Sequential(nn.Linear(6,8), nn.ReLU(), nn.Linear(8,1)),fault,0
    def forward(self, x):
        self.calls += self.training
        res = self.layers(x)
        if self.fault('forward', self.training and self.calls==3): res = res*math.nan
        if self.training and self.calls==3 and self.fault.place=='backward': res.register_hook(lambda g: g*math.nan if self.fault('backward') else None)
        return res

# %%
def faulty(kind, place, here, size, culprit):
    "A Learner of one of `size` ranks, or of one process that does what they do"
    fault = Fault(kind, place, here)
    torch.manual_seed(1)
    xs,world = torch.randn(bs*size*n_steps+n_valid, 6),torch.distributed.is_initialized() or 'RANK' in os.environ
    data,cut = (xs, xs.sum(1, keepdim=True)),bs*size*n_steps
    train = Data(*(o[:cut] for o in data), fault, bs*(2*size+culprit))
    dls = DataLoaders.from_dsets(train, Data(*(o[cut:] for o in data)), bs=bs if world else bs*size, shuffle=False, num_workers=int(place=='data worker'), device='cpu')
    learn = Learner(dls, Net(fault), loss_func=MSELossFlat(), opt_func=SGD, lr=0.01, metrics=Noting(fault), cbs=[Faulty(fault), TerminateOnNaNCallback()])
    return learn,fault

def act(learn, place):
    if place=='get_preds': learn.get_preds()
    else: learn.fit(2)

def outcome(learn, place):
    try: act(learn, place)
    except BaseException as e: return type(e).__name__,str(e)
    return 'went on',''

def again(learn, fault):
    "A second fit, and the weights after it"
    fault.live = False
    for p in learn.model.parameters(): local(p.data).nan_to_num_(0.)
    learn.fit(1)
    return [getattr(p, 'full_tensor', lambda: p)().detach().flatten().tolist() for p in learn.model.parameters()]

def traces(model):
    "Classes, hooks, attributes and parameters of a model, in none of which a context leaves anything"
    hooks = lambda m: [[str(f) for f in v.values()] for k,v in vars(m).items() if k.endswith('_hooks') and v]
    params = lambda m: [(id(p), type(p).__name__, p.shape, p.is_leaf) for p in m._parameters.values()]
    return [(type(m).__name__, sorted(k for k in vars(m) if k!='calls'), hooks(m), params(m)) for m in model.modules()]

def state(learn):
    "What a context puts back, whatever happens in it"
    overridden = [k for k in ('_with_events','_do_one_batch','_call_one','lr_find') if k in vars(learn)]
    mine = learn.model,learn.model.forward.__self__,*learn.dls.loaders,learn.logger,*learn.cbs
    threads = [o.name for o in threading.enumerate() if 'fastdist' in o.name]
    job = torch.distributed.is_initialized(),current_job() is None,signal.getsignal(signal.SIGURG),PartialState._shared_state,threads
    return [id(o) for o in mine],overridden,job,traces(learn.model),dict(os.environ)

def survive(rank, kind, place, size, culprit, shard):
    learn,fault = faulty(kind, place, rank==culprit, size, culprit)
    with learn.no_logging(), learn.no_bar():
        before = str(state(learn))
        with learn.distrib_ctx(shard=shard):
            start = time.monotonic()
            how,text = outcome(learn, place)
            seconds,n = time.monotonic()-start,len(getattr(learn.recorder, 'losses', []))
            weights = again(learn, fault)
        return dict(how=how, text=text, seconds=seconds, n=n, weights=weights, whole=str(state(learn))==before)

def one_process(kind, place, size, culprit):
    learn,fault = faulty(kind, place, True, size, culprit)
    with learn.no_logging(), learn.no_bar():
        how,text = outcome(learn, place)
        return dict(how=how, text=text, n=len(getattr(learn.recorder, 'losses', [])), weights=again(learn, fault))

# %%
def die(rank, kind, place, size, culprit, out, shard):
    "Ends in an error; what it says goes into `out`"
    signal.signal(signal.SIGTERM, signal.SIG_IGN if rank!=culprit else signal.SIG_DFL)
    learn,fault = faulty(kind, place, rank==culprit, size, culprit)
    start = time.monotonic()
    with learn.no_logging(), learn.no_bar():
        try:
            with learn.distrib_ctx(patience=patience, shard=shard): act(learn, place)
        except BaseException as e:
            Path(f'{out}/{rank}').write_text(json.dumps([type(e).__name__, str(e), time.monotonic()-start]))
            raise

def dead(kind, place, size, culprit, shard):
    "What each rank saw of a fatal fault, how the head ended, and after how long"
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as d:
        try: head = on_ranks(partial(die, kind=kind, place=place, size=size, culprit=culprit, out=d, shard=shard), size, join=False, timeout=40) and 'went on'
        except Exception as e: head = f'{type(e).__name__}: {e}'
        saw = {int(p.name):json.loads(p.read_text()) for p in Path(d).iterdir()}
    return saw,head,time.monotonic()-start

# %%
rounds = (2,0),(3,2),(2,1),(3,0) # numbers of ranks, and who fails

def by_default(i, kind, j, place):
    "Return whether `kind` is tried in `place` without `--whole`: each in every third place"
    return (i+j)%3==0

def chosen(kinds, size, culprit, divided, few):
    "Kinds and places: all, those in `some` if `few`, or if `divided` those by default whose turn this of `rounds` is, which each is in one of"
    board = [(k,p,by_default(i, k, j, p) and (i+j)%len(rounds)==rounds.index((size,culprit))) for i,k in enumerate(kinds) for j,p in enumerate(places)]
    return [(k,p) for k,p,mine in board if ((k,p) in some if few else mine or not divided)]

def survived(size, culprit, shard, divided, few):
    "The cells of one `culprit` among `size` ranks that go on; the ranks are forked once"
    calm,alone = chosen(survivable, size, culprit, divided, few),cache(one_process)
    run = lambda rank: [survive(rank, k, p, size, culprit, shard) for k,p in calm]
    for (k,p),*ranks in zip(calm, *on_ranks(run, size, join=False, timeout=600)):
        yield dict(kind=k, place=p, ranks=ranks, alone=alone('RuntimeError' if hidden(k, p) else k, p, size, culprit))

def died(size, culprit, shard, divided, few):
    "The cells of one `culprit` among `size` ranks that end"
    for k,p in chosen(fatal, size, culprit, divided, few):
        saw,head,seconds = dead(k, p, size, culprit, shard)
        yield dict(kind=k, place=p, saw=saw, head=head, seconds=seconds)

def cells(run, size, culprit, shard, divided, few, folder):
    res = [o|dict(size=size, culprit=culprit, shard=shard) for o in run(size, culprit, shard, divided, few)]
    Path(f'{folder}/{run.__name__}{size}{culprit}{shard}.json').write_text(json.dumps(res))

def matrix(folder, shard=False, divided=False, few=False):
    "Run all cells, those that are `divided` or a `few` of them, each (size, culprit) beside the others, since ranks wait most of the time"
    jobs = [(run,size,culprit,shard,divided,few) for run in (survived,died) for size,culprit in (rounds[1:2] if few else rounds)]
    procs = [get_context('fork').Process(target=cells, args=(*o, folder)) for o in jobs]
    for p in procs: p.start()
    for p in procs: p.join()
    for o,p in zip(jobs, procs): assert p.exitcode==0, f'{o} ended with {p.exitcode}'
    return found(folder)

def found(folder):
    "The cells that have been run in `folder`"
    return [o for p in sorted(Path(folder).glob('*.json')) for o in json.loads(p.read_text())]

def times(cells):
    "Seconds until all ranks have ended or gone on, in each of `cells`"
    longest = lambda o: o.get('seconds') or max(r['seconds'] for r in o['ranks'])
    return [dict(fault=o['kind'], place=o['place'], rank=o['culprit'], size=o['size'], seconds=round(longest(o), 2)) for o in cells]

@call_parse
def main(
    save:bool=False, # Put the times in the place of those that the notebook shows?
    folder:str=None, # Where what happened in each cell stays; it goes with a temporary folder by default
    divided:bool=False, # Only the cells that run by default, each on two or on three ranks, the first or the last of which fails?
    shard:bool=False, # Does each rank hold a part of the model?
    few:bool=False # Only the cells in `some`?
):
    "Measure how long each fault takes until it is over"
    with tempfile.TemporaryDirectory() as d: rows = times(matrix(folder or d, shard, divided, few))
    print(pd.DataFrame(rows).pivot_table(index='fault', columns='place', values='seconds', aggfunc='max', sort=False).round(1).to_string())
    if save: Path(__file__).with_suffix('.json').write_text(json.dumps(rows))
