"The script runs once: with `nprocs=` calls of a Learner run on forked ranks, and all is as without it"
import collections,functools,itertools,os,psutil,signal,threading,time,warnings,weakref,pytest
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager,nullcontext
from types import SimpleNamespace
import pandas as pd
from fastai.basics import *
from fastai.callback.all import *
from fastai.vision.core import TensorImage
from fastdist import *
from fastdist.base.errors import is_everywhere
from fastdist.train.parent import parent_context
from fastdist.launch.launcher import ThisNode
from fastdist.state.changes import SentObjects
from fastcore.test import test_close,test_eq,test_is
from compare import whole_tables
from learners import digits,tabular
from procs import await_that

pytestmark = pytest.mark.timeout(300)
losses,fits = [],0

class Notes(Callback):
    "Writes to a list and a number of the script, to its class and to itself"
    calls = 0
    def after_batch(self):
        if self.training: losses.append(self.loss.item())
    def after_fit(self):
        global fits
        Notes.calls,self.pid = Notes.calls+1,os.getpid()
        fits += 1

def learner(**kw):
    set_seed(7)
    learn = digits(n=190, bs=24, opt_func=partial(SGD, mom=.9), **kw)
    learn.metrics = [accuracy,Perplexity()]
    return learn

def train(learn, cbs=()):
    "Return all that a script sees of two fits, a search for a learning rate, an evaluation and predictions"
    global fits
    losses.clear()
    fits = Notes.calls = 0
    notes,weight = Notes(),first(learn.model.parameters())
    with learn.no_bar(), learn.no_logging():
        learn.fit_one_cycle(1, cbs=[notes,*cbs])
        lr = learn.lr_find(show_plot=False).valley
        learn.fit(1, lr, cbs=notes)
        seen = [learn.validate(), learn.get_preds()[0], learn.recorder.values, learn.recorder.lrs, torch.rand(2), np.random.rand(), random.random(), losses]
    assert first(learn.model.parameters()) is weight and learn.opt.param_lists[0][0] is weight
    return [fits, Notes.calls, len(learn.cbs)],flatten([seen, [*learn.model.parameters()], [*learn.opt.state.values()]]),notes.pid

def flatten(o):
    if isinstance(o, dict): o = list(o.values())
    if is_listy(o): return [x for v in o for x in flatten(v)]
    return to_np(o).ravel().tolist() if isinstance(o, Tensor) else [float(o)]

@functools.cache
def undisturbed(): return train(learner())

def check(n, cbs=lambda: (), **kw):
    one,learn = undisturbed(),learner()
    with learn.distrib_ctx(nprocs=n, **kw): two = train(learn, cbs())
    test_eq(two[0], one[0])
    test_close(two[1], one[1], 2e-5)
    test_eq((one[2]==os.getpid(),two[2]==os.getpid()), (True,False))
    test_is(parent_context(learn), None)

@pytest.mark.parametrize('size', [2,3])
@pytest.mark.by_default('3')
def test_all_is_as_without_it(size): check(size)

def test_a_model_in_shards(): check(2, shard=True)

@pytest.mark.whole
def test_on_agents(): check(2, engine=ThisNode(None))

@pytest.mark.whole
def test_a_model_in_shards_on_agents(): check(2, shard=True, engine=ThisNode(None))

@pytest.mark.whole
def test_a_checkpoint(tmp_path): check(2, lambda: [Checkpoint(tmp_path/'states')])

class Slots:
    __slots__ = 'k',
    def __init__(self): self.k = 1

