"A training with two fits, ended at a place of choice in a way of choice, and all that it leaves behind"
import os,random,signal,threading,time
from contextlib import nullcontext
from fastai.basics import *
from fastai.callback.all import *
from fastdist import *
from fastdist.base.values import copied,same_value
from fastdist.data.loader import order_state
from fastdist.state.folder import States
from fastdist.state.progress import values
from fastdist.state.resume import fits_of
from fastdist.state.snapshot import LearnerState,named_callbacks

batch,epochs,steps = 12,(2,3),4 # samples of all ranks; epochs of the two fits; steps of an epoch
hows = 'kill the first','kill the last','kill all','SIGTERM to one','SIGTERM to all','exception','power cut'
wheres = 'first step','middle','last step','validation','between fits','while writing','twice'

def others(path): return {int(f.name):int(f.read_text()) for f in (path/'pids').glob('*')}

class Blow:
    "Ends ranks once, `how` and `where` it says, in fit `fit` and epoch `epoch`; `n` is a small number to choose among moments"
    def __init__(self, how, where, fit, epoch, step, n): store_attr()
    @property
    def in_writing(self): return self.how=='power cut' or self.where=='while writing'
    @property
    def total(self): return self.epoch*steps+self.step+1 # steps of its fit, when it has been
    def __repr__(self): return f'{self.how}, {self.where}: fit {self.fit}, epoch {self.epoch}, step {self.step}, moment {self.n}'

    def one(self, size): return self.n//12%size

    def strike(self, path, rank, size):
        "Note that it happens, and do it; in the thread that calls"
        (path/'struck').touch()
        one = self.one(size)
        pids = others(path)
        if self.how=='exception': return (path/f'raise{one}').touch()
        sig = signal.SIGTERM if 'SIGTERM' in self.how else signal.SIGKILL
        for r in {'kill the first':[0], 'kill the last':[size-1], 'SIGTERM to one':[one]}.get(self.how, sorted(pids, key=lambda r: r==rank)): os.kill(pids[r], sig)

class Place(Callback):
    "Strikes when the training is at the place of `blow`"
    order = 90
    def __init__(self, blow, path, rank, size): self.blow,self.path,self.rank,self.size = blow,path,rank,size
    def _at(self, moment):
        b = self.blow
        if b is None: return
        if self.rank==b.one(self.size) and (self.path/f'raise{self.rank}').exists(): raise ValueError('an error of the user')
        if b.in_writing: return (self.path/'validating').touch() if moment=='valid' else None
        if b.where=='validation' and moment!='valid' or b.where=='between fits' or not self.is_here(moment): return
        b.strike(self.path, self.rank, self.size)
        if b.how=='exception': self._at('')

    def is_here(self, moment):
        b,learn = self.blow,self.learn
        at = fits_of(learn, self.path/'states').done,learn.epoch
        if at<(b.fit,b.epoch) or (self.path/'struck').exists(): return False
        if moment=='valid': return b.where=='validation'
        return learn.training and (*at,learn.iter)>=(b.fit,b.epoch,b.step) and moment==('before_batch','after_pred','after_backward','after_step','after_batch')[b.n%5]

    def before_batch(self): self._at('before_batch')
    def after_pred(self): self._at('after_pred' if self.training else 'valid')
    def after_backward(self): self._at('after_backward')
    def after_step(self): self._at('after_step')
    def after_batch(self): self._at('after_batch')

def hinder(blow, path, rank, size):
    "Strike in the midst of a write, at one of the six calls that make a state last, before or after it"
    at,calls,fsync,rename,write = [],[],os.fsync,os.rename,States.write
    def is_place(a):
        if blow.where=='between fits': return a['ended'] and a['fit']==blow.fit
        return (a['fit'],a['epoch']*steps+a['batch'])>=(blow.fit,blow.total)
    def noting(self, about, *args, **kw):
        at[:],calls[:] = [about,threading.get_ident()],[]
        return write(self, about, *args, **kw)
    def is_now():
        if not at or at[1]!=threading.get_ident() or not is_place(at[0]) or (path/'struck').exists(): return False
        calls.append(1)
        return len(calls)==1+blow.n%6
    def strike():
        if blow.where=='validation': wait_for(path/'validating')
        blow.strike(path, rank, size)
        if blow.how=='exception': time.sleep(.2) # the training goes on beside, and finds that it is to raise
    def hindered(f, *args):
        now,late = is_now(),blow.n//6%2
        if now and not late: strike()
        f(*args)
        if now and late: strike()
    States.write,os.fsync,os.rename = noting,partial(hindered, fsync),partial(hindered, rename)

def wait_for(f):
    end = time.monotonic()+5
    while not f.exists() and time.monotonic()<end: time.sleep(.002)

# The training

class Counts(Callback):
    "Counts steps of a fit, and of all; it does not say how to keep that"
    def __init__(self): self.total = 0
    def before_fit(self): self.n = 0
    def after_step(self): self.n,self.total = self.n+1,self.total+1

