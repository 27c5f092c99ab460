"What a Learner does inside and after the context, on real ranks"
import os,random,pytest
from datetime import timedelta
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader as TorchLoader
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration,DDPCommunicationHookType,DistributedDataParallelKwargs,InitProcessGroupKwargs
from fastai.basics import *
from fastai.callback.all import *
from fastdist import *
from fastcore.test import test_eq,test_ne,test_close
from learners import digits,tabular

def quiet(learn): return learn.no_logging(),learn.no_bar()

def run(learn, epochs=1, lr=0.05, cbs=None, **kw):
    a,b = quiet(learn)
    with learn.distrib_ctx(**kw),a,b: learn.fit(epochs, lr, cbs=cbs)
    return learn

def weights(learn): return torch.cat([o.detach().float().flatten() for o in learn.model.state_dict().values()]).tolist()

class Watch(Callback):
    "The samples of each epoch's training batches, recognised by their content"
    def before_fit(self): self.learn.seen,self.learn.steps = [],[]
    def before_train(self):
        self.learn.seen.append([])
        self.learn.steps.append(0)
    def before_batch(self):
        if not self.training: return
        self.learn.seen[-1] += [tuple(o.tolist()) for o in self.xb[0]]
        self.learn.steps[-1] += 1

def seen(rank, seed=None, **kw):
    if seed is not None: set_seed(seed)
    else: random.seed(rank)
    learn = run(digits(dls_kw=dict(drop_last=False), **kw), 2, cbs=Watch())
    return learn.seen,learn.steps,weights(learn)

@pytest.mark.parametrize('n,size', [(90,2), (91,3), (117,4)])
@pytest.mark.by_default('91-3')
def test_each_sample_once_an_epoch(n, size):
    res = on_ranks(lambda rank: seen(rank, n=n, bs=7), size, join=False)
    data = sorted(tuple(x.tolist()) for x,_ in digits(n=n).dls.train_ds)
    for e in range(2): test_eq(sorted(sum((o[0][e] for o in res), [])), data)
    test_ne(res[0][0][0], res[0][0][1])
    test_eq(len({tuple(o[1]) for o in res}), 1)
    for o in res[1:]: test_eq(o[2], res[0][2])

@pytest.mark.whole
def test_a_seed_repeats_the_run():
    a,b = [on_ranks(lambda rank: seen(rank, seed=3, n=90), join=False) for _ in range(2)]
    test_eq(a, b)

@pytest.mark.whole
def test_fewer_samples_than_ranks():
    res = on_ranks(lambda rank: weights(run(digits(n=4, bs=4, dls_kw=dict(drop_last=False)))), 4, join=False)
    for o in res[1:]: test_eq(o, res[0])

def several(rank):
    a,b,env = digits(),digits(),dict(os.environ)
    x,y = quiet(a)
    with a.distrib_ctx(),x,y:
        a.fit(1)
        a.fit(1)
    run(a)
    run(b)
    with a.distrib_ctx(), b.distrib_ctx():
        for o in (a,b):
            with o.no_logging(), o.no_bar(): o.fit(1)
    return weights(a),weights(b),len(a.recorder.losses),dist.is_initialized(),dict(os.environ)==env

def test_two_fits_two_contexts_two_learners():
    a,b = on_ranks(several, join=False)
    test_eq(a, b)
    test_eq(a[3:], (False,True))

def tuned(rank):
    set_seed(1)
    split = lambda m: [params(m[:2]),params(m[2:])]
    learn = digits(splitter=split, opt_func=SGD)
    x,y = quiet(learn)
    with learn.distrib_ctx(),x,y:
        learn.freeze()
        frozen = learn.model[0].weight.detach().clone()
        learn.fit(1, 0.1)
        test_eq(learn.model[0].weight, frozen)
        learn.unfreeze()
        learn.fit_one_cycle(1, slice(1e-4,1e-2))
        learn.fine_tune(1, freeze_epochs=1)
        test_ne(learn.model[0].weight, frozen)
    return weights(learn),L(learn.opt.hypers).attrgot('lr')

@pytest.mark.whole
def test_freezing_and_discriminative_rates():
    a,b = on_ranks(tuned, join=False)
    test_eq(a, b)

class Thaw(Callback):
    def before_epoch(self):
        if self.epoch==1: self.learn.unfreeze()

