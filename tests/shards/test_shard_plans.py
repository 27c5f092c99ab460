"What a plan for shards asks for happens, and N ranks compute what one process computes; afterwards nothing of it is left"
import pytest
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils import GradientAccumulationPlugin
from fastai.basics import *
from fastai.callback.all import *
from fastcore.test import test_eq
from torch.distributed.fsdp import MixedPrecisionPolicy
from fastdist import *
from compare import whole_tables
from half import CpuHalf

ran = []

class Block(nn.Module):
    def __init__(self, d, bn):
        super().__init__()
        self.norm,self.up,self.down = (nn.BatchNorm1d if bn else nn.LayerNorm)(d),nn.Linear(d, 2*d),nn.Linear(2*d, d)
    def forward(self, x):
        ran.append(self.training)
        return x+self.down(F.relu(self.up(self.norm(x))))

class Net(nn.Module):
    "With a parameter without dimensions"
    def __init__(self, bn=False):
        super().__init__()
        self.head,self.blocks,self.tail = nn.Linear(8,8),nn.Sequential(*[Block(8, bn) for _ in range(3)]),nn.Linear(8,3)
        self.scale = nn.Parameter(torch.tensor(1.))
    def forward(self, x): return self.tail(self.blocks(self.head(x)))*self.scale

def learner(bs, n=49, mk=Net, opt=SGD, cbs=None):
    set_seed(3)
    g = torch.Generator().manual_seed(0)
    data = list(zip(torch.randn(n, 8, generator=g), torch.randint(0, 3, (n,), generator=g)))
    dls = DataLoaders.from_dsets(data, data, bs=bs, shuffle=True, drop_last=False, num_workers=0, device='cpu')
    return Learner(dls, mk(), loss_func=CrossEntropyLossFlat(), opt_func=opt, metrics=accuracy, cbs=cbs)

def weights(learn): return torch.cat([o.detach().float().flatten() for o in learn.model.state_dict().values()])

def fitted(ctx, *args, **kw):
    ran.clear()
    learn = learner(*args, **kw)
    with learn.distrib_ctx(**ctx), learn.no_bar(), learn.no_logging():
        learn.fit(2, .02)
        losses,vals,n = tensor(learn.recorder.losses),tensor(learn.recorder.values[-1]),sum(ran)
        changed = 'forward' in vars(learn.model.blocks[0])
        preds = learn.get_preds()[0]
    assert not any('forward' in vars(m) for m in learn.model.modules()) and not {'step','zero_grad'} & {*vars(learn.opt), *vars(getattr(learn.opt, 'opt', learn.opt))}
    return weights(learn),losses,preds,vals,n,changed