class WritesAll(Callback):
    "Changes objects of many kinds, in place"
    def __init__(self, path):
        self.file,self.slots,self.odict,self.queue = open(path, 'w'),Slots(),OrderedDict(a=1, b=2),collections.deque([1], 3)
        self.arrays = [np.array(['x',None], dtype=object), np.zeros(2, dtype=[('a','i4')]), np.zeros(3, bool), np.zeros((2,0)), np.array('2020', dtype='M8[Y]')]
        self.tensors = [TensorImage(torch.ones(3,2,2)), nn.Parameter(torch.ones(2)), *(torch.zeros(3, dtype=o) for o in (torch.bfloat16,torch.complex64))]
        self.still = [torch.ones(1, dtype=torch.float64).expand(4), np.broadcast_to(np.array(1.), 5), torch.eye(2).to_sparse(), torch.empty(2, device='meta')]
        self.frame = pd.DataFrame(dict(a=[1,2]))
    def after_fit(self):
        if rank_distrib(): return
        self.file.write('after the fit')
        self.slots.k,self.arrays[0][1],self.arrays[2][1] = 2,'z',True
        self.odict.move_to_end('a')
        self.queue.append(2)
        self.arrays[1]['a'] += 1
        self.arrays[4][...] = '2021'
        self.frame.loc[0,'a'] = 9
        with torch.no_grad():
            for o in self.tensors: o.add_(1)
    def seen(self):
        "Return what has changed, as texts"
        self.file.close()
        return [self.slots.k, list(self.odict), self.queue, *self.arrays, *self.tensors, self.frame.a.tolist(), Path(self.file.name).read_text()]

agents = pytest.mark.parametrize('kw', [{},dict(engine=ThisNode(None))], ids=['fork','agents'])

def test_objects_of_many_kinds(tmp_path):
    def run(name, **kw):
        learn,cb = learner(),WritesAll(tmp_path/name)
        ids = [id(o) for o in (cb.odict,*cb.arrays,*cb.tensors,cb.frame)]
        cb.file.write('before, ')
        with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(**kw): learn.fit(1, cbs=cb)
        test_eq([id(o) for o in (cb.odict,*cb.arrays,*cb.tensors,cb.frame)], ids)
        return list(map(str, cb.seen()))
    test_eq(run('two', nprocs=2), run('one'))

@functools.lru_cache(1)
def cubed(x): return x**3

class Hidden(Callback):
    "Changes what is shared, held in C, in slots, behind a module that others use, or cannot be sent"
    def __init__(self, layer):
        self.layer,self.alias,self.numbers,self.raw = layer,layer.weight.data,itertools.count(),bytearray(b'ab')
        self.frame,self.inner,self.slots,self.fixed = pd.DataFrame(dict(a=[0])),np.empty(1, dtype=object),Slots(),np.broadcast_to(np.arange(2.), (2,2))
        self.inner[0] = []
        self.norms,self.kept = [],None
        layer.bias.register_hook(lambda g: self.norms.append(1))
    def after_fit(self):
        if rank_distrib(): return
        with torch.no_grad():
            self.layer.weight.data = self.layer.weight.data+1 # and `alias` keeps what was
            self.view = self.layer.weight.detach()[0]
        next(self.numbers)
        self.raw += b'c'
        self.frame['b'] = [1.]
        self.inner[0].append(5)
        del self.slots.k
        cubed(3)
        self.lock,self.best = threading.Lock(),3.
        globals()['made_in_fit'] = [7]

def test_what_hides(tmp_path):
    cubed(2)
    def run(**kw):
        learn = learner()
        cb = Hidden(learn.model[0])
        with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(**kw):
            learn.fit(1, cbs=cb)
            with torch.no_grad(): cb.view.zero_()
        shared = cb.layer.weight[0].abs().sum().item()
        made = globals().pop('made_in_fit')
        texts = [shared, next(cb.numbers), cb.raw, cb.frame.to_numpy().tolist(), cb.inner[0], hasattr(cb.slots, 'k')]
        texts += [cubed(3), cubed(2), cb.best, made, len(cb.norms)]
        return list(map(str, texts)),flatten([cb.alias, cb.layer.weight])
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        (one,one_numbers),(two,two_numbers) = run(),run(nprocs=2)
    test_eq(two, one)
    test_close(two_numbers, one_numbers, 1e-6)

@pytest.mark.whole
def test_a_model_that_is_put_away_between_calls():
    def run(**kw):
        learn = learner()
        with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(**kw):
            learn.fit(1)
            first_,learn.model = learn.model,nn.Linear(64, 10)
            learn.validate() # nothing leads to the first model now
            with torch.no_grad(): first_[0].weight.mul_(2)
            learn.model = first_
            return flatten(learn.get_preds()[0])
    test_close(run(nprocs=2, engine=ThisNode(None)), run(), 1e-5)

