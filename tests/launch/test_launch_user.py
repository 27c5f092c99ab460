"Ranks started as people start them: from a plain script without a guard, with every default left alone, and what the terminal shows of it"
import math,os,pytest,re,sys,torch,pandas as pd
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from textwrap import dedent
from accelerate.utils import DataLoaderConfiguration,GradientAccumulationPlugin,InitProcessGroupKwargs,ProfileKwargs
from torch import distributed as dist
from fastai.basics import *
from fastcore.test import test_eq,expect_fail
from fastdist import *
from fastdist.launch.launcher import start_ranks
from learners import digits
from procs import *

pytestmark = pytest.mark.timeout(300)
cpu = partial(Accelerator, compute_setup='cpu')

def script(code, *cmd, run=run, **kw):
    "Stdout and stderr of the script `code`"
    Path('script.py').write_text(dedent(code))
    return run(*(cmd or [sys.executable]), 'script.py', **kw)

workers = """
    import time
    from collections import namedtuple
    from multiprocessing import Pool,get_start_method
    from fastai.vision.all import *
    from sklearn.datasets import load_digits
    from torch.utils.data import DataLoader as TorchLoader
    from fastdist import *

    class Digits:
        def __init__(self, xs, ys): self.xs,self.ys = xs,ys
        def __len__(self): return len(self.xs)
        def __getitem__(self, i): return torch.tensor(self.xs[i]).float(),int(self.ys[i])
    class Scale(ItemTransform):
        def encodes(self, o): return o[0]/16,o[1]
    class Mine(TensorBase): pass
    Pair = namedtuple('Pair', 'a b')
    def square(i): return i*i

    xs,ys = load_digits(return_X_y=True)
    dls = DataLoaders.from_dsets(Digits(xs[:1400],ys[:1400]), Digits(xs[1400:],ys[1400:]), bs=32, after_item=Pipeline([Scale(),lambda o: o]), device='cpu')
    assert dls.train.fake_l.num_workers or os.cpu_count()==1
    learn = Learner(dls, nn.Sequential(nn.Linear(64,32), nn.ReLU(), nn.Linear(32,10)), loss_func=CrossEntropyLossFlat(), metrics=accuracy)
    acc = Accelerator(nprocs=2, compute_setup='cpu')
    acc.distribute(lambda: None)()
    acc.distribute(learn.fit)(3)

    def f():
        dl = acc.prepare(TorchLoader([Pair(torch.ones(2), Mine(torch.ones(2)))]*8, 2, num_workers=1, persistent_workers=True))
        kinds = {(type(b),type(b.b)) for _ in range(2) for b in dl}
        with Pool(2) as p: squares = p.map(square, range(4))
        torch.save(Pair(1,2), 'pair.pkl')
        print('ünïcode ✓')
        return Pair(kinds, squares),get_start_method()
    for how in ('spawn','fork'):
        res,method = acc.distribute(f, start=how)()
        assert isinstance(res, Pair) and res==({(Pair,Mine)}, [0,1,4,9]) and method==get_start_method().replace('forkserver', 'fork'), (res,method)
        assert type(torch.load('pair.pkl', weights_only=False)) is Pair
    """

@pytest.mark.whole
@pytest.mark.launcher
@pytest.mark.slow
def test_data_workers_of_ranks_start_as_those_of_a_script():
    "Three epochs took two minutes, as each worker was a new Python, and nothing of the script could be pickled"
    out,_ = script(workers)
    rows = [o.split()[0] for o in out.splitlines() if re.match(r'\d +\d', o)]
    assert rows==['0','1','2'] and out.count('ünïcode ✓')==2, out

