"What shards cost: bytes on each rank, and collectives of a step"
import gc,pytest
from collections import Counter
from fastai.basics import *
from fastai.callback.all import *
from fastcore.test import test_eq
from fastdist import *
from fastdist.shard.plan import ShardPlan
from fastdist.state.replicas import fingerprint
from fastdist.parallel.passes import local
from fastdist.shard.wrap_policy import choose_units
from collectives import counting
from test_shard_plans import plugin,Block

def model(d=24, n=5): return nn.Sequential(nn.Linear(8,d), nn.Sequential(*[Block(d, False) for _ in range(n)]), nn.Linear(d,3))

def learner(bs, n, opt=Adam, **kw):
    set_seed(3)
    data = [(torch.randn(8),i%3) for i in range(n)]
    return Learner(DataLoaders.from_dsets(data, data, bs=bs, num_workers=0, device='cpu'), model(**kw), loss_func=CrossEntropyLossFlat(), opt_func=opt)

def nbytes(ts): return sum(t.numel()*t.element_size() for t in ts)
def held():
    "Bytes of all tensors of this process that Python can see"
    gc.collect()
    return sum({s.data_ptr():s.nbytes() for o in gc.get_objects() if type(o) in (Tensor,nn.Parameter) and o.numel() for s in [o.untyped_storage()]}.values())

class Bytes(Callback):
    "Records the bytes of parameters, of gradients and of the optimizer's state after a step"
    def after_step(self):
        ps,opt = [*self.model.parameters()],self.opt if hasattr(self.opt, 'cbs') else self.opt.opt
        state = [v for s in opt.state.values() for v in s.values() if isinstance(v, Tensor) and v.ndim]
        self.seen = [nbytes(map(local, ts)) for ts in (ps, [p.grad for p in ps], state)]
@pytest.mark.parametrize('opt', (Adam, pytest.param(partial(OptimWrapper, opt=torch.optim.Adam), marks=pytest.mark.whole)))
def test_bytes_are_those_of_one_process_divided_by_the_ranks_plus_one_unit(opt):
    def run(rank):
        fingerprint(tensor(0)) # its table of random numbers is made once in a process
        learn,whole = learner(2, 32, opt),held()
        with learn.distrib_ctx(shard=True), learn.no_bar(), learn.no_logging():
            learn.fit(1, cbs=(cb := Bytes()))
            return cb.seen,min(held() for _ in range(5))-whole # gloo's threads let go of what they have sent a moment later
    one = learner(8, 32, opt)
    with one.no_bar(), one.no_logging(): one.fit(1, cbs=(cb := Bytes()))
    whole,unit = cb.seen,nbytes(one.model[1][0].parameters())
    for rank,(mine,more) in enumerate(on_ranks(run, 4, join=False)):
        rows = nbytes(p[rank*-(-len(p)//4):][:-(-len(p)//4)] for p in one.model.parameters())
        test_eq(mine, [rows,rows,2*rows])
        assert sum(mine)<=sum(whole)/4+unit and more<=sum(whole)/4+unit-whole[0]

def counted(steps, **ctx):
    learn = learner(2, 4*steps)
    learn._do_epoch_validate = noop
    with learn.distrib_ctx(**dict(shard=True)|ctx), learn.no_bar(), learn.no_logging():
        with counting() as ran: learn.fit(1)
    return ran

def per_step(rank, **ctx):
    many,few = counted(6, **ctx),counted(2, **ctx)
    return Counter({k.removeprefix('c10d::').strip('_'):(many[k]-few[k])/4 for k in many if many[k]!=few[k]})

def test_a_step_gathers_each_unit_twice_and_reduces_it_once():
    "The outermost unit stays whole between the passes; the loss and the weight of a batch travel with its gradients"
    u = len(choose_units(model(), ShardPlan()))
    for ctx,root in (({}, 1), (plugin(activation_checkpointing=True), 2)): # the plugin's default divides the outermost unit too after its forward pass
        test_eq(on_ranks(lambda rank: per_step(rank, **ctx), join=False), [Counter(allgather_base=2*u+root, reduce_scatter_base=u+1)]*2)
