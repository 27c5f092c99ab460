"One Accelerator: what a loop of one's own needs on each rank, and ranks that a head starts, watches and gets things back from"
import os,pytest,re,signal,subprocess,sys,threading,time
from itertools import chain
from pathlib import Path
from accelerate import Accelerator as HFAccelerator,notebook_launcher
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader as TorchLoader,DistributedSampler
from torch import distributed as dist
from fastai.basics import *
from fastai.callback.all import *
from fastcore.test import test_eq,test_close,expect_fail
from fastdist import *
from fastdist.launch.options import has_state
from learners import digits
from procs import *

pytestmark = pytest.mark.timeout(300)
cpu = partial(Accelerator, compute_setup='cpu')
forked = dict(start='fork')

def on(n, f): return [f(0)] if n==1 else on_ranks(f, n, join=False)

# In each rank

@pytest.mark.parametrize('n', [1,3])
def test_where_a_rank_stands(n):
    def f(rank):
        acc = cpu()
        names = 'rank local_rank process_index world_size num_processes node_rank num_nodes is_main_process device backend'
        res = *[getattr(acc, k) for k in names.split()],
        assert acc.node_name
        acc.finalize()
        assert not has_state() and not dist.is_initialized()
        return res
    test_eq(on(n, f), [(r,r,r,n,n,0,1,r==0,torch.device('cpu'),'gloo') for r in range(n)])

def seen(dl): return [torch.cat([b[0] if isinstance(b, (tuple,list)) else b for b in dl]).int().tolist() for _ in range(2)]

@pytest.mark.parametrize('n', [2,3,pytest.param(1, marks=pytest.mark.whole)])
@pytest.mark.parametrize('kind', ['torch','fastai'])
def test_loaders_are_shared_out_and_shuffled_anew(n, kind):
    def f(rank):
        set_seed(1)
        acc,data = cpu(),torch.arange(37)
        dl = TorchLoader(data, 4, shuffle=True) if kind=='torch' else DataLoader(data, bs=4, shuffle=True)
        res = acc.prepare(dict(a=dl, b=TorchLoader(data, 3)))
        out = seen(res['a']),seen(res['b'])[0],len(res['a'])
        acc.finalize()
        return out
    a,b,lens = zip(*on(n, f))
    for epoch in zip(*a):
        test_eq(set(chain(*epoch)), set(range(37)))
        test_eq(len({len(o) for o in epoch}), 1)
    assert all(x!=y for x,y in a) and len(set(lens))==1
    test_eq(set(chain(*b)), set(range(37)))