@pytest.mark.parametrize('how,n', [('spawn',2), ('spawn',3), ('fork',2), ('fork',3)])
@pytest.mark.by_default('spawn-2', 'fork-3')
def test_the_user_s_own_group_from_the_environment(how, n):
    def f(rank):
        dist.init_process_group('gloo')
        t = torch.tensor([rank+1])
        dist.all_reduce(t)
        dist.destroy_process_group()
        return t.item(),os.environ['MASTER_PORT']
    res = start_ranks(f, n, how, all_ranks=True)
    test_eq({o for o,_ in res}, {n*(n+1)//2})
    test_eq(len({port for _,port in res}), 1)

broken = """
    from fastai.vision.all import *
    from fastdist import *

    class Boom(Callback):
        def after_batch(self):
            if self.iter==2 and this_world().rank==1:
                try: dict()['lost']
                except KeyError as e: raise ValueError('no such thing') from e
    set_seed(1)
    data = list(zip(torch.randn(200,3), torch.randn(200,1)))
    learn = Learner(DataLoaders.from_dsets(data, data, bs=8, device='cpu'), nn.Linear(3,1), loss_func=MSELossFlat(), cbs=Boom())
    """
@pytest.mark.whole
@pytest.mark.launcher
def test_a_learner_of_a_script_and_one_of_a_module_that_it_imports():
    common = """
    from fastai.basics import *
    from fastai.test_utils import synth_learner
    from fastdist import *
    set_seed(1)
    learn = synth_learner(n_trn=4)
    def train():
        with learn.distrib_ctx(), learn.no_logging(): learn.fit(1)
    """
    Path('mine.py').write_text(dedent(common))
    out,err = script(common+"""
    import mine
    acc = Accelerator(nprocs=2, compute_setup='cpu')
    for f,o in ((train,learn),(mine.train,mine.learn)):
        was = o.model.a.item()
        acc.distribute(f)()
        print('mine', o.model.a.item()!=was, len(o.recorder.values))
    """)
    test_eq([o for o in out.splitlines() if o.startswith('mine')], ['mine True 1']*2)

patching = """
    import mine,threading
    from dataclasses import dataclass
    from fastai.basics import *
    from fastdist import *

    def halved(p, y, **kw): return F.l1_loss(p, y)/2
    F.mse_loss = halved
    lock = threading.Lock()
    @patch(as_prop=True)
    def three(self:nn.Linear): return 3
    @patch(cls_method=True)
    def four(cls:nn.Linear): return 4
    @patch
    def locked(self:nn.Linear):
        with lock: return 5

    @dataclass(slots=True)
    class Result: loss:float
    class Refused(Exception):
        def __init__(self, code, what):
            super().__init__(f'{code} {what}')
            self.code = code

    def train():
        l = nn.Linear(1, 1)
        loss = torch.nn.functional.mse_loss(torch.zeros(1), torch.ones(1)).item()
        return Result(loss),Refused(7, 'late'),l.two(),l.three,l.four(),hasattr(l, 'locked')
    res,e,*rest = Accelerator(nprocs=2, compute_setup='cpu').distribute(train)()
    print(type(res) is Result, res.loss, type(e) is Refused, e.code, e, *rest)
"""

@pytest.mark.whole
@pytest.mark.launcher
def test_what_a_script_puts_on_libraries():
    "Methods by `patch`, functions in the place of torch's, those of an imported module; and what returns of classes that pickle refuses"
    Path('mine.py').write_text('from fastai.basics import *\n@patch\ndef two(self:nn.Linear): return 2\n')
    out,err = script(patching, PYTHONWARNINGS='default')
    test_eq(out.splitlines()[-1], 'True 0.5 True 7 7 late 2 3 4 False')
    test_eq(len(re.findall('You put torch.nn.modules.linear.Linear.locked on a library, which ranks do not have', err)), 1)

head,contexts = "Accelerator(nprocs=2, compute_setup='cpu').distribute(learn.fit)(3)","with learn.distrib_ctx(): learn.fit(3)"

def frames(err): return re.findall(r'File "([^"]*)", line \d+, in ([\w<>]+)', err)

@pytest.mark.whole
def test_a_script_that_its_data_workers_run_again_does_not_join_twice(warm):
    "Their copies of the script formed a second job beside that of the ranks"
    _,err = script("""
    import multiprocessing
    multiprocessing.set_start_method('spawn', force=True)
    from fastai.vision.all import *
    from fastdist import *
    data = [(torch.ones(3)*i, torch.ones(1)) for i in range(40)]
    learn = Learner(DataLoaders.from_dsets(data, data, bs=4, num_workers=1, device='cpu'), nn.Linear(3,1), loss_func=MSELossFlat())
    with learn.distrib_ctx(): learn.fit(1)
    """, *torchrun(), run=lambda *cmd, **kw: warm(*cmd[:-1], Path(cmd[-1]).resolve(), **kw), rc=1)
    assert 'You start processes from a script without a guard' in err and "below `if __name__=='__main__':`" in err
    assert 'bootstrapping' not in err, err

@pytest.mark.whole
@pytest.mark.launcher
def test_the_head_shows_the_error_of_a_rank_once():
    _,err = script(broken+head, rc=1)
    assert [err.count(o) for o in ('ValueError:', 'no such thing\n', "KeyError: 'lost'", 'direct cause', 'rank 1 failed:')]==[1,1,1,1,1], err
    assert 'ends because' not in err and "raise ValueError('no such thing') from e" in err and 'of libraries' in err
    test_eq(frames(err)[-1][1], 'after_batch')
    test_eq(sum('script.py' in o for o,_ in frames(err)), 3)
    assert len(err.splitlines())<25 and len(frames(err))<6

@pytest.mark.parametrize('how,files', [('',['test_launch_user.py']*2), ('full',['fork.py','parent.py','accelerator.py','accelerator.py','test_launch_user.py','foundation.py'])])
def test_every_frame_is_shown_to_who_asks(monkeypatch, how, files):
    monkeypatch.setenv('FASTDIST_TRACEBACK', how)
    try: cpu(nprocs=2).distribute(lambda: L(1).map(lambda o: 1/0), start='fork')()
    except RankError as e: test_eq([Path(o).name for o,_ in frames(e.msg)][:6 if how else None], files)
    else: assert False

@pytest.mark.whole
def test_under_torchrun_the_user_s_frames_are_found_at_a_glance(warm):
    _,err = script(broken+contexts, *torchrun(n=3), run=warm, rc=1)
    ours = [o for o in err.splitlines() if o.startswith('[rank')]
    mine = [o for o in ours if o.startswith('[rank1]')]
    assert frames('\n'.join(mine))[-1][1]=='after_batch' and len(frames('\n'.join(mine)))==3 and len(mine)<20
    assert err.count('no such thing\n')==1 and 'Exception ignored' not in err
    line = r'\[rank(\d)\]: fastdist: rank \1 ends because rank 1 failed, which shows its traceback itself'
    assert all(re.fullmatch(line, o) for o in ours if o not in mine and len(o)>9)

@pytest.mark.parametrize('code,every,want', [(3,True,3), ('a reason',False,'a reason'), (None,True,None), (3,False,3)])
@pytest.mark.by_default('3-True', '3-False')
def test_a_rank_that_ends_the_program_ends_the_head(code, every, want):
    def f():
        if every or this_world().rank==1: sys.exit(code)
    with pytest.raises(SystemExit) as e: cpu(nprocs=2).distribute(f, start='fork')()
    test_eq(e.value.code, want)

def test_one_rank_that_leaves_with_success_is_an_error():
    def f(): this_world().rank or sys.exit(0)
    with expect_fail(RankError, 'SystemExit: 0'): cpu(nprocs=2).distribute(f, start='fork')()

def test_what_a_rank_said_before_it_died():
    def f():
        if this_world().rank==1:
            print('out of luck', file=sys.stderr)
            os._exit(7)
    with expect_fail(RankError, 'with exit code 7\nThe end of its stderr:\nout of luck'): cpu(nprocs=2).distribute(f, start='fork')()

@pytest.mark.whole
def test_notes_groups_and_long_recursions_are_kept():
    def f(how):
        if how=='recursion': return f(how)
        e = ExceptionGroup('many', [KeyError('b')]) if how=='group' else ValueError('x')
        e.add_note('a note')
        raise e
    of_3_11 = dict(group="KeyError: 'b'", note='ValueError: x\na note') if sys.version_info>=(3,11) else {} # before, Python has neither
    for how,want in (dict(recursion='Previous line repeated') | of_3_11).items():
        try: cpu(nprocs=2).distribute(f, start='fork')(how)
        except RankError as e: assert want in str(e), str(e)

@pytest.mark.whole
@pytest.mark.launcher
def test_importing_leaves_garbage_collection_as_it_is():
    code = "import gc,sys; sys.modules['scipy.optimize'] = None\ntry: import fastdist\nexcept ImportError: print(gc.isenabled())"
    test_eq(run(sys.executable, '-c', code)[0], 'True\n')

imports = """
    import os,sys
    from accelerate import notebook_launcher
    from fastdist import *
    from fastai.basics import *
    from fastai.test_utils import synth_learner

    def fit(rank=None):
        had,learn = set(sys.modules),synth_learner()
        with learn.no_bar(), learn.distrib_ctx(): learn.fit(1)
        if this_world().rank==0: print('anew:', *sorted(set(sys.modules)-had), flush=True)

    assert 'torch._dynamo' not in sys.modules, 'a script that starts no ranks imports it'
    heads = lambda: on_ranks(fit), Accelerator(nprocs=2, compute_setup='cpu').distribute(fit, start='fork'), lambda: notebook_launcher(fit, num_processes=2, use_port=sys.argv[1])
    for head in heads:
        if not os.fork():
            head()
            sys.stdout.flush()
            os._exit(0)
        assert os.wait()[1]==0
"""

@pytest.mark.launcher
@pytest.mark.whole
def test_ranks_find_imported_what_they_need():
    "Also where the script has nothing to do with images, which import most of torch"
    out,_ = script(imports, sys.executable, run=lambda *cmd: run(*cmd, free_port()))
    anew = [set(o.split()) for o in re.findall('^anew: (.*)', out, re.M)]
    assert len(anew)==3 and all(len(o)<30 and 'torch._dynamo' not in o for o in anew), anew

# What is set on the Accelerator

def asked(acc): return acc.gradient_accumulation_steps,acc.dataloader_config.even_batches

@pytest.mark.parametrize('n', [1,2,3])
def test_attributes_reach_accelerate_s_object_from_the_head(n):
    acc = cpu(nprocs=n)
    acc.gradient_accumulation_steps = 4
    acc.dataloader_config = DataLoaderConfiguration(even_batches=False)
    test_eq(acc.gradient_accumulation_steps, 4)
    test_eq(acc.distribute(asked, all_ranks=True, start='fork')(acc), [(4,False)]*n)
    acc.finalize()

def test_attributes_reach_accelerate_s_object_in_a_rank():
    def f():
        acc = cpu()
        acc.gradient_accumulation_steps = 4
        acc.prepare(nn.Linear(1,1))
        acc.even_batches = False
        first,acc.gradient_accumulation_steps = asked(acc),2
        return first,asked(acc),asked(acc.live)
    test_eq(cpu(nprocs=2).distribute(f, start='fork')(), ((4,False),(2,False),(2,False)))

def test_attributes_that_nobody_has():
    for acc in (cpu(nprocs=2), cpu()):
        with expect_fail(AttributeError, 'You set gradient_acumulation_steps'): acc.gradient_acumulation_steps = 4
        with expect_fail(AttributeError, 'device'): acc.device = 'cuda'
        with expect_fail(OptionError, 'at least 1'): acc.gradient_accumulation_steps = 0
        with expect_fail(AttributeError, 'mixed_precision'): acc.mixed_precision = 'bf16'

class Steps(Callback):
    def before_fit(self): self.n = 0
    def after_step(self): self.n += 1

def test_a_learner_accumulates_as_was_set():
    learn = digits(n=100, bs=4, cbs=Steps())
    acc = cpu(nprocs=2, gradient_accumulation_plugin=GradientAccumulationPlugin(2))
    acc.gradient_accumulation_steps = 5
    acc.distribute(learn.fit, start='fork')(1)
    test_eq(learn.steps.n, 2)

for_loops = [dict(kwargs_handlers=[ProfileKwargs()]), dict(gradient_accumulation_plugin=GradientAccumulationPlugin(2, sync_with_dataloader=False)),
    dict(gradient_accumulation_plugin=GradientAccumulationPlugin(2, adjust_scheduler=False)), dict(step_scheduler_with_optimizer=False),
    dict(dataloader_config=DataLoaderConfiguration(even_batches=False)), dict(rng_types=['torch']), dict(device_placement=False)]

@pytest.mark.parametrize('opts', for_loops, ids=lambda o: first(o))
@pytest.mark.by_default('kwargs_handlers', 'gradient_accumulation_plugin0', 'step_scheduler_with_optimizer')
def test_a_loop_may_have_what_a_learner_cannot(opts):
    def f(acc):
        m = acc.prepare(nn.Linear(1,1))
        return acc.profile_handler is not None,acc.gradient_state.sync_with_dataloader,acc.step_scheduler_with_optimizer
    acc,plugin = cpu(nprocs=2, **opts),opts.get('gradient_accumulation_plugin')
    want = 'kwargs_handlers' in opts,not plugin or plugin.sync_with_dataloader,'step_scheduler_with_optimizer' not in opts
    test_eq(acc.distribute(f, start='fork')(acc), want)
    with expect_fail(OptionError, 'does not honour'): acc.distribute(digits().fit, start='fork')(1)

def test_a_learner_s_group_waits_as_long_as_was_asked():
    learn = digits(n=40, cbs=Steps())
    cpu(nprocs=2, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=50))]).distribute(learn.fit, start='fork')(1)
    test_eq(learn.steps.n, 1)