class Table(Callback):
    "Has data of NumPy and pandas, of which some share memory"
    def __init__(self):
        self.x = np.arange(60000.)
        self.part,self.days,self.frozen = self.x[:30000],np.arange('1900', '2100', dtype='datetime64[D]'),np.zeros(20000)
        self.frame = pd.DataFrame(dict(a=np.arange(20000.), b=np.arange(20000)))
        self.frozen.flags.writeable = False
    def after_fit(self):
        self.x[-1] += 1
        self.days[0] = self.days[-1]
        self.frame.loc[19999,'a'] = self.frame['a'].sum()
        self.new = self.x.reshape(2, -1)*2

@pytest.mark.whole
def test_large_arrays():
    def run(**kw):
        learn = learner(cbs=Table())
        with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(**kw):
            learn.fit(1)
            learn.table.x[0] = 5
            learn.fit(1)
        t = learn.table
        return t.x.sum(),t.part.sum(),t.days[0],t.frame['a'].iloc[-1],t.new.sum(),t.frozen.sum(),t.x.flags.writeable
    for kw in (dict(),*[dict(engine=ThisNode(None))]*whole_tables): test_eq(run(nprocs=2, **kw), run())

def test_large_arrays_are_not_in_the_pickle():
    x = np.arange(60000.)
    data,_,memories,_ = message = SentObjects().send([x,x[:30000],torch.from_numpy(x)])
    a,b,t = SentObjects().receive(*message)
    assert len(data)<10000 and len(memories)==2
    test_eq((a,b,t.numpy()), (x,x[:30000],x))

class KeepsWeakly(Callback):
    "Has weak references, as caches of pandas and of abstract classes have"
    def __init__(self): self.refs,self.empty,self.by,self.all = [weakref.ref(Slots)],[],{},weakref.WeakSet()
    def after_fit(self):
        new = weakref.ref(type(self))
        self.refs.append(new)
        self.empty.append(new)
        self.by[new] = self.one = new
        self.all.add(type(self))

@pytest.mark.filterwarnings('error:.*stays there')
def test_weak_references_stay():
    learn,cb = learner(),KeepsWeakly()
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(nprocs=2): learn.fit(1, cbs=cb)
    test_eq((len(cb.refs),len(cb.by)), (1,0))

class Says(Callback):
    "Warns and prints, some of it on one rank alone"
    def after_batch(self):
        if not self.training: return
        warnings.warn('this is slow')
        print('a batch')
        if rank_distrib():
            warnings.warn('a bad sample')
            print('sample 3 is bad')

def test_warnings_and_prints_of_ranks(capsys):
    "A place warns once, in however many calls; another rank's are shown with its number"
    learn = learner()
    with warnings.catch_warnings(record=True) as ws, learn.no_bar(), learn.no_logging(), learn.distrib_ctx(nprocs=2):
        warnings.simplefilter('default', UserWarning)
        for _ in range(2): learn.fit(1, cbs=Says())
    test_eq([str(o.message) for o in ws if o.category is UserWarning], ['this is slow','[rank1] a bad sample'])
    lines = capsys.readouterr().out.splitlines()
    test_eq(lines, [*['a batch']*6,'[rank1] sample 3 is bad']*2)

class FromFile:
    "Samples in a file that was opened before ranks were forked"
    def __init__(self, path, n): self.f,self.n = open(path, 'rb'),n
    def __len__(self): return self.n
    def __getitem__(self, i):
        self.f.seek(8*i)
        return torch.tensor(np.frombuffer(self.f.read(8), dtype=np.float64).astype(np.float32)),0.

@pytest.mark.whole
def test_a_file_that_was_open_before(tmp_path):
    path,n = tmp_path/'samples',4000
    np.arange(n, dtype=np.float64).tofile(path)
    dls = DataLoaders.from_dsets(FromFile(path, 8), FromFile(path, n), bs=50, num_workers=0, device='cpu')
    same = nn.Linear(1, 1, bias=False)
    nn.init.ones_(same.weight)
    learn = Learner(dls, same, loss_func=MSELossFlat())
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(nprocs=2): preds = learn.get_preds()[0]
    test_eq(preds.flatten(), torch.arange(n).float())

