"Scripts as users write them, with a `Checkpoint`: killed for real, started again, they end as the undisturbed run does; and what the terminal shows"
import os,pickle,re,signal,sys,warnings,pytest
from collections import Counter,defaultdict,namedtuple
from fastcore.test import test_eq
from fastai.callback.all import *
from learners import *
from half import CpuHalf
from fastdist import *
from fastdist.comm.rng import global_random
from fastdist.state.folder import States
from procs import *

class Kill(Callback):
    "Kills this process after `at` batches of training; waits for each state, so that the same are there each time"
    order = 2*Checkpoint.order
    def __init__(self, at): self.at,self.n = at,0
    def after_batch(self):
        self.n += self.training
        for o in self.learn._grab_cbs(Checkpoint): o.writer.wait()
        if self.training and self.n==self.at: os.kill(os.getpid(), signal.SIGKILL)
Kill.__module__ = 'fastdist.tests' # a user's would be named, as it counts

def bits(o):
    "Values, to be compared to the bit"
    if isinstance(o, dict): return {k:bits(v) for k,v in o.items()}
    if isinstance(o, (tuple,list,L)): return [*map(bits, o)]
    return o.tobytes() if isinstance(o, np.ndarray) else o.numpy().tobytes() if isinstance(o, Tensor) else repr(o)

def end_of(learn):
    "All in which a training may differ from the undisturbed one"
    rec = learn.recorder
    lists = [*map(list, (rec.values,rec.losses,rec.lrs,rec.iters,rec.metric_names))]
    counts = [{k:v for k,v in vars(cb).items() if k in ('best','wait','count','n')} for cb in learn.cbs if not isinstance(cb, Kill)]
    files = {f.name:re.sub(r'\d\d:\d\d', '', f.read_text()) for f in Path('.').glob('*.csv')}
    return bits([learn.model.state_dict(),learn.opt.state_dict(),lists,counts,files,global_random()])

def process(f, at, to):
    "Call `f` in a process of its own that stands in folder `to`, and is killed after `at` batches; return how it ended, what it said and its end"
    to.mkdir(exist_ok=True)
    pid = os.fork()
    if pid: return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]),(to/'said').read_text(),to
    code = 1
    try:
        os.chdir(to)
        for i in (1,2): os.dup2(os.open('said', os.O_CREAT|os.O_WRONLY|os.O_TRUNC), i)
        sys.stdout,sys.stderr = (open(i, 'w', buffering=1, closefd=False) for i in (1,2))
        warnings.simplefilter('default')
        warnings.showwarning = lambda o,kind,*args: print(f'{kind.__name__}: {o}') # pytest's keeps them
        Path('end').write_bytes(pickle.dumps(end_of(f(Kill(at)))))
        code = 0
    except BaseException as e: print(f'{type(e).__name__}: {e}', flush=True)
    finally: os._exit(code)

def ended(run):
    rc,said,to = run
    assert rc==0, said[-3000:]
    return pickle.loads((to/'end').read_bytes())

def survives(f, path, kills):
    "Check that `f`, killed after each number of batches in `kills`, one after the other, ends as if it were not; return what its last process said"
    whole = ended(process(f, None, path/'whole'))
    for at in kills: test_eq(process(f, at, path/'cut')[0], -signal.SIGKILL)
    last = process(f, None, path/'cut')
    assert ended(last)==whole and 'the script has changed' not in last[1]
    for o in ('whole','cut'): assert ended(process(f, None, path/o))==whole, 'when all is done'
    return last[1]

def cut(every=3, **kw): return Checkpoint('states', every=every, **kw)
def ten(*cbs, **kw):
    "A Learner with ten batches an epoch"
    set_seed(1)
    return digits(n=200, cbs=[*cbs], **kw)

def fine_tune(kill):
    learn = ten(cut(), kill)
    learn.fine_tune(1)
    return learn

def one_cycle(*mk, epochs=3, **kw):
    def f(kill):
        learn = ten(cut(**kw), kill, *(o() for o in mk))
        learn.fit_one_cycle(epochs)
        return learn
    return f