def on_nodes(f):
    "Call `f` on two nodes with two ranks each"
    def run(rank):
        os.environ.update(LOCAL_RANK=str(rank%2), LOCAL_WORLD_SIZE='2', GROUP_RANK=str(rank//2), GROUP_WORLD_SIZE='2')
        return f(rank)
    return on_ranks(run, 4, join=False)

def compare(many, one, eps=(1e-5,1e-6,1e-5,1e-6)):
    for o in many:
        for a,b,e in zip(one, o, eps): torch.testing.assert_close(a, b, rtol=e, atol=e)

def plugin(version=2, **kw): return dict(shard=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=version, **kw))

@pytest.mark.whole
def test_units_are_computed_again():
    ctx,kw = plugin(activation_checkpointing=True),dict(n=48, mk=partial(Net, True), cbs=GradientClip(.1))
    many,one = on_ranks(lambda rank: fitted(ctx, 4, **kw), join=False),fitted({}, 8, **kw)
    compare(many, one)
    test_eq([o[4:] for o in many], [(2*one[4],True)]*2)

@pytest.mark.whole
def test_units_are_compiled():
    ctx,kw = plugin(activation_checkpointing=True)|dict(dynamo_backend='eager'),dict(n=16)
    many,one = on_ranks(lambda rank: fitted(ctx, 4, **kw), join=False),fitted({}, 8, **kw)
    compare(many, one)
    assert all(o[5] for o in many)

@pytest.mark.whole
def test_parameters_that_each_rank_holds_whole():
    ctx,n = plugin(ignored_modules=r'head|blocks\.1'),25
    runs = [dict(cbs=GradientClip(.1)), dict(opt=partial(Adam, eps=1e-3)), dict(opt=Lamb), dict(opt=partial(OptimWrapper, opt=torch.optim.Adagrad))]
    if not whole_tables: runs = runs[:2]
    many = on_ranks(lambda rank: [fitted(ctx, 4, n, **kw) for kw in runs], 3, join=False)
    for i,kw in enumerate(runs): compare([o[i] for o in many], fitted({}, 12, n, **kw))

torchs = 'SGD AdamW RMSprop Adagrad Rprop'.split()

@pytest.mark.whole
def test_optimizers_of_torch():
    runs = [partial(OptimWrapper, opt=getattr(torch.optim, o), **dict(eps=1e-3) if o=='RMSprop' else {}) for o in torchs]
    runs += [partial(OptimWrapper, opt=torch.optim.SGD, momentum=.9, nesterov=True, weight_decay=.1)]
    many = on_ranks(lambda rank: [fitted(dict(shard=True), 4, 13, opt=o) for o in runs], join=False)
    for i,o in enumerate(runs): compare([r[i] for r in many], fitted({}, 8, 13, opt=o))

def test_fp16_skips_a_step_on_all_ranks():
    many = on_ranks(lambda rank: [fitted(c, 4, n=48, cbs=CpuHalf()) for c in (dict(shard=True), {}, plugin(ignored_modules='head'))], join=False)
    for o in many:
        compare(o[1:], o[0], [1e-4]*4)
        torch.testing.assert_close(o[0][0], many[0][0][0], rtol=0, atol=0)

class Losses(Callback):
    "Records the loss of each step, and that of this rank's batch"
    def before_fit(self): self.both = []
    def after_batch(self):
        if self.training: self.both.append((float(self.learn.loss), F.cross_entropy(self.pred.detach(), self.y).item(), self.pred.dtype))

@pytest.mark.whole
@pytest.mark.parametrize('reduce', (None,torch.float32))
@pytest.mark.parametrize('bn', (False,True))
@pytest.mark.by_default('reduce1')
def test_a_policy_of_bf16(reduce, bn):
    "Weights are near those of float32, and losses do not travel in bf16"
    ctx,kw = plugin(mixed_precision_policy=MixedPrecisionPolicy(torch.bfloat16, reduce)),dict(n=48, mk=partial(Net, bn))
    def run(rank):
        learn = learner(4, cbs=(cb := Losses()), **kw)
        with learn.distrib_ctx(**ctx), learn.no_bar(), learn.no_logging(): learn.fit(2, .02)
        return weights(learn),cb.both
    (w,a),(v,b) = on_ranks(run, join=False)
    one = learner(8, **kw)
    with one.no_bar(), one.no_logging(): one.fit(2, .02)
    assert w.equal(v)
    torch.testing.assert_close(w, weights(one), rtol=3e-3, atol=3e-3)
    for (l,x,dtype),(_,y,_) in zip(a, b): assert abs(l-(x+y)/2)<1e-6 and dtype==torch.float32

def test_bf16_where_each_batch_of_a_window_is_exchanged():
    "Steps are those of a window that is exchanged at its end"
    ctx = plugin(mixed_precision_policy=MixedPrecisionPolicy(torch.bfloat16))
    def run(rank, each): return fitted(ctx|dict(gradient_accumulation_plugin=GradientAccumulationPlugin(2, sync_each_batch=each)), 4, 48)
    many = on_ranks(lambda rank: [run(rank, each) for each in (True,False)], join=False)
    for each,last in many: compare([each], last, [3e-3]*4)

class ToHalf(Callback):
    def before_batch(self): self.learn.xb = tuple(o.bfloat16() for o in self.xb)
    def after_pred(self): self.learn.pred = self.pred.float()

def test_parameters_in_bf16():
    "Losses are exact although gradients have less digits"
    def run(rank):
        learn = learner(4, n=48, mk=lambda: nn.Sequential(nn.Linear(8,9), nn.ReLU(), nn.Linear(9,3)).bfloat16(), cbs=(cb := Losses()))
        learn.add_cb(ToHalf())
        with learn.distrib_ctx(shard=True), learn.no_bar(), learn.no_logging(): learn.fit(1, .02)
        return cb.both
    for (l,x,_),(_,y,_) in zip(*on_ranks(run, join=False)): assert abs(l-(x+y)/2)<1e-6

@pytest.mark.parametrize('kw', (dict(cbs=GradientClip(.1), opt=partial(Adam, eps=1e-3)), pytest.param(dict(n=48, mk=partial(Net, True)), marks=pytest.mark.whole)))
def test_shards_in_nodes_and_replicas_between_them(kw):
    def run(rank):
        learn = learner(4, **kw)
        with learn.distrib_ctx(**plugin(1, sharding_strategy='HYBRID_SHARD')), learn.no_bar(), learn.no_logging():
            learn.fit(1, .02)
            rows = sum(p.to_local().numel() for p in learn.model.parameters() if p.ndim)
            learn.save('whole')
        return fitted(plugin(1, sharding_strategy='HYBRID_SHARD'), 4, **kw),rows,weights(learn)
    res,one = on_nodes(run),fitted({}, 16, **kw)
    compare([o for o,*_ in res], one)
    n = sum(p.numel() for p in Net('mk' in kw).parameters() if p.ndim)
    test_eq([r for _,r,_ in res], [res[0][1],n-res[0][1]]*2)
    assert all(w.equal(res[0][2]) for *_,w in res)