class Samples:
    "Samples of a small problem that count how often they are read"
    def __init__(self, n, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.x,self.reads = torch.randn(n, 8, generator=g),0
        self.y = (self.x[:,:3]+.5*torch.randn(n, 3, generator=g)).argmax(1)
    def __len__(self): return len(self.x)
    def __getitem__(self, i):
        self.reads += 1
        return self.x[i],self.y[i]

class Net(nn.Module):
    "Its parts are not in the order in which they are used, so DDP lays its buckets anew"
    def __init__(self, body, head):
        super().__init__()
        self.head,self.body = head,body
    def forward(self, x): return self.head(self.body(x))

def learner(path, size, drop, cbs=(), n=43, width=16, bs=None, more=noop, saves=True):
    set_seed(7)
    dls = DataLoaders.from_dsets(Samples(n), Samples(17, 1), bs=bs or batch//size, num_workers=0, device='cpu', drop_last=False)
    body,head = [nn.Linear(8,width), nn.BatchNorm1d(width), nn.ReLU()],[nn.Dropout(.3 if drop else 0.), nn.Linear(width,3)]
    model = Net(nn.Sequential(*body), nn.Sequential(*head))
    kept = [*([SaveModelCallback(monitor='accuracy')] if saves else []), EarlyStoppingCallback(patience=3), CSVLogger(append=True), Counts()]
    return Learner(dls, model, loss_func=CrossEntropyLossFlat(), metrics=[accuracy,F1Score(average='macro')], splitter=lambda m: [params(m.body), params(m.head)],
        path=path, cbs=[*kept, *listify(more()), *cbs])

def train(rank, path, size, drop, blow=None, every=None, plain=False, epochs=epochs, shard=False, **kw):
    "Run the script in one of `size` ranks, in shards if `shard`: without states if there is no `every`; return what it leaves"
    path = Path(path)
    (path/'pids').mkdir(exist_ok=True, parents=True)
    (path/f'pids/{rank}').write_text(str(os.getpid()))
    if blow and blow.in_writing and rank==0: hinder(blow, path, rank, size)
    learn = learner(path, size, drop, [Place(blow, path, rank, size)]+([Checkpoint(path/'states', every=every, minutes=None)] if every else []), **kw)
    unfreeze = learn.unfreeze
    def between():
        if blow and blow.where=='between fits' and blow.fit==0 and not blow.in_writing:
            if not (path/'struck').exists(): blow.strike(path, rank, size)
            if (path/f'raise{rank}').exists(): raise ValueError('an error of the user')
        unfreeze()
    learn.unfreeze = between
    with nullcontext() if plain else learn.distrib_ctx(shard=shard):
        learn.fine_tune(epochs[1], .02, freeze_epochs=epochs[0])
        del learn.unfreeze
        if not shard: return what_is_left(learn)
    return what_is_left(learn) # which is whole now

def outcome(rank, path, size, **kw):
    "Try to train; return the name of the error and its text, and whether no file has changed"
    def files(): return {f:f.read_bytes() for f in path.rglob('*') if f.is_file() and f.name!='.lock' and f.parent.name!='pids'}
    before,learn = files(),learner(path, size, False, [Checkpoint(path/'states', every=1, minutes=None)], **{k:v for k,v in kw.items() if k!='epochs'})
    weights = copied(learn.model.state_dict())
    try:
        with learn.distrib_ctx(): learn.fine_tune(kw.get('epochs', epochs)[1], .02, freeze_epochs=kw.get('epochs', epochs)[0])
    except Exception as e: return type(e).__name__,str(e),files()==before and same_value(learn.model.state_dict(), weights),learn.dls.train_ds.reads

def four_fits(rank, path, width):
    "Train four fits, of whose ends two are kept; return the error, and whether the weights are as they were"
    learn = learner(path, 1, False, [Checkpoint(path/'states')], width=width)
    weights = copied(learn.model.state_dict())
    try:
        for _ in range(4): learn.fit(1)
    except ResumeError as e: return str(e),same_value(learn.model.state_dict(), weights)

def what_is_left(learn):
    "Return all that can be seen of `learn` and what the script would do next"
    owners = {'Learner':learn, **{k:o for k,o in named_callbacks(learn).items() if type(o).__module__.partition('.')[0]=='fastai' or type(o) is Counts}}
    seen = {k:values(o)|({} if o is learn else dict(run=o.run)) for k,o in owners.items()}
    for k,v in dict(Learner=('path','logger','fits_by_path'), SaveModelCallback=['last_saved_path'], Recorder=['log']).items():
        for o in v: seen.get(k, {}).pop(o, None)
    reads = [dl.dataset.reads for dl in learn.dls.loaders]
    res = dict(snap=LearnerState.take(learn, 'model','buffers','modes','grads','opt','groups','frozen'), seen=seen, rec=recorded(learn.recorder),
        orders=[order_state(dl) for dl in learn.dls.loaders], draws=[random.random(),np.random.rand(),torch.rand(3)], reads=reads,
        file=(f := learn.path/'models/model.pth').exists() and torch.load(f, weights_only=False), log=rows(learn.path/'history.csv'))
    return res|dict(preds=learn.get_preds())

def rows(file):
    "Return the numbers in a log, without the time"
    rows = [o.split(',')[:-1] for o in file.read_text().splitlines()]
    return [o if o[0]=='epoch' else list(map(float, o)) for o in rows]

def recorded(rec):
    "Return what the recorder shows; the time in its table is another each time"
    return dict(values=list(map(list, rec.values)), losses=list(rec.losses), lrs=list(rec.lrs), iters=list(rec.iters), names=list(rec.metric_names),
        final=list(rec.final_record), n=len(rec.log))