@pytest.mark.whole
def test_memory_that_processes_share():
    def run(share, **kw):
        learn = learner()
        if share: learn.model.share_memory()
        with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(**kw): learn.fit(1)
        return flatten([*learn.model.parameters()])
    test_close(run(True, nprocs=2), run(False), 1e-6)

def read(learn):
    "Return what a user reads from a Learner after a call: numbers, and what else"
    rec,loss = learn.recorder,learn.loss
    numbers = [rec.log[:-1], rec.values, learn.final_record, learn.smooth_loss, rec.losses, rec.lrs, rec.iters, learn.lr]
    numbers += [learn.n_epoch, learn.epoch, learn.pct_train, learn.train_iter, learn.opt.hypers]
    if loss is not None and not loss.ndim: numbers.append(loss)
    other = [loss is None, learn.dl in (None,*learn.dls.loaders), learn.training, learn.model.training]
    return flatten(numbers),[*other, *[type(o).__name__ for o in learn.cbs if not isinstance(o, DistributedTrainer)]]

@pytest.mark.whole
@pytest.mark.parametrize('n', [2,3])
@pytest.mark.by_default('2')
def test_what_a_user_reads(n):
    "But for `learn.xb`, `yb`, `pred` and losses of samples, which are rank 0's part of the last batch of an evaluation"
    def run(**kw):
        learn,res = learner(),[]
        with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(**kw):
            fit,find = partial(learn.fit_one_cycle, 1),partial(learn.lr_find, show_plot=False)
            for call in (fit, learn.validate, learn.get_preds, partial(learn.get_preds, with_loss=True), find):
                call()
                res.append(read(learn))
        return zip(*res)
    (one,one_others),(two,two_others) = run(),run(nprocs=n)
    for a,b in zip(two, one): test_close(a, b, 1e-4)
    test_eq(two_others, one_others)

class Generated(list):
    "Samples over which a generator goes, as over fastai's `Datasets`"
    def __iter__(self): yield from list.__iter__(self)

def test_an_epoch_that_ends_early():
    "The pass over the loader that was left is its rank's, and nothing is said of it"
    def run(**kw):
        learn = learner()
        learn.dls.train.dataset = Generated(learn.dls.train.dataset)
        with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(**kw): learn.fit(2, cbs=ShortEpochCallback(.5))
        return flatten([*learn.model.parameters()])
    with warnings.catch_warnings(record=True) as ws:
        warnings.simplefilter('always', UserWarning)
        two = run(nprocs=2)
    test_eq([str(o.message) for o in ws if 'stays there' in str(o.message)], [])
    test_close(two, run(), 1e-4)

class Grows(Callback):
    def before_epoch(self): self.dls.train.bs = 12*(self.epoch+1)

@pytest.mark.whole
def test_a_batch_size_that_a_callback_sets():
    def run(**kw):
        learn = learner()
        with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(**kw): learn.fit(2, cbs=Grows())
        return flatten([learn.recorder.losses, [*learn.model.parameters()]])
    test_close(run(nprocs=2), run(), 1e-5)

class Pooled:
    "Samples that threads read, which have begun in the script's process"
    def __init__(self, items): self.items,self.pool = items,ThreadPoolExecutor(2)
    def __len__(self): return len(self.items)
    def __getitem__(self, i): return self.pool.submit(self.items.__getitem__, i).result()

def test_a_data_set_with_a_pool_of_threads():
    def fitted(**kw):
        learn = learner()
        for dl in learn.dls.loaders: dl.dataset = Pooled(dl.dataset)
        learn.dls.one_batch()
        with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(**kw) if kw else nullcontext():
            learn.fit(1)
            return learn.validate()
    test_close(fitted(nprocs=2), fitted(), 1e-5)