def thawed(rank):
    learn = digits(splitter=lambda m: [params(m[:2]),params(m[2:])])
    learn.freeze()
    return weights(run(learn, 2, cbs=Thaw()))

@pytest.mark.whole
def test_unfreezing_within_a_fit(): test_eq(*on_ranks(thawed, join=False))

def in_users_group(rank):
    dist.init_process_group('gloo')
    learn = run(digits())
    dist.barrier()
    return weights(learn),dist.is_initialized()

@pytest.mark.whole
def test_users_group_is_left_standing():
    a,b = on_ranks(in_users_group, join=False)
    test_eq(a, b)
    assert a[1]

@pytest.mark.whole
def test_group_without_variables(tmp_path):
    def f(rank):
        for k in 'RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT FASTDIST_STORE'.split(): os.environ.pop(k)
        dist.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=rank, world_size=2)
        return weights(run(digits())),rank0_first(lambda: rank),this_world().source
    a,b = on_ranks(f, join=False)
    test_eq(a[0], b[0])
    test_eq((a[1:],b[1:]), ((0,'the process group'),(1,'the process group')))

def as_callback(rank):
    learn = digits(cbs=DistributedTrainer())
    with learn.no_logging(), learn.no_bar(): learn.fit(1)
    assert dist.is_initialized()
    learn.detach_distributed()
    other = digits()
    with other.no_logging(), other.no_bar(): other.fit(1, cbs=DistributedTrainer())
    return weights(learn),weights(other),dist.is_initialized()

@pytest.mark.whole
def test_as_a_callback():
    a,b = on_ranks(as_callback, join=False)
    test_eq(a, b)
    assert not a[2]

class Inside(Callback):
    order = 20
    def before_fit(self): self.learn.looks = []
    def before_batch(self): self.look()
    def after_pred(self): self.look()
    def after_step(self): self.look()
    def look(self): self.learn.looks.append((type(self.learn.model), any('module.' in k for k in self.learn.model.state_dict())))

def hooked(rank):
    learn,outs = digits(),[]
    hook = learn.model.register_forward_hook(lambda m,i,o: outs.append(type(m)))
    bn = learn.model[1]
    run(learn, cbs=Inside())
    hook.remove()
    steps = len(learn.recorder.losses)
    assert len(outs)>steps and set(outs)=={nn.Sequential} and learn.model[1] is bn and type(bn) is nn.BatchNorm1d
    return set(learn.looks),learn.model[1].running_mean

class Listens(Callback):
    def __call__(self, event_name): self.learn.told.append(event_name)

class OwnCall(Learner):
    def __call__(self, event_name):
        self.called += 1
        super().__call__(event_name)

class OwnEvents(Learner):
    def _with_events(self, f, event_type, *args, **kwargs):
        self.called += 1
        super()._with_events(f, event_type, *args, **kwargs)

class Rush(Callback):
    "Leaves out what it can"
    decides = True
    def before_backward(self): self.leave(0, CancelBackwardException)
    def before_step(self): self.leave(1, CancelStepException)
    def before_batch(self): self.leave(2, CancelBatchException)
    def leave(self, k, ex):
        if self.training and self.iter==k: raise ex()