def with_more_between(kill):
    States.pins = 1
    learn = ten(cut(keep=1), kill, splitter=lambda m: [params(m[0]),params(m[1:])])
    learn.freeze_to(1)
    learn.fit(1)
    learn.save('first')
    learn.unfreeze()
    with learn.removed_cbs(kill): learn.lr_find(num_it=4, show_plot=False)
    learn.fit_one_cycle(1, slice(1e-4,1e-2))
    learn.get_preds()
    learn.load('first')
    learn.fit_sgdr(1, 1)
    return learn

def given_anew(kill):
    learn = ten(kill)
    for _ in range(2): learn.fit(1, cbs=cut())
    learn.fit(1)
    learn.fit(2, cbs=cut())
    return learn

def alike(kill):
    "The second fit grows lists of the recorder to what the first has left"
    learn = ten(kill)
    learn.fit(1)
    learn.fit(2, cbs=cut())
    return learn

class OtherLoader(Callback):
    "Trains the second epoch on larger batches, as those do who let images grow"
    def before_train(self):
        if self.epoch==1: self.learn.dl = self.dls.train.new(bs=20)

def one_end_kept(kill):
    "What the first fit alone changes, as the names of metrics, is not in the state of its end any more"
    States.pins = 1
    learn = ten(cut(keep=1), kill)
    for _ in range(3): learn.fit(1)
    return learn

def learnt_loss(kill):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(10))
        def forward(self, x, y): return F.cross_entropy(x*self.w, y)
    learn = ten(cut(), kill, opt_func=partial(OptimWrapper, opt=torch.optim.AdamW))
    learn.loss_func = Scaled()
    learn.splitter = lambda m: [params(m),params(learn.loss_func)]
    learn.fit_one_cycle(2)
    return learn

def made(mk, every=1, epochs=2):
    def f(kill):
        set_seed(1)
        learn = mk()
        learn.add_cbs([cut(every), kill])
        learn.fit_one_cycle(epochs)
        return learn
    return f

def normed():
    learn = digits(n=200)
    learn.model[0],learn.model[3] = torch.nn.utils.spectral_norm(learn.model[0]),torch.nn.utils.parametrizations.weight_norm(learn.model[3])
    return learn

scripts = dict(fine_tune=(fine_tune, (4,11)), with_more_between=(with_more_between, (4,14,4)), given_anew=(given_anew, (15,16,25)),
    learnt_loss=(learnt_loss, (14,)), alike=(alike, (25,)), one_end_kept=(one_end_kept, (25,)),
    trackers=(one_cycle(SaveModelCallback, partial(EarlyStoppingCallback, patience=2, min_delta=9), partial(ReduceLROnPlateau, min_delta=9), epochs=5), (5,16)),
    windows=(one_cycle(partial(GradientAccumulation, 48), partial(GradientClip, .1), every=1), (4,12)), mixup=(one_cycle(MixUp, TerminateOnNaNCallback), (15,)),
    appended=(one_cycle(partial(CSVLogger, append=True)), (5,14)), written=(one_cycle(CSVLogger), (14,)),
    half=(one_cycle(partial(CpuHalf, 'bf16')), (14,)), language_model=(made(language_model), (5,)),
    text_classifier=(made(text_classifier), (8,)), tabular=(made(tabular), (7,)), norms=(made(normed), (14,)),
    short=(one_cycle(partial(ShortEpochCallback, .65)), (12,)), other_loader=(one_cycle(OtherLoader), (14,)))

@pytest.mark.parametrize('name', scripts)
@pytest.mark.by_default('fine_tune', 'trackers', 'other_loader')
def test_it_ends_as_the_undisturbed_run(tmp_path, name):
    f,kills = scripts[name]
    said = survives(f, tmp_path, kills)
    test_eq((said.count('resuming fit'), said.count('Traceback')), (1,0))

# The user's callbacks

Pair = namedtuple('Pair', 'a b')