# A model that has grown is named

class Grow(Callback):
    "Changes the model before the second epoch, as `how` says"
    def __init__(self, how): self.how = how
    def after_epoch(self):
        if self.epoch!=0: return
        getattr(self, self.how)()
    def layer(self):
        self.model.add_module('extra', nn.Linear(10,10))
        self.learn.create_opt()
    def wider(self):
        m = self.model
        m[0],m[1],m[3] = nn.Linear(64,40),nn.BatchNorm1d(40),nn.Linear(40,10)
        self.learn.create_opt()
    def attribute(self): self.model[0].seen,self.model.note = [1,torch.ones(2)],'trained'
    def replaced(self):
        self.learn.model = nn.Sequential(nn.Linear(64,5), nn.Linear(5,10))
        self.learn.create_opt()

def grows(how):
    set_seed(1)
    return digits(n=101, bs=4, cbs=Grow(how))

def test_attributes_of_modules_come_home():
    learn = grows('attribute')
    model,first_layer = learn.model,learn.model[0].weight
    cpu(nprocs=2).distribute(learn.fit, start='fork')(1, 0.01)
    assert learn.model is model and model[0].weight is first_layer
    test_eq((model[0].seen[0],model[0].seen[1],model.note), (1,torch.ones(2),'trained'))