@pytest.mark.parametrize('n', [1,2,pytest.param(4, marks=pytest.mark.whole)])
def test_prepare_keeps_order_and_trains_as_one(n):
    "A loop of plain PyTorch on `n` ranks with batches of 8/n, against the same loop by hand"
    xs = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    def model(): return torch.manual_seed(1) and nn.Linear(3,1)
    def f(rank):
        acc,m = cpu(),model()
        opt = torch.optim.SGD(m.parameters(), 0.1)
        m,none,opt,dl,sched,text = acc.prepare(m, None, opt, TorchLoader(xs, 8//n), LambdaLR(opt, lambda i: 1.), 'x')
        for x in dl:
            opt.zero_grad()
            acc.backward(m(x).square().mean())
            opt.step()
            sched.step()
        res = acc.unwrap_model(m).weight.tolist(),none,text,type(m).__name__
        acc.finalize()
        return res
    m = model()
    opt = torch.optim.SGD(m.parameters(), 0.1)
    for x in xs.split(8):
        opt.zero_grad()
        m(x).square().mean().backward()
        opt.step()
    for w,none,text,name in on(n, f):
        test_close(np.array(w), m.weight.detach().numpy(), 1e-5)
        test_eq((none,text,name), (None,'x','Linear' if n==1 else 'DistributedDataParallel'))

@pytest.mark.parametrize('n', [1,3])
def test_reduce_and_broadcast(n):
    def f(rank):
        acc,d = cpu(),dict(b=rank+1, a=torch.tensor([1.,rank]))
        res = [acc.all_reduce_dict(d, op) for op in ('mean','avg','sum','max','min')]
        with expect_fail(OptionError, "'mean'"): acc.all_reduce_dict(d, 'median')
        test_eq(d['b'], rank+1)
        res = [(o['b'],o['a'].tolist()) for o in res]+[acc.broadcast([rank], src=n-1)]
        acc.finalize()
        return res
    rs = range(n)
    mean,total,high,low = sum(rs)/n,sum(rs),n-1,0
    want = [(mean+1,[1,mean])]*2+[(total+n,[n,total]),(high+1,[1,high]),(low+1,[1,low]),[n-1]]
    for res in on(n, f): test_eq(res, want)

def test_one_collective_for_a_dict():
    def f(rank):
        acc,calls = cpu(),[]
        acc.setup_process()
        real = dist.all_reduce
        dist.all_reduce = lambda *a, **k: calls.append(1) or real(*a, **k)
        acc.all_reduce_dict({str(i):i for i in range(50)})
        return len(calls)
    test_eq(on(2, f), [1,1])

def test_precision():
    for dtype,data in ((torch.float64,torch.float64), (torch.complex64,torch.float32), (torch.complex128,torch.float64), (torch.bfloat16,torch.bfloat16)):
        acc = cpu(dtype=dtype)
        b = acc.prepare_batch(dict(x=torch.ones(2), y=[torch.arange(2),(torch.ones(1),)], z=None, s='text'))
        test_eq((b['x'].dtype, b['y'][0].dtype, b['y'][1][0].dtype, b['z'], b['s']), (data,torch.int64,data,None,'text'))
        test_eq(acc.prepare(nn.Linear(1,1)).weight.dtype, dtype)
        acc.finalize()

@pytest.mark.parametrize('mode', ['no','bf16'])
def test_mixed_precision_of_the_launcher(mode):
    def f(rank):
        os.environ['ACCELERATE_MIXED_PRECISION'] = mode
        acc = cpu()
        m = acc.prepare(nn.Linear(2,2))
        with acc.autocast(): res = acc.mixed_precision,torch.mm(torch.ones(2,2), torch.ones(2,2)).dtype
        return res
    test_eq(on(2, f), [(mode,torch.bfloat16 if mode=='bf16' else torch.float32)]*2)

def test_a_sampler_that_shards_already():
    dl = TorchLoader(torch.arange(8), 2, sampler=DistributedSampler(range(8), 2, 0))
    with expect_fail(ValueError, 'shared out twice'): cpu().prepare(dl)

@pytest.mark.parametrize('kw,msg', [(dict(nprocs='2'), 'nprocs'), (dict(compute_setup='gpu'), 'no GPU'), (dict(log_setup='gpu'), "'auto', 'cpu'"), (dict(backend='nccl'), 'gloo'),
    (dict(backend='carrier pigeon'), 'gloo'), (dict(dtype='float32'), 'dtype'), (dict(fsdp_plugin=1), 'fsdp_plugin'), (dict(presicion=1), 'mixed_precision')])
def test_bad_options(kw, msg):
    if torch.cuda.is_available(): return
    with expect_fail((OptionError,TypeError), msg): Accelerator(**kw)
    assert not has_state()

@pytest.mark.parametrize('n', [1,3])
def test_evaluation_counts_each_sample_once(n):
    def f(rank):
        acc = cpu()
        dl = acc.prepare(TorchLoader(torch.arange(37), 4))
        res = torch.cat([acc.gather_for_metrics(x) for x in dl]).tolist()
        acc.finalize()
        return res
    for res in on(n, f): test_eq(sorted(res), list(range(37)))

@pytest.mark.parametrize('n', [1,3])
def test_what_accelerate_answers(n):
    def f(rank):
        acc = cpu()
        m = nn.Linear(2,1)
        m,opt = acc.prepare(m, torch.optim.SGD(m.parameters(), 0.1))
        t = torch.ones(rank+1)
        res = acc.gather(t[:1]).tolist(),acc.reduce(t[:1], 'sum').item(),len(acc.pad_across_processes(t))
        with acc.main_process_first(): x = torch.ones(1,2)
        with acc.accumulate(m): acc.backward(m(x).sum())
        acc.clip_grad_norm_(m.parameters(), 1e-3)
        opt.step()
        acc.wait_for_everyone()
        acc.save_state('state')
        acc.wait_for_everyone()
        w = acc.unwrap_model(m).weight.detach().clone()
        with torch.no_grad(): acc.unwrap_model(m).bias.add_(1)
        acc.load_state('state')
        acc.save_model(m, 'model')
        test_eq((acc.unwrap_model(m).weight, acc.is_main_process, acc.is_last_process, acc.sync_gradients), (w, rank==0, rank==n-1, True))
        acc.end_training()
        assert not has_state() and not dist.is_initialized()
        return res
    test_eq(on(n, f), [([1.]*n,float(n),n)]*n)
    assert Path('model/model.safetensors').exists()

def by_hand(rank, port, path):
    os.environ['MASTER_PORT'] = str(port)
    acc = cpu(nprocs=2)
    acc.setup_process(rank)
    res = acc.broadcast(f'from {rank}', src=1),acc.rank,acc.world_size,len(acc.prepare(TorchLoader(torch.arange(8), 2)))
    at = ('127.0.0.1',port) in listeners(),('0.0.0.0',port) in listeners(),('::',port) in listeners()
    acc.finalize()
    acc.finalize()
    Path(path, str(rank)).write_text(f'{res} {at} {"RANK" in os.environ} {has_state()} {dist.is_initialized()}')

def test_processes_that_somebody_else_starts(tmp_path):
    torch.multiprocessing.start_processes(by_hand, (free_port(), str(tmp_path)), 2, start_method='fork')
    test_eq([(tmp_path/str(i)).read_text() for i in range(2)], [f"('from 1', {i}, 2, 2) ({i==0}, False, False) False False False" for i in range(2)])

# Interplay

def test_a_user_s_own_accelerate_object_is_adopted():
    def f(rank):
        theirs = HFAccelerator(cpu=True)
        acc = cpu()
        test_eq((acc.num_processes, acc.process_index, acc.state is not None), (2,rank,True))
        acc.finalize()
        theirs.wait_for_everyone() # or rank 0's store goes while another still connects
        return theirs.num_processes,has_state(),dist.is_initialized()
    test_eq(on(2, f), [(2,True,True)]*2)

def test_several_one_after_another():
    def f(rank):
        res = []
        for kw in (dict(), dict(mixed_precision='bf16'), dict(gradient_accumulation_steps=3)):
            acc = cpu(**kw)
            m = acc.prepare(nn.Linear(1,1))
            res.append((acc.mixed_precision,acc.gradient_accumulation_steps,type(m).__name__,acc.broadcast(rank)))
            acc.finalize()
        return res
    test_eq(on(2, f), [[('no',1,'DistributedDataParallel',0),('bf16',1,'DistributedDataParallel',0),('no',3,'DistributedDataParallel',0)]]*2)

def in_notebook_launcher(path):
    acc = cpu(nprocs=4)
    res = acc.distribute(lambda: (acc.rank,acc.world_size))()
    Path(path,str(this_world().rank)).write_text(f'{acc.execution_type} {acc.nprocs} {res}')

def test_in_a_function_that_notebook_launcher_started(tmp_path):
    notebook_launcher(in_notebook_launcher, (str(tmp_path),), num_processes=2, use_port=str(free_port()))
    test_eq([(tmp_path/str(i)).read_text() for i in range(2)], ['torchrun 1 (0, 2)']*2)

# From the head

def test_closures_lambdas_and_all_ranks():
    y = 10
    acc = cpu(nprocs=3)
    test_eq(acc.distribute(lambda x: x+y+acc.rank, **forked)(1), 11)
    test_eq(acc.distribute(lambda x: x+y+acc.rank, all_ranks=True, **forked)(1), [11,12,13])
    test_eq((acc.rank, has_state(), dist.is_initialized(), 'RANK' in os.environ), (0,False,False,False))

def test_ranks_of_this_node_listen_on_the_loopback_interface():
    def look():
        cpu().broadcast(0)
        return {at for at,_ in listeners()},listeners(os.getppid())
    test_eq(cpu(nprocs=2).distribute(look, all_ranks=True, **forked)(), [({'127.0.0.1'},listeners())]*2)

@pytest.mark.whole
def test_data_workers_of_ranks():
    def f():
        acc = cpu()
        return torch.cat(list(acc.prepare(TorchLoader(torch.arange(16), 2, num_workers=1)))).tolist()
    a,b = cpu(nprocs=2).distribute(f, all_ranks=True)()
    test_eq(sorted(a+b), list(range(16)))

def test_it_runs_in_place_where_ranks_exist():
    def f(rank): return cpu(nprocs=4).distribute(lambda: this_world().rank)(),cpu(nprocs=4).distribute(lambda: rank, all_ranks=True)()
    test_eq(on_ranks(f, 3, join=False), [(0,[0,1,2])]*3)

def test_what_rank_0_returns_must_travel():
    def f(rank):
        with expect_fail(TypeError, 'pickle'): cpu(nprocs=4).distribute(threading.Lock)()
    on_ranks(f, join=False)
    with expect_fail(TypeError, 'pickle'): cpu(nprocs=2).distribute(threading.Lock, **forked)()

class Lines:
    def __init__(self): self.s = ''
    def write(self, s): self.s += s
    def flush(self): pass

@pytest.mark.parametrize('show_all', [False,True])
@pytest.mark.by_default('True')
def test_what_ranks_print(monkeypatch, show_all):
    out = Lines()
    monkeypatch.setattr(sys, 'stdout', out)
    def say(): print('line\n10%', end='\r'), print('rank', this_world().rank, end='')
    cpu(nprocs=2).distribute(say, show_all=show_all, **forked)()
    s = re.sub(r'(\[rank\d\] )?\[Gloo\].*\n', '', out.s) # of torch 2.10
    if not show_all: test_eq(s, 'line\n10%\rrank 0')
    else: test_eq(sorted(s.splitlines(True)), sorted(f'[rank{r}] {o}' for r in range(2) for o in ('line\n','10%\r',f'rank {r}\n')))

def fit(learn, *a, **kw):
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(*a, **kw)

def learner(bs, **kw):
    set_seed(1)
    return digits(n=101, bs=bs, opt_func=partial(SGD, mom=0.9), **kw)

@pytest.mark.parametrize('n', [1,2,pytest.param(4, marks=pytest.mark.whole)])
@pytest.mark.by_default('2')
def test_the_learner_comes_home(n):
    "Twice, and each time as it would be after one process"
    learn,one = learner(8//n),learner(8)
    model,opt,rec = learn.model,learn.create_opt() or learn.opt,learn.recorder
    runs = []
    for o,f in ((learn,cpu(nprocs=n).distribute(learn.fit_one_cycle, **forked)), (one,one.fit_one_cycle)):
        set_seed(2)
        with o.no_bar(), o.no_logging(): runs.append((f(2, 0.02),f(1, 0.01)))
    test_is = lambda a,b: a is b
    assert runs[0][1]==(model,opt) and learn.model is model and learn.opt is opt and learn.recorder is rec
    for a,b in zip(learn.model.state_dict().values(), one.model.state_dict().values()): test_close(a, b, 1e-5)
    test_close(np.array([o for o in learn.recorder.values]), np.array([o for o in one.recorder.values]), 1e-5)
    test_close(np.array(learn.recorder.losses), np.array(one.recorder.losses), 1e-5)
    test_eq((learn.recorder.lrs,learn.epoch,learn.train_iter), (one.recorder.lrs,one.epoch,one.train_iter))
    rec.plot_loss()
    test_eq([len(o) for o in learn.get_preds()], [len(o) for o in one.get_preds()])

def test_its_callbacks_and_frozen_layers_come_home():
    learn = learner(4, cbs=[SaveModelCallback(monitor='accuracy', fname='best'),CSVLogger()], splitter=lambda m: [params(m[:2]),params(m[2:])])
    learn.freeze()
    cpu(nprocs=2).distribute(learn.fit, **forked)(2, 0.02)
    assert learn.save_model.best==max(o[2] for o in learn.recorder.values) and Path('models/best.pth').exists() and len(Path('history.csv').read_text().splitlines())==3
    test_eq([p.requires_grad for p in learn.model.parameters()], [False,False,True,True,True,True])
    test_eq(learn.opt.frozen_idx, 1)
    learn.unfreeze()
    fit(learn, 1)

def test_what_a_method_of_a_learner_returns():
    learn = learner(4)
    preds,targs = cpu(nprocs=2).distribute(learn.get_preds, **forked)()
    want,_ = learn.get_preds()
    test_close(preds, want, 1e-5)

class Trainer:
    "A user's own"
    def __init__(self, acc):
        torch.manual_seed(1)
        self.acc,self.model = acc,nn.Linear(2,1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.1)
    def train(self, n):
        self.model,self.optimizer = self.acc.prepare(self.model, self.optimizer)
        for _ in range(n):
            self.optimizer.zero_grad()
            self.acc.backward(self.model(torch.ones(4,2)*(self.acc.rank+1)).square().mean())
            self.optimizer.step()

@pytest.mark.parametrize('n', [1,2])
@pytest.mark.by_default('2')
def test_an_object_with_model_and_optimizer(n):
    acc = cpu(nprocs=n)
    o = Trainer(acc)
    model,opt = o.model,o.optimizer
    before = deepcopy(model.state_dict())
    res = acc.distribute(o.train, **forked)(3)
    acc.finalize()
    assert not torch.equal(model.weight, before['weight']) and len(opt.state_dict()['state'])==2
    assert isinstance(res[0], nn.Linear) and acc.is_class_method(o.train, ()) and acc.is_class_method(Trainer.train, (o,))
    test_eq(opt.state_dict()['state'][0]['step'].item(), 3)

class Owner:
    "A user's own, with a Learner somewhere"
    def __init__(self, learn): self.learns = [dict(a=learn)]
    def run(self, n):
        with self.learns[0]['a'].distrib_ctx(): fit(self.learns[0]['a'], n)

def ways(learn):
    "Functions of a number of epochs that have `learn` in a variable, in an object, as an argument or as a default"
    def closure(n):
        with learn.distrib_ctx(): fit(learn, n)
    def default(n, o=dict(a=learn)):
        with o['a'].distrib_ctx(): fit(o['a'], n)
    def argument(o, n):
        with o.distrib_ctx(): fit(o, n)
    return dict(closure=closure, object=Owner(learn).run, default=default, argument=partial(argument, learn))

@pytest.mark.parametrize('n', [2,3])
@pytest.mark.parametrize('start', ['distribute','on_ranks'])
def test_a_learner_that_a_function_returns_has_all_of_its_training(start, n):
    def f(rank=0):
        set_seed(2)
        learn = learner(12//(n if this_world().size>1 else 1))
        with learn.distrib_ctx(): fit(learn, 2)
        return learn
    res = cpu(nprocs=n).distribute(f, **forked)() if start=='distribute' else on_ranks(f, n, join=False)[n-1]
    one = f()
    for k in 'values','lrs','iters','losses': test_close(getattr(res.recorder, k), getattr(one.recorder, k), 1e-5)
    test_close([*res.model.state_dict().values()], [*one.model.state_dict().values()], 1e-5)
    fit(res, 1)

@pytest.mark.parametrize('way,n', [('closure',2), ('object',3), ('default',2), ('argument',3)])
@pytest.mark.by_default('closure', 'argument')
def test_a_learner_that_a_function_has_comes_home(way, n):
    learn,one = learner(4),learner(4*n)
    model,opt = learn.model,learn.create_opt() or learn.opt
    for o,f in ((learn,cpu(nprocs=n).distribute(ways(learn)[way], **forked)), (one,partial(fit, one))):
        set_seed(2)
        assert f(2) is None
    assert learn.model is model and learn.opt is opt and len(learn.recorder.values)==2
    for a,b in zip(learn.model.state_dict().values(), one.model.state_dict().values()): test_close(a, b, 1e-5)

@pytest.mark.whole
def test_two_learners_and_an_object_come_home_from_one_function():
    a,b,acc = learner(4),learner(4),cpu(nprocs=2)
    o = Trainer(acc)
    def f(k):
        for l in (a,b):
            with l.distrib_ctx(): fit(l, 1)
        return o.train(3)
    was = o.model.weight.clone()
    acc.distribute(f, **forked)(1)
    acc.finalize()
    assert len(a.recorder.values)==len(b.recorder.values)==1 and not torch.equal(o.model.weight, was)

def test_a_model_that_has_grown_comes_home_with_another():
    a,b = learner(4),learner(4)
    was = a.model.state_dict()['0.weight'].clone()
    def f():
        with a.distrib_ctx(): fit(a, 1)
        b.model.more = nn.Linear(2,2)
        return b.model.more
    model = b.model
    more = cpu(nprocs=2).distribute(f, **forked)()
    assert b.model is model and model.more is more and not torch.equal(a.model.state_dict()['0.weight'], was)

class Kind(Callback):
    "The type of a parameter within a step"
    def after_backward(self): self.kind = type(self.model[0].weight).__name__

@pytest.mark.parametrize('n', [pytest.param(2, marks=pytest.mark.whole),3])
def test_a_distributed_learner_in_shards(n):
    learn,one = learner(4, cbs=Kind()),learner(4*n)
    acc = cpu(nprocs=n, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    for o,f in ((learn,acc.distribute(learn.fit_one_cycle, **forked)), (one,one.fit_one_cycle)):
        set_seed(2)
        with o.no_bar(), o.no_logging(): f(2, 0.02)
    test_eq((learn.kind.kind, type(learn.model[0].weight)), ('DTensor',nn.Parameter))
    for a,b in zip(learn.model.state_dict().values(), one.model.state_dict().values()): test_close(a, b, 1e-5)

def test_a_distributed_learner_in_shards_where_ranks_exist():
    def f(rank):
        learn = learner(4, cbs=Kind())
        acc = cpu(nprocs=2, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
        with learn.no_bar(), learn.no_logging(): acc.distribute(learn.fit)(1)
        return learn.kind.kind,type(learn.model[0].weight).__name__
    test_eq(on_ranks(f, 2, join=False), [('DTensor','Parameter')]*2)

def test_what_cannot_be_sent_is_named_by_its_path():
    learn = learner(4)
    learn.db = Owner(None)
    learn.db.conn = threading.Lock()
    with expect_fail(TypeError, 'learn.db.conn, a lock, cannot be sent to another process'): cpu(nprocs=2).distribute(learn.fit)(1)
    with expect_fail(TypeError, "What your function returned['a'][0], a lock,"): cpu(nprocs=2).distribute(lambda: dict(a=[threading.Lock()]), **forked)()
    learn = learner(4)
    def f():
        with learn.distrib_ctx(): fit(learn, 1)
        return dict(a=threading.Lock())
    with expect_fail(TypeError, "What your function returned['a'], a lock,"): cpu(nprocs=2).distribute(f, **forked)()
    test_eq(len(learn.recorder.values), 1)

@pytest.mark.whole
def test_options_reach_the_learner():
    learn = learner(4, cbs=Spy())
    cpu(nprocs=2, gradient_accumulation_steps=5, mixed_precision='bf16').distribute(learn.fit, **forked)(1)
    test_eq((learn.spy.steps,learn.spy.dtype), (2,'torch.bfloat16'))
    learn = learner(4)
    cpu(nprocs=2, dtype=torch.float64).distribute(learn.fit, **forked)(1)
    test_eq(learn.model[0].weight.dtype, torch.float64)

class Spy(Callback):
    "Steps of the optimizer, and the precision of what the model gives"
    order = 5
    def before_fit(self): self.steps = 0
    def after_pred(self): self.dtype = str(self.pred.dtype) if self.training else self.dtype
    def after_step(self): self.steps += 1

# When it goes wrong

@pytest.mark.parametrize('who', [0,1])
@pytest.mark.parametrize('how', ['error','kill','exit'])
def test_an_error_is_the_heads_within_seconds(who, how):
    def f():
        acc = cpu()
        acc.setup_process()
        Path(f'{acc.rank}.pid').write_text(str(os.getpid()))
        dist.barrier()
        if acc.rank==who and how=='kill': os.kill(os.getpid(), signal.SIGKILL)
        if acc.rank==who and how=='exit': os._exit(3)
        if acc.rank==who: raise KeyError('lost')
        dist.barrier()
    msg = dict(error="KeyError: 'lost'", kill='killed by SIGKILL', exit='exit code 3')[how]
    with expect_fail(RankError, f'rank {who} failed'):
        try: cpu(nprocs=2).distribute(f, **forked)()
        except RankError as e:
            assert msg in str(e)
            raise
    assert not any(alive(int(Path(f'{r}.pid').read_text())) for r in range(2))

script = """
import os,sys,time,torch
from pathlib import Path
from fastdist import Accelerator
def f():
    acc.setup_process()
    Path(sys.argv[1], str(os.getpid())).touch()
    time.sleep(600)
acc = Accelerator(nprocs=2, compute_setup='cpu')
acc.distribute(f)()
"""

@pytest.mark.launcher
@pytest.mark.parametrize('sig', [signal.SIGKILL,pytest.param(signal.SIGINT, marks=pytest.mark.whole)])
def test_ranks_end_with_the_head(tmp_path, sig):
    "And while they run, none of their sockets can be reached from another machine"
    p = subprocess.Popen([sys.executable, '-c', script, str(tmp_path)], stderr=subprocess.PIPE, text=True)
    try:
        await_that(lambda: len(list(tmp_path.glob('[0-9]*')))==2 or p.poll() is not None)
        pids = [int(o.name) for o in tmp_path.glob('[0-9]*')]
        assert p.poll() is None
        test_eq([a for pid in (*pids,p.pid) for a in listening(pid) if not a.startswith('127.')], [])
        p.send_signal(sig)
        p.communicate(timeout=60)
    finally: p.kill()
    await_that(lambda: not any(map(alive, pids)))
    assert p.returncode!=0

def listening(pid):
    "Addresses on which process `pid` listens"
    inodes = {os.readlink(o) for o in Path(f'/proc/{pid}/fd').iterdir() if o.is_symlink()}
    res = []
    for kind in ('tcp','tcp6'):
        for row in Path(f'/proc/{pid}/net/{kind}').read_text().splitlines()[1:]:
            _,local,_,state,*rest = row.split()
            if state=='0A' and f'socket:[{rest[5]}]' in inodes: res.append(address(local.split(':')[0]))
    return res

def address(h):
    import socket
    raw = b''.join(bytes.fromhex(h[i:i+8])[::-1] for i in range(0, len(h), 8))
    return socket.inet_ntop(socket.AF_INET if len(raw)==4 else socket.AF_INET6, raw).removeprefix('::ffff:')

# Real processes

@pytest.mark.parametrize('mode', ['no',pytest.param('bf16', marks=pytest.mark.whole)])
def test_a_plain_loop_under_accelerate_launch(warm, tmp_path, mode):
    cfg = tmp_path/'config.yaml'
    cfg.write_text((examples/'accelerate_config.yaml').read_text().replace("'no'", mode if mode=='bf16' else "'no'"))
    *_,last = warm(bin_/'accelerate', 'launch', '--config_file', cfg, examples/'accelerate_cnn.py')[0].splitlines()
    assert f'2 ranks in {mode}: ' in last and float(last.split()[-1])>.9

@pytest.mark.whole
@pytest.mark.launcher
def test_four_ranks_from_a_plain_script():
    *epochs,last = run(sys.executable, examples/'distribute_mlp.py')[0].splitlines()
    assert [o.split(':')[0] for o in epochs]==[f'epoch {i}, 4 ranks' for i in range(5)] and float(last.split()[-1])>.9

def test_a_bar_that_ctrl_c_interrupts_ends_its_line(monkeypatch):
    class Presses(Lines):
        "Presses Ctrl-C once the bar is shown"
        def write(self, s):
            super().write(s)
            if s.endswith('%'): os.kill(os.getpid(), signal.SIGINT) # to the main thread, this is another one
    out = Presses()
    monkeypatch.setattr(sys, 'stdout', out)
    def f():
        print('50%', end='', flush=True)
        time.sleep(60)
    was = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt): cpu(nprocs=2).distribute(f, **forked)()
    finally: signal.signal(signal.SIGINT, was)
    assert out.s.endswith('50%\n'), out.s

# What is left behind

class Average(Callback):
    "An averaged copy of the model, made on a rank, and a deep copy of the best"
    def before_fit(self): self.mean = deepcopy(self.model).requires_grad_(False)
    def after_step(self):
        for a,b in zip(self.mean.parameters(), self.model.parameters()): a.lerp_(b, .5)
    def after_epoch(self): self.learn.best_model = deepcopy(self.mean)

@pytest.mark.whole
@pytest.mark.replicas # a model in shards is not copied
def test_a_model_that_a_callback_has_made_comes_home():
    learn,one = learner(4, cbs=Average()),learner(8, cbs=Average())
    def train():
        with learn.distrib_ctx(): fit(learn, 2)
    set_seed(2)
    cpu(nprocs=2).distribute(train, **forked)()
    set_seed(2)
    fit(one, 2)
    pairs = (learn.average.mean,one.average.mean), (learn.best_model,one.best_model)
    for a,b in pairs: test_close([*a.state_dict().values()], [*b.state_dict().values()], 1e-5)

def test_what_a_function_changes_is_changed_here():
    seen,best,n,same,learn = [],{},0,[1],learner(4)
    def note(x): seen.append(x)
    def train(into):
        nonlocal n
        n += len(same)
        note(n)
        best['a'] = same
        into.append(2)
        learn.dls = learner(2).dls
    into = []
    cpu(nprocs=2).distribute(train, **forked)(into)
    test_eq((seen,best,n,into,learn.dls.bs), ([1],{'a':[1]},1,[2],2))
    assert best['a'] is same
    fit(learn, 1)
