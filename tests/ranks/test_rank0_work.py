"What rank 0 shows, writes and evaluates on its own: the others neither take part nor wait, and train as they would without it"
import os,matplotlib,pytest
matplotlib.use('agg')
os.environ |= dict(WANDB_MODE='offline', WANDB_SILENT='true', WANDB_ERROR_REPORTING='false')
import wandb,matplotlib.pyplot as plt
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import distributed as dist
from fastai.vision.all import *
from fastai.callback.tensorboard import TensorBoardCallback
from fastai.callback.wandb import WandbCallback
from fastdist import *
from fastcore.test import test_eq,test_close
from learners import load_digits

def alone_in_a_pass(*kws): return [pytest.param(o, marks=pytest.mark.replicas) for o in kws]

@pytest.fixture(autouse=True)
def no_figures(): plt.close('all')

def pictures(n=60, bs=4, **kw):
    "The digits as images, which can be shown and decoded"
    xs,ys = load_digits(return_X_y=True)
    imgs = [PILImageBW.create((x.reshape(8,8)*15).astype(np.uint8)) for x in xs[:n]]
    dblock = DataBlock((ImageBlock(PILImageBW),CategoryBlock), get_x=lambda i: imgs[i], get_y=lambda i: ys[i], splitter=IndexSplitter(range(n*4//5,n)))
    model = nn.Sequential(nn.Conv2d(1,8,3,2,1,bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128,10))
    return Learner(dblock.dataloaders(range(n), bs=bs, num_workers=0, device='cpu'), model, loss_func=CrossEntropyLossFlat(), metrics=accuracy, path='.', **kw)

def trained(rank, *cbs, **kw):
    "What a fit leaves on this rank: weights, the table, the curve and the rates"
    set_seed(1)
    learn = pictures(**kw)
    with learn.distrib_ctx(): learn.fit_one_cycle(2, 0.02, cbs=cbs)
    rec = learn.recorder
    return [o.tolist() for o in learn.model.state_dict().values()],[list(o) for o in rec.values],[float(o) for o in rec.losses],rec.lrs

@pytest.fixture(scope='module')
def alone(): return on_ranks(trained, join=False)

def check(alone, f):
    "Ranks train in `f` as they do without callbacks; what else they return"
    res = on_ranks(f, join=False, timeout=100)
    test_eq([o for o,_ in res], alone)
    return [o for _,o in res]

def files(path='.'): return sorted(str(o) for o in Path(path).rglob('*') if o.is_file())

# Writers

@pytest.mark.parametrize('kw', [dict(log_preds=False), *alone_in_a_pass(dict(), dict(n_preds=4))], ids=['scalars','preds','few'])
@pytest.mark.by_default('scalars')
def test_tensorboard(alone, kw):
    check(alone, lambda rank: (trained(rank, TensorBoardCallback(log_dir=f'logs{rank}', trace_model=False, **kw)),None))
    file, = files()
    assert file.startswith('logs0/events.out')
    log = EventAccumulator('logs0').Reload()
    _,values,losses,lrs = alone[0]
    for k,v in dict(train_loss=losses, lr_0=lrs, valid_loss=L(values).itemgot(1), accuracy=L(values).itemgot(2)).items():
        test_close(list(dict((o.step, o.value) for o in log.Scalars(k)).values())[:len(v)], v, 1e-5)
    test_eq('Sample results' in log.Tags()['images'], kw.get('log_preds', True))

def traced(rank, folder, **kw): return trained(rank, TensorBoardCallback(log_dir=folder, log_preds=False), **kw)

@pytest.mark.whole
@pytest.mark.replicas # rank 0 alone cannot make a forward pass in shards
def test_tensorboard_traces_on_rank_0():
    "The trace takes a batch of the training loader, so the next order is another one, in one process and on ranks"
    _,*one = traced(0, 'one', bs=8)
    a,b = on_ranks(lambda rank: traced(rank, f'logs{rank}'), join=False, timeout=100)
    test_eq(a, b)
    for x,y in zip(a[1:], one): test_close(np.array(x), np.array(y), 1e-4)
    assert EventAccumulator('logs0').Reload().Graph().node and not Path('logs1').exists()

@pytest.fixture
def wandb_dir(tmp_path, monkeypatch):
    "A folder for runs, and the callback without an error that it has in one process too: github.com/fastai/fastai/issues/4173"
    monkeypatch.setattr('fastai.callback.wandb.init_args', lambda o: init_args(o) if hasattr(o, '__dict__') else {})
    monkeypatch.setenv('WANDB_DIR', str(tmp_path))
    return tmp_path/'wandb'

def with_wandb(rank, **kw):
    if rank==0: wandb.init(project='digits')
    res = trained(rank, WandbCallback(log=None, log_model=False, **kw))
    if rank: return res,wandb.run
    logged = [wandb.run.summary.get(k) for k in ('epoch','valid_loss','accuracy')],'Prediction_Samples' in wandb.run.summary.keys()
    wandb.finish()
    return res,logged

@pytest.mark.parametrize('kw', [dict(log_preds=False), *alone_in_a_pass(dict(), dict(log_preds_every_epoch=True, n_preds=5))], ids=['scalars','preds','every'])
@pytest.mark.by_default('every')
def test_wandb(alone, kw, wandb_dir):
    (logged,preds),other = check(alone, lambda rank: with_wandb(rank, **kw))
    test_close(logged, [2,*alone[0][1][-1][1:]], 1e-5)
    test_eq((preds,other), (kw.get('log_preds', True),None))
    test_eq(len(list(wandb_dir.glob('offline-run-*/run-*.wandb'))), 1)

class Logged(Callback):
    "Finds the callbacks of ours whose arguments a tracker would log, and what is no number, name or list among them"
    def before_fit(self):
        found = {type(cb).__name__:init_args(cb) for cb in self.learn.cbs if type(cb).__module__.startswith('fastdist.')}
        self.found = sorted(found),[(k,n,v) for k,d in found.items() for n,v in d.items() if not isinstance(v, (bool,int,float,str,list,tuple,Path,type(None)))]

@pytest.mark.whole
@pytest.mark.parametrize('kw', [dict(), dict(shard=True)], ids=['replicas','shards'])
@pytest.mark.by_default('shards')
def test_trackers_log_no_object_of_ours(kw):
    "A tracker walks through the arguments of callbacks: an object there that reaches the Learner would be an endless walk"
    def train(rank):
        learn,cb = pictures(),Logged()
        with learn.distrib_ctx(**kw): learn.fit(1, cbs=[cb, Checkpoint('state'), Timeline()])
        return cb.found
    (names,objects),_ = on_ranks(train, join=False, timeout=60)
    assert {'DistributedTrainer','GlobalGradients','Evaluate','Checkpoint','Timeline'} <= {*names}, names
    test_eq(objects, [])

def test_csv_and_graph(alone):
    shown = check(alone, lambda rank: (trained(rank, CSVLogger(f'{rank}.csv'), ShowGraphCallback()),len(plt.get_fignums())))
    test_eq((files(),shown[1]), (['0.csv'],0))
    test_close(pd.read_csv('0.csv')[['train_loss','valid_loss','accuracy']].values, np.array(alone[0][1]), 1e-5)

# A user's own

class Curious(Callback):
    "Looks at the model on rank 0 after each epoch, in the ways of `look`"
    rank0_only = True
    def __init__(self, look, event='after_epoch'):
        self.look,self.seen,self.busy = look,[],False
        setattr(self, event, self.act)
    def act(self):
        if self.busy: return # fastai calls it for the evaluation too
        self.busy = True
        self.seen.append(self.look(self.learn))
        self.busy = False

def inner_preds(learn): return [len(o) for o in learn.get_preds(inner=True)]
def preds(learn): return [len(o) for o in learn.get_preds()]
def validate(learn): return list(learn.validate())
def show(learn):
    learn.show_results()
    return len(plt.get_fignums())
def predict(learn): return len(learn.predict(PILImageBW.create(np.zeros((8,8), np.uint8)))[2])
def everything(learn): return [f(learn) for f in (preds,validate,show,predict)]

def curious(rank, look, **kw):
    cb = Curious(look, **kw)
    return trained(rank, cb),cb.seen

@pytest.mark.replicas # rank 0 alone cannot make a forward pass in shards
@pytest.mark.parametrize('look', [inner_preds,preds,validate,show,predict,everything])
@pytest.mark.by_default('everything')
def test_evaluation_after_an_epoch(alone, look):
    a,b = check(alone, lambda rank: curious(rank, look))
    test_eq((len(a),b), (2,[]))
    if look in (inner_preds,preds): test_eq(a, [[12,12]]*2)
    if look is validate: test_close(a, [o[1:] for o in alone[0][1]], 1e-5)

@pytest.mark.whole
@pytest.mark.replicas # rank 0 alone cannot make a forward pass in shards
@pytest.mark.parametrize('event', ['before_fit','after_train','before_validate','after_validate','after_fit'])
@pytest.mark.by_default('after_validate')
def test_evaluation_elsewhere(alone, event):
    a,b = check(alone, lambda rank: curious(rank, preds, event=event))
    test_eq((a,b), ([[12,12]]*len(a),[]))
    assert a

@pytest.mark.replicas # rank 0 alone cannot make a forward pass in shards
def test_evaluation_within_training(alone):
    a,_ = check(alone, lambda rank: curious(rank, preds, event='after_step'))
    test_eq(a, [[12,12]]*12)

@pytest.mark.replicas # rank 0 alone cannot make a forward pass in shards
def test_the_history_survives_it(alone):
    check(alone, lambda rank: (trained(rank, CSVLogger(), Curious(everything)),None))
    test_close(pd.read_csv('history.csv')[['train_loss','valid_loss','accuracy']].values, np.array(alone[0][1]), 1e-5)

# After the context

def after(rank, who, group):
    if group: setup_distrib()
    learn = pictures()
    with learn.distrib_ctx(): learn.fit(1, 0.02)
    test_eq(dist.is_initialized(), group)
    if rank!=who: return
    learn.export(f'{rank}.pkl')
    return preds(learn),validate(learn),show(learn),predict(learn),learn.recorder.values

@pytest.mark.whole
@pytest.mark.parametrize('group', [False,True])
@pytest.mark.parametrize('who', [0,1])
@pytest.mark.by_default('1-True')
def test_one_rank_after_the_context(who, group):
    n,valid,shown,classes,_ = on_ranks(lambda rank: after(rank, who, group), join=False, timeout=100)[who]
    test_eq((n,shown,classes,files()), ([12,12],1,10,[] if who else ['0.pkl']))

def exported(rank):
    learn = pictures()
    with learn.distrib_ctx(), learn.no_bar(), learn.no_logging(): learn.fit(1, 0.02)
    values = learn.recorder.values[-1][1:]
    if rank: return
    learn.export('a.pkl')
    return values,learn.validate(),load_learner('a.pkl').validate(dl=pictures().dls.valid)

def test_what_rank_0_exports_is_what_was_trained():
    a,b,c = on_ranks(exported, join=False, timeout=100)[0]
    test_close(b, a, 1e-5)
    test_close(c, a, 1e-5)