@pytest.mark.parametrize('n,bs', [(2,7),(3,10),(3,2),(2,1)])
@pytest.mark.by_default('3-10')
def test_a_batch_that_does_not_divide(n, bs):
    def run(**kw):
        learn = learner()
        learn.dls.train.bs = learn.dls.valid.bs = bs
        if bs<4: learn.model[1] = nn.Identity() # batch norm of two samples makes rounding large
        with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(**kw):
            learn.fit(1)
            preds = learn.get_preds()
        return flatten([learn.recorder.losses, learn.recorder.values, preds, [*learn.model.parameters()]])
    test_close(run(nprocs=n), run(), 5e-5)

class SeesStates(Callback):
    "Counts the states in a folder before the last step"
    def __init__(self, path): self.path = path
    def before_backward(self): self.n = sum(o.startswith('0') for o in os.listdir(self.path))

@pytest.mark.whole
def test_a_checkpoint_saves_by_the_clock(tmp_path):
    learn,cb = learner(),SeesStates(tmp_path/'states')
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(nprocs=2): learn.fit(3, cbs=[Checkpoint(cb.path, minutes=1e-6),cb])
    assert cb.n

@pytest.mark.whole
def test_what_stays_in_the_scripts_process(tmp_path):
    learn = tabular()
    learn.path,mine,row = tmp_path,learn.validate,learn.dls.train_ds.xs.iloc[0]
    learn.validate = lambda *args, **kw: mine(*args, **kw)+[os.getpid()]
    own = learn.validate
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(nprocs=2):
        learn.export('export.pkl')
        test_eq(len(learn.predict(row)), 3)
        assert learn.validate()[-1]!=os.getpid()
    test_is(learn.validate, own)
    test_is(parent_context(load_learner(tmp_path/'export.pkl')), None)

@pytest.mark.parametrize('n', [2,3])
@pytest.mark.by_default('3')
def test_draws_under_a_seed(n):
    def run(**kw):
        learn = learner()
        learn.model.insert(1, nn.Dropout(.3))
        with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(seed=3, **kw): learn.fit(2)
        return flatten([*learn.model.parameters()])
    test_close(run(nprocs=n), run(), 1e-5)

class Fails(Callback):
    def __init__(self, how): self.how = how
    def after_pred(self):
        if self.training and self.train_iter==3 and rank_distrib()==1: self.how()

def _raise(): raise ValueError('a bad sample')
def _die(): os.kill(os.getpid(), signal.SIGKILL)

@pytest.mark.parametrize('how,said', [(_raise,'a bad sample'), (_die,'killed by SIGKILL')])
@pytest.mark.by_default('_die')
def test_after_an_error_the_learner_has_the_last_step(how, said):
    learn,one = learner(),learner()
    for o in (learn,one): o.create_opt()
    with one.no_bar(), one.no_logging(): one.fit(1, cbs=Stops(3))
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(nprocs=2):
        with pytest.raises(RankError, match=said): learn.fit(2, cbs=Fails(how))
        test_close(flatten([*learn.model.parameters()]), flatten([*one.model.parameters()]), 1e-6)
        learn.fit(1)
    test_eq((len(learn.recorder.values),len(learn.cbs)), (1,len(one.cbs)))

class Stops(Callback):
    def __init__(self, n): self.n = n
    def after_batch(self):
        if self.training and self.train_iter==self.n: raise CancelFitException

class Waits(Callback):
    "Is slow from an event on, and leaves a file there"
    def __init__(self, path, event): self.path,self.event,self.began = path,event,False
    def _wait(self, event):
        if event==self.event or self.began:
            self.began = True
            self.path.touch()
            time.sleep(.1)
    def before_train(self): self._wait('train')
    def after_batch(self): self._wait('step' if self.training else 'validation')

@contextmanager
def interrupted(path, times=1):
    "Check that what runs inside raises `KeyboardInterrupt` within twenty seconds after Ctrl-C, pressed when `path` is there, and leaves no process"
    before,at = children(),[]
    def press():
        await_that(path.exists)
        at.append(time.monotonic())
        for i in range(times):
            if i: time.sleep(.3)
            os.kill(os.getpid(), signal.SIGINT)
    t = threading.Thread(target=press)
    t.start()
    with pytest.raises(KeyboardInterrupt) as e: yield e
    assert time.monotonic()-at[0]<20 and is_everywhere(e.value)
    t.join()
    test_eq(children(), before)