@pytest.mark.parametrize('how,key,shape', [('layer','extra.weight',(10,10)), ('wider','0.weight',(40,64)), ('replaced','1.weight',(10,5))])
@pytest.mark.by_default('layer', 'replaced')
def test_a_model_that_has_grown_comes_home(how, key, shape):
    learn = grows(how)
    model = learn.model
    cpu(nprocs=2).distribute(learn.fit, start='fork')(2, 0.01)
    test_eq((learn.model is model,learn.model.state_dict()[key].shape,len(learn.recorder.values)), (how!='replaced',shape,2))
    assert {id(p) for ps in learn.opt.param_lists for p in ps} <= set(map(id, learn.model.parameters()))
    was = learn.model.state_dict()[key].clone()
    learn.fit(1, 0.01)
    assert how=='layer' or not torch.equal(learn.model.state_dict()[key], was)

class Registers(Module):
    "Registers buffers in its first forward pass, and makes one longer"
    def __init__(self):
        self.layer = nn.Linear(64,10)
        self.register_buffer('seen', torch.zeros(0))
    def forward(self, x):
        if len(self.seen)<3: self.seen = torch.cat([self.seen, torch.ones(1)])
        if not hasattr(self, 'table'): self.register_buffer('table', torch.full((10,), 2.), persistent=False)
        return self.layer(x)*self.table