class Counts(Callback):
    "Counts in several ways, in some that no file takes"
    def __init__(self): self.n,self.by,self.seen = 0,Counter(),defaultdict(list)
    def after_batch(self):
        self.n += 1
        self.by['batch'] += 1
        self.seen[self.training].append(self.n)
        self.pair,self.odd = Pair(self.n, 0),object()
    def after_fit(self): test_eq((self.by['batch'],sum(map(len, self.seen.values()))), (self.n,)*2)

@pytest.mark.whole
def test_what_a_callback_counts_goes_on_and_is_named_once(tmp_path):
    said = survives(one_cycle(Counts), tmp_path, (14,))
    kept, = re.findall(r'UserWarning: Counts goes on with (.*?) as it is, and without (.*?), which is no value', said)
    test_eq([set(o.split(', ')) for o in kept], [{'n','by','seen'},{'pair','odd'}])

class Own(Callback):
    def __init__(self, v): self.v,self.n = v,0
    def after_batch(self): self.n += 1
    def state_dict(self): return dict(n=self.n, v=self.v)
    def load_state_dict(self, s): self.n = s['n']

@pytest.mark.whole
@pytest.mark.parametrize('v', (3, Pair(1, 2)))
@pytest.mark.by_default('v1')
def test_a_callback_says_itself_what_it_keeps(tmp_path, v): assert 'Own' not in survives(one_cycle(partial(Own, v)), tmp_path, (14,))

def test_a_state_that_cannot_be_pickled_is_an_error_by_name(tmp_path):
    rc,said,_ = process(one_cycle(partial(Own, lambda: 0)), None, tmp_path)
    assert rc==1 and 'TypeError: The state_dict of Own cannot be pickled' in said

# Plain scripts, with data workers and without a guard

script = """
import multiprocessing,os,signal
from fastai.vision.all import *
from fastdist import *

class Stop(Callback):
    def after_batch(self):
        if 'STOP' not in os.environ or not self.training or (self.epoch,self.iter)!=(1,2): return
        if os.environ['STOP']=='SIGKILL':
            for o in multiprocessing.active_children(): o.kill() # else they notice within seconds
        os.kill(os.getpid(), getattr(signal, os.environ['STOP']))

set_seed(1)
imgs = [PILImage.create(np.random.RandomState(i).randint(0, 255, (32,32,3), dtype=np.uint8)) for i in range(60)]
block = DataBlock((ImageBlock,CategoryBlock), get_x=lambda i: imgs[i], get_y=lambda i: 'ab'[i%2], splitter=IndexSplitter(range(44,60)), item_tfms=Resize(16),
    batch_tfms=aug_transforms())
dls = block.dataloaders(range(60), bs=4)
model = nn.Sequential(nn.Conv2d(3,4,3,stride=2), nn.ReLU(), Flatten(), nn.Dropout(.2), nn.Linear(196,2))
learn = Learner(dls, model, metrics=accuracy, cbs=[Checkpoint('states', every=2), Stop()])
with learn.distrib_ctx(): learn.fine_tune(2)
print('weights', sum(float(p.detach().double().abs().sum()) for p in model.parameters()).hex())
"""

def shown_rows(out): return [re.sub(r'\d\d:\d\d.*', '', o).split() for o in out.replace('\r', '\n').splitlines() if re.match(r'\d +\d\.\d', o)]
def weights(out): return re.findall('weights (.*)', out)

@pytest.mark.parametrize('sig,rc', [('SIGKILL',-signal.SIGKILL), ('SIGTERM',143)])
@pytest.mark.by_default('SIGKILL')
def test_a_plain_script(warm, tmp_path, sig, rc):
    (tmp_path/'train.py').write_text(script)
    whole,_ = warm(sys.executable, 'train.py')
    shutil.rmtree('states')
    _,err = warm(sys.executable, 'train.py', rc=rc, STOP=sig)
    test_eq((err.count('the training stops after this step'),'Traceback' in err), (int(rc>0),False))
    out,err = warm(sys.executable, 'train.py')
    test_eq((weights(out),shown_rows(out)[-2:]), (weights(whole),shown_rows(whole)[-2:]))
    test_eq((out.count('fastdist: resuming fit'),'Traceback' in err), (1,False))
    test_eq(weights(warm(sys.executable, 'train.py')[0]), weights(whole))