def runs(process):
    try: return process.status()!=psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess: return False

def children(): return {o.pid for o in psutil.Process().children(recursive=True) if runs(o)}

def fits(learn, cb): learn.fit(100, cbs=cb)
def finds(learn, cb): learn.add_cb(cb).lr_find(num_it=100, show_plot=False)
def validates(learn, cb): learn.validate(cbs=cb)
def predicts(learn, cb): learn.get_preds(cbs=cb)

moments = dict(train=fits, step=fits, validation=fits, find=finds, evaluation=validates, preds=predicts)
events = dict(find='step', evaluation='validation', preds='validation')

@pytest.mark.parametrize('moment', [*moments])
@pytest.mark.by_default('step')
def test_ctrl_c(tmp_path, moment):
    "What was trained is there, the Learner is whole, and can go on in the same context"
    learn,path = learner(),tmp_path/'began'
    learn.dls.valid.bs = 2
    before,n_cbs = flatten([*learn.model.parameters()]),len(learn.cbs)
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(nprocs=2):
        with interrupted(path): moments[moment](learn, Waits(path, events.get(moment, moment)))
        trained = flatten([*learn.model.parameters()])!=before
        test_eq(trained, moment in ('train','step','validation'))
        if trained: test_eq(len(learn.recorder.losses), learn.train_iter)
        learn.remove_cbs(Waits)
        learn.fit(1)
    test_eq((len(learn.cbs),len(learn.recorder.values)), (n_cbs,1))

@pytest.mark.whole
def test_ctrl_c_in_a_validation_that_takes_long(tmp_path):
    "It ends at once, and the Learner has what was trained until then"
    learn,path = learner(),tmp_path/'began'
    before = flatten([*learn.model.parameters()])
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(nprocs=2):
        with interrupted(path): learn.fit(2, cbs=Stuck(path, 'valid'))
        assert flatten([*learn.model.parameters()])!=before
        test_eq(len(learn.recorder.losses), learn.train_iter)
        learn.fit(1)
    test_eq(len(learn.recorder.values), 1)

def test_ctrl_c_between_calls():
    "It is the script's, as anywhere else in it"
    learn,before = learner(),children()
    with pytest.raises(KeyboardInterrupt), learn.no_bar(), learn.no_logging(), learn.distrib_ctx(nprocs=2):
        learn.fit(1)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(20)
    test_eq((children(),len(learn.recorder.values)), (before,1))
    learn.fit(1)

@pytest.mark.whole
def test_ctrl_c_twice(tmp_path):
    "The second one ends ranks in the middle of a step that takes long"
    learn,path = learner(),tmp_path/'began'
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(nprocs=2):
        with interrupted(path, 2): learn.fit(1, cbs=Stuck(path))
        learn.fit(1)

class Stuck(Callback):
    def __init__(self, path, split='train'): self.path,self.training_too = path,split=='train'
    def after_pred(self):
        if self.training!=self.training_too: return
        self.path.touch()
        time.sleep(60)

def _slowly(path):
    path.touch()
    time.sleep(.5)
    return path

class Late:
    "Takes long when it returns from a rank"
    def __init__(self, path): self.path = path
    def __reduce__(self): return _slowly,(self.path,)

class KeepsLate(Callback):
    def after_fit(self): self.kept = Late(self.path)
    def __init__(self, path): self.path,self.kept = path,None

@pytest.mark.whole
def test_ctrl_c_while_a_call_returns(tmp_path):
    learn,path = learner(),tmp_path/'began'
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(nprocs=2):
        cb = KeepsLate(path)
        with interrupted(path): learn.fit(1, cbs=cb)
    test_eq((cb.kept,len(learn.recorder.values)), (path,1))

class SlowItems(FromFile):
    "Samples that take long in a data worker"
    def __getitem__(self, i):
        Path(f'{self.f.name}.began').touch()
        time.sleep(.1)
        return super().__getitem__(i)