def test_buffers_that_a_forward_pass_registers_come_home():
    learn = digits(n=101, bs=4)
    learn.model = nn.Sequential(Registers())
    cpu(nprocs=2).distribute(learn.fit, start='fork')(1, 0.01)
    test_eq((learn.model[0].seen.tolist(), learn.model[0].table.tolist(), [*learn.model.state_dict()]), ([1.]*3, [2.]*10, ['0.seen','0.layer.weight','0.layer.bias']))
    learn.fit(1)

@dataclass
class Best: loss:float = math.inf

class Keeps(Callback):
    "Keeps values of all kinds, and parts of its Learner"
    def __init__(self): self.n,self.last,self.best,self.seen = 0,deque(maxlen=3),Best(),[]
    def after_batch(self):
        if not self.training: return
        self.n += 1
        self.last.append(self.n)
        self.best.loss = min(self.best.loss, self.loss.item())
        self.seen.append(self.iter)
    def after_fit(self): self.table,self.of = pd.DataFrame(dict(seen=self.seen)),dict(model=self.model)

def with_argument(acc, learn, cb): return acc.distribute(learn.fit, start='fork')(1, cbs=cb)
def in_a_variable(acc, learn, cb):
    def f():
        with learn.distrib_ctx(): learn.fit(1, cbs=[cb])
    return acc.distribute(f, start='fork')()
def on_the_learner(acc, learn, cb): return acc.distribute(learn.add_cb(cb).fit, start='fork')(1)

@pytest.mark.parametrize('n', [2,3])
@pytest.mark.parametrize('how', [with_argument,in_a_variable,on_the_learner])
@pytest.mark.by_default('in_a_variable', 'on_the_learner')
def test_what_a_callback_keeps_comes_home(how, n):
    "Wherever the function has it from; what belongs to the Learner is the Learner's"
    cb,learn = Keeps(),digits()
    first = learn.model[0]
    with learn.no_bar(), learn.no_logging(): how(cpu(nprocs=n), learn, cb)
    steps = len(learn.recorder.losses)
    test_eq((cb.n, list(cb.last), cb.last.maxlen, cb.seen, len(cb.table)), (steps, list(range(steps-2, steps+1)), 3, list(range(steps)), steps))
    assert isinstance(cb.best, Best) and cb.best.loss<math.inf and cb.of['model'] is learn.model and learn.model[0] is first