def told(rank, size, cls):
    learn = digits(n=96, bs=16//size)
    learn.__class__,learn.told,learn.called = cls,[],0
    run(learn, cbs=[Listens(),Rush()])
    return learn.told,learn.called

@pytest.mark.parametrize('cls', [Learner,OwnCall,OwnEvents])
@pytest.mark.by_default('OwnEvents')
def test_events_are_those_of_one_process(cls):
    one = told(0, 1, cls)
    test_eq((one[1]>0, 'after_cancel_step' in one[0]), (cls is not Learner, True))
    test_eq(on_ranks(lambda rank: told(rank, 2, cls), join=False), [one]*2)

@pytest.mark.replicas
def test_callbacks_and_hooks_see_the_bare_model():
    (a,x),(b,y) = on_ranks(hooked, join=False)
    test_eq(a|b, {(nn.Sequential,False)})
    test_eq(x, y)

class Mark(Callback):
    rank0_only = True
    def before_fit(self): Path(f'mark{rank_distrib()}').touch()

def logged(rank):
    learn = digits()
    with learn.distrib_ctx(): learn.fit(2, cbs=[CSVLogger(), Mark()])
    return learn.recorder.values,learn.recorder.metric_names

def test_rank_0_shows_and_writes_alone(capfd):
    a,b = on_ranks(logged, join=False)
    test_eq(a, b)
    out = capfd.readouterr().out
    test_eq(out.count('fastdist: 2 ranks on 1 node, cpu over gloo'), 1)
    assert 'batches of 16 a rank, 32 in all, 9 steps an epoch' in out
    test_eq(out.count('valid_loss'), 1)
    test_eq(len(Path('history.csv').read_text().splitlines()), 3)
    test_eq(sorted(o.name for o in Path().glob('mark*')), ['mark0'])

def plotted(rank):
    import matplotlib
    matplotlib.use('agg')
    learn = run(digits(), 2)
    plt.close('all') # a test before may have drawn
    return len(learn.recorder.plot_loss().lines)

@pytest.mark.whole
def test_plot_loss(): test_eq(on_ranks(plotted, join=False), [2,2])

def optioned(rank):
    ddp = []
    look = Callback(before_batch=lambda self: ddp.append(self.learn.distributed_trainer._through))
    options = DistributedDataParallelKwargs(find_unused_parameters=True, comm_hook=DDPCommunicationHookType.BF16)
    hs = [options, InitProcessGroupKwargs(timeout=timedelta(seconds=77))]
    learn,limit = digits(),[]
    learn.model = Half()
    see = Callback(before_fit=lambda self: limit.append(dist.distributed_c10d._get_default_group()._get_backend(torch.device('cpu')).options._timeout))
    run(learn, cbs=[look,see], kwargs_handlers=hs)
    assert isinstance(ddp[0], DistributedDataParallel) and ddp[0].find_unused_parameters and ddp[0]._comm_hooks
    return limit[0],weights(learn)

class Half(nn.Module):
    "Does not use one of its layers"
    def __init__(self):
        super().__init__()
        self.used,self.unused = nn.Linear(64,10),nn.Linear(64,10)
    def forward(self, x): return self.used(x)

@pytest.mark.replicas
def test_handlers_take_effect():
    a,b = on_ranks(optioned, join=False)
    test_eq(a, b)
    test_eq(a[0], timedelta(seconds=77))

def split(rank):
    learn = digits(dls_kw=dict(drop_last=False))
    sizes = []
    run(learn, cbs=Callback(before_batch=lambda self: sizes.append(len(self.xb[0]))), dataloader_config=DataLoaderConfiguration(split_batches=True))
    return sizes[0]

@pytest.mark.whole
def test_split_batches(): test_eq(on_ranks(split, join=False), [8,8])

def compiled(rank): return weights(run(digits(n=90), dynamo_backend='aot_eager'))

@pytest.mark.whole
def test_dynamo(): test_eq(*on_ranks(compiled, join=False))

def plain_torch(rank):
    learn = digits()
    ds = learn.dls.train_ds,learn.dls.valid_ds
    learn.dls = DataLoaders(TorchLoader(ds[0], 16, shuffle=True, num_workers=1), TorchLoader(ds[1], 16))
    run(learn, 2)
    return weights(learn),learn.recorder.values

def test_torch_loaders():
    a,b = on_ranks(plain_torch, join=False)
    test_eq(a, b)

def in_bf16(rank):
    os.environ['ACCELERATE_MIXED_PRECISION'] = 'bf16'
    learn,seen = digits(),[]
    hook = learn.model[0].register_forward_hook(lambda m,i,o: seen.append(o.dtype))
    run(learn)
    return set(seen),learn.model[0].weight.dtype,weights(learn)

def test_precision_of_the_launcher():
    a,b = on_ranks(in_bf16, join=False)
    test_eq(a, b)
    test_eq(a[:2], ({torch.bfloat16},torch.float32))

def saved(rank):
    learn = digits(path='.')
    with learn.distrib_ctx(), learn.no_logging(), learn.no_bar():
        learn.fit(1)
        learn.save('inside')
        dist.barrier()
        learn.load('inside')
    return weights(learn)

@pytest.mark.whole
def test_checkpoints_interchange():
    on_ranks(saved, join=False)
    learn = digits(path='.').load('inside')
    assert all(not k.startswith('module.') for k in torch.load('models/inside.pth', weights_only=False)['model'])
    test_close(learn.validate()[1], digits(path='.').load('inside').validate()[1])

@pytest.mark.whole
def test_no_rank_trains_alone_because_of_an_older_accelerator():
    def f(rank):
        Accelerator(cpu=True)
        return weights(run(digits()))
    test_eq(*on_ranks(f, join=False))

def test_one_process_is_left_alone():
    learn = digits()
    with learn.distrib_ctx():
        assert '_with_events' not in vars(learn) and not dist.is_initialized()
        with learn.no_logging(), learn.no_bar(): learn.fit(1)
    test_eq(learn._grab_cbs(DistributedTrainer), [])

def test_no_step_is_an_error_everywhere():
    def f(rank):
        with pytest.raises(ValueError, match='90 training samples|72 training samples'): run(digits(n=90, bs=64))
    on_ranks(f, join=False)

def orders(rank, size, bs=6):
    set_seed(5)
    learn = digits(n=90, bs=bs)
    for _ in range(2): run(learn, 2, cbs=Watch())
    return learn.seen[-1]

@pytest.mark.whole
def test_shuffles_go_on_as_in_one_process():
    one,two = orders(0, 1, bs=12),on_ranks(lambda rank: orders(rank, 2), join=False)
    test_eq([set(one[i:i+12]) for i in range(0, len(one), 12)], [set(two[0][i:i+6]+two[1][i:i+6]) for i in range(0, len(two[0]), 6)])

def exported(rank):
    learn = tabular()
    learn.path = Path('.')
    with learn.distrib_ctx(), learn.no_logging(), learn.no_bar():
        learn.fit(1)
        learn.export('inside.pkl')
    return learn.validate()

@pytest.mark.whole
def test_export_inside_the_context():
    alone,_ = on_ranks(exported, join=False)
    learn = load_learner('inside.pkl')
    with learn.no_bar(): test_close(learn.validate(dl=tabular().dls.valid), alone, 1e-5)
    learn.dls = tabular().dls
    with learn.no_logging(), learn.no_bar(): learn.fit(1)

def validated(rank):
    set_seed(2)
    learn = digits(n=117, bs=4)
    with learn.distrib_ctx(), learn.no_bar():
        learn.fit(1)
        return learn.validate(),learn.get_preds(with_loss=True, with_input=True)

def test_evaluation_inside_the_context():
    (v,(x,p,t,l)),*others = on_ranks(validated, 3, join=False)
    for o in others: test_eq(o[0], v)
    ds = digits(n=117).dls.valid_ds
    test_eq(x, torch.stack([x for x,_ in ds]))
    test_close(v, [l.mean(), (p.argmax(1)==t).float().mean()], 1e-5)

@pytest.mark.parametrize('options', [dict(cpu=True), dict(kwargs_handlers=[DistributedDataParallelKwargs()]), dict(dynamo_backend='eager'), dict(sync_bn=False)])
@pytest.mark.by_default('options1')
def test_one_process_with_options(options):
    set_seed(1)
    a = run(digits(), **options)
    set_seed(1)
    b = digits()
    with b.no_logging(), b.no_bar(): b.fit(1, 0.05)
    test_close(weights(a), weights(b), 1e-5)
    test_eq([k for k in ('_with_events','_do_one_batch') if k in vars(a)], [])

def test_one_process_with_the_launchers_precision(monkeypatch):
    monkeypatch.setenv('ACCELERATE_MIXED_PRECISION', 'bf16')
    test_eq(in_bf16(0)[:2], ({torch.bfloat16},torch.float32))

@pytest.mark.parametrize('key,val', [('ACCELERATE_USE_DEEPSPEED','true'), ('ACCELERATE_MIXED_PRECISION','fp8')])
def test_what_the_launcher_asks_in_vain(monkeypatch, key, val):
    monkeypatch.setenv(key, val)
    learn = digits()
    with pytest.raises(OptionError, match=val): run(learn)
    test_eq(learn._grab_cbs(DistributedTrainer), [])

def unsynced(rank):
    learn = run(digits(), sync_bn=False)
    return weights(learn),learn.model[1].running_mean.tolist()

def test_buffers_agree_without_sync_bn(): test_eq(*on_ranks(unsynced, join=False))