@pytest.mark.whole
def test_ctrl_c_while_data_workers_read(tmp_path):
    path = tmp_path/'samples'
    np.arange(400, dtype=np.float64).tofile(path)
    dls = DataLoaders.from_dsets(SlowItems(path, 400), SlowItems(path, 8), bs=4, num_workers=1, device='cpu')
    learn = Learner(dls, nn.Linear(1, 1, bias=False), loss_func=MSELossFlat())
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(nprocs=2):
        with interrupted(tmp_path/'samples.began'): learn.fit(1)

class Pids(Callback):
    def __init__(self, path): self.path = path
    def after_batch(self):
        (self.path/str(os.getpid())).touch()
        time.sleep(.05)

def test_a_script_that_is_killed(tmp_path):
    learn,pid = learner(),os.fork()
    if not pid:
        with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(nprocs=2): learn.fit(100, cbs=Pids(tmp_path))
        os._exit(0)
    await_that(lambda: len(os.listdir(tmp_path))==2)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    await_that(lambda: not any(map(psutil.pid_exists, map(int, os.listdir(tmp_path)))), 5)

def test_how_many_ranks(monkeypatch):
    learn = learner()
    for o in (0,-1,1.5,'two'):
        with pytest.raises(OptionError, match="integer of at least 1, or 'auto'"): learn.to_distributed(nprocs=o)
    for kw in ({},dict(nprocs=2)):
        with pytest.raises(OptionError, match='no GPU was found'): learn.to_distributed(compute_setup='gpu', **kw)
    with pytest.raises(OptionError, match='keep_sharded'): learn.to_distributed(nprocs=2, shard=True, keep_sharded=True)
    monkeypatch.setenv('FASTDIST_NPROCS', '3')
    with learn.distrib_ctx(): test_eq(parent_context(learn).job.nprocs, 3)
    with learn.distrib_ctx(nprocs=2), learn.distrib_ctx(): test_eq(parent_context(learn).job.nprocs, 2)
    monkeypatch.setenv('FASTDIST_NPROCS', '1')
    with learn.distrib_ctx(): test_is(parent_context(learn), None)

def launched(rank):
    learn = learner()
    with pytest.raises(OptionError, match='2 ranks'): learn.to_distributed(nprocs=3)
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(nprocs=2): learn.fit(1)
    return flatten([*learn.model.parameters()])

def test_under_a_launcher_the_batch_is_the_scripts():
    one = learner()
    with one.no_bar(), one.no_logging(): one.fit(1)
    for o in on_ranks(launched, 2, join=False): test_close(o, flatten([*one.model.parameters()]), 1e-6)

class Pruned(Exception):
    def __init__(self, at): self.at = at

class Prunes(Callback):
    def __init__(self, what, rank): self.what,self.rank = what,rank
    def after_epoch(self):
        if self.rank in (None,rank_distrib()): raise self.what

@pytest.mark.parametrize('what,rank', [(Pruned(3),None), (Pruned(3),1), (FileNotFoundError(2, 'No such file', 'a.csv'),0), (torch.OutOfMemoryError('CUDA out of memory'),None)])
def test_a_script_catches_what_a_rank_raises_by_its_class(what, rank):
    learn = learner()
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(nprocs=2):
        with pytest.raises(type(what)) as e: learn.fit(2, cbs=Prunes(what, rank))
    assert isinstance(e.value, RankError) and 'raise self.what' in str(e.value)
    for k in ('at','errno','filename'): test_eq(getattr(e.value, k, None), getattr(what, k, None))

class SetsLocks(Callback):
    def __init__(self): self.frame,self.kept,self.named = pd.DataFrame(),{},SimpleNamespace()
    def after_fit(self): vars(self.frame)['own'] = self.kept['lock'] = self.named.lock = threading.Lock()

def test_what_cannot_be_sent_is_named_but_for_attributes_of_a_library_s_objects():
    learn = learner()
    with warnings.catch_warnings(record=True) as ws:
        warnings.simplefilter('always', UserWarning)
        with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(nprocs=2): learn.fit(1, cbs=SetsLocks())
    said = sorted(str(o.message).partition(' was changed')[0] for o in ws if 'stays there' in str(o.message))
    test_eq(said, ["'lock' of a SimpleNamespace", "'lock' of a dict"])
