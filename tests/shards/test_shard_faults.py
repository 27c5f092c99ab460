"With shards too: nothing waits for ever, the cause is named on all ranks, and the Learner comes back whole and bare, with the same Parameters"
import os,signal,time,warnings,pytest
from copy import deepcopy
from unittest import mock
from torch.distributed.fsdp import FSDPModule
from fastai.basics import *
from fastai.callback.all import *
from fastdist import *
from fastdist.comm.collectives import gather_objs
from fastdist.shard.model import Shards
from fastcore.test import test_eq
from faults import traces

pytestmark = pytest.mark.timeout(300)

class Block(nn.Module):
    "Fails in its forward or backward pass when it is told to"
    def __init__(self, d):
        super().__init__()
        self.lin,self.due = nn.Linear(d, d),''
    def forward(self, x):
        if self.due=='forward': self.fail()
        x = x+self.lin(x).relu()
        if self.due=='backward' and x.requires_grad: x.register_hook(self.fail)
        return x
    def fail(self, *_): raise RuntimeError('out of memory, on purpose')

def deep(n=96, bs=8):
    "Of five units"
    set_seed(1)
    xs = torch.randn(n, 6)
    dls = DataLoaders.from_dsets(*[list(zip(xs, xs.sum(1, keepdim=True)))]*2, bs=bs, num_workers=0, device='cpu')
    model = nn.Sequential(nn.Linear(6,9), *[Block(9) for _ in range(3)], nn.Linear(9,1))
    return Learner(dls, model, loss_func=BadLoss(), opt_func=partial(SGD, mom=.9), lr=.01)

def quiet(learn): return ContextManagers([learn.no_logging(), learn.no_bar()])

def heard(f, *args, **kw):
    "How `f` ended on this rank, and what was said"
    try: f(*args, **kw)
    except BaseException as e: return type(e).__name__,'\n'.join([str(e), *getattr(e, '__notes__', ())])
    return 'went on',''

class At(Callback):
    "Calls `f` with the Learner, once, in batch 2 of training"
    decides = False
    def __init__(self, event, f): self.live,self.f,self.event = True,f,event
    def __call__(self, event_name):
        if event_name!=self.event or not self.live or not self.learn.training or self.learn.iter!=2: return
        self.live = False
        self.f(self.learn)

def fails(*_): raise RuntimeError('on purpose')
def interrupts(*_): raise KeyboardInterrupt
def due(learn, what, i=2): learn.model[i].due = what

class BadLoss(nn.MSELoss):
    n,live = 0,False
    def forward(self, *args):
        self.n += 1
        return fails() if self.n==3 and self.live else super().forward(*args)

def in_forward(learn): learn.fit(1, cbs=At('before_batch', partial(due, what='forward')))
def in_backward(learn): learn.fit(1, cbs=At('before_batch', partial(due, what='backward')))
def in_loss(learn): learn.fit(1)
def in_step(learn):
    with mock.patch('fastdist.parallel.foreach.ListSteps._part', fails): learn.fit(1)
def after_backward(learn): learn.fit(1, cbs=At('after_backward', fails))
def interrupted(learn): learn.fit(1, cbs=At('after_step', interrupts))
def in_preds(learn):
    due(learn, 'forward')
    learn.get_preds()
def in_validation(learn):
    due(learn, 'forward', 3)
    learn.validate()

spots = [in_forward,in_backward,in_loss,in_step,after_backward,interrupted,in_preds,in_validation]

def calm(learn):
    learn.loss_func.live = False
    for o in learn.model[1:4]: o.due = ''

def whole(learn): return [p.detach().tolist() for p in learn.model.parameters()]
def acts(f, learn, culprit):
    "What the others do while one fails"
    learn.loss_func.live = culprit and f is in_loss
    if culprit: return f(learn)
    if f is in_preds: learn.get_preds()
    elif f is in_validation: learn.validate()
    else: learn.fit(1)

def survives(rank, f, culprit, **kw):
    learn = deep()
    before = traces(learn.model)
    with warnings.catch_warnings(record=True) as seen, quiet(learn):
        warnings.simplefilter('always')
        with learn.distrib_ctx(shard=True, **kw):
            how = heard(acts, f, learn, rank==culprit)
            calm(learn)
            learn.fit(1)
            again = learn.recorder.values[-1][0]
        bare,first_ = traces(learn.model)==before,whole(learn)
        with learn.distrib_ctx(shard=True): learn.fit(1)
    return how,again,bare and traces(learn.model)==before,first_,whole(learn),[str(o.message) for o in seen if 'different steps' in str(o.message)]

def all_spots(rank, some, culprit): return [survives(rank, f, culprit) for f in some]

@pytest.mark.parametrize('size,culprit,some', [(2,0,spots[::2]), (3,2,spots[1::2])])
@pytest.mark.by_default('2-0')
def test_a_rank_fails(size, culprit, some):
    "The mixture of steps is what an error between a backward pass and a step leaves; nothing else does"
    for f,*ranks in zip(some, *on_ranks(partial(all_spots, some=some, culprit=culprit), size, join=False, timeout=55)):
        for r,((how,text),again,bare,a,b,said) in enumerate(ranks):
            where = f.__name__,r,how,text
            assert bare and not math.isnan(again), where
            assert how==('KeyboardInterrupt' if f is interrupted else 'RuntimeError') if r==culprit else how=='RankError' and f'rank {culprit} failed' in text, where
            test_eq([a,b], list(ranks[0][3:5]))
            assert torch.tensor(sum([np.ravel(o).tolist() for o in b], [])).isfinite().all(), where
            test_eq(bool(said), r==0 and f in (in_step,after_backward))

@pytest.mark.whole
def test_a_torch_that_cannot_reset(monkeypatch):
    "Before 2.13 torch has no `reset_iter_state`"
    monkeypatch.delattr(FSDPModule, 'reset_iter_state', raising=False)
    test_a_rank_fails(2, 1, [in_forward,in_backward,in_validation])

def ran_ahead(rank, size):
    "The last rank fails where the others have counted a batch more, as ranks do that run ahead of their GPU"
    def ahead(learn):
        if rank==size-1: fails()
        with torch.no_grad():
            for b in learn.model[1].buffers(): b.add_(1)
    learn = deep()
    learn.model.insert(1, nn.BatchNorm1d(9))
    with quiet(learn), learn.distrib_ctx(shard=True):
        learn.fit(1)
        how,_ = heard(learn.fit, 1, cbs=At('after_backward', ahead))
        before = [b.clone() for b in learn.model[1].buffers()]
        learn.validate()
        after = [b.tolist() for b in learn.model[1].buffers()]
        learn.fit(1) # compares
    return how,[b.tolist() for b in before],after

@pytest.mark.whole
@pytest.mark.parametrize('size', (pytest.param(2, marks=pytest.mark.whole),3))
def test_ranks_go_on_with_the_same_buffers(size):
    "Those of one rank, since each holds them whole"
    res = on_ranks(partial(ran_ahead, size=size), size, join=False, timeout=100)
    test_eq({how for how,_,_ in res}, {'RankError','RuntimeError'})
    assert res[0][1]!=res[-1][1]
    test_eq([after for _,_,after in res], [res[0][1]]*size)

# One rank alone in a forward pass

def lone(rank, f, **kw):
    learn = deep()
    before = traces(learn.model)
    with quiet(learn), learn.distrib_ctx(shard=True, **kw):
        how = heard(f, learn, rank)
        learn.fit(1)
    return how,traces(learn.model)==before,whole(learn)

def calls(learn, rank):
    if rank==0: learn.model(torch.zeros(2,6))
    learn.fit(1)
def predicts(learn, rank):
    if rank==0: learn.predict(torch.zeros(6))
    learn.fit(1)
def get_preds(learn, rank):
    if rank==0: learn.get_preds()
    learn.fit(1)
def calls_last(learn, rank):
    "The other ranks are about to leave the context"
    if rank==0: learn.model(torch.zeros(2,6))
    learn.validate()
def unit(learn, rank):
    if rank==0: learn.model[2](torch.zeros(2,9))
    learn.fit(1)
def in_a_fit(event):
    def f(learn, rank): learn.fit(1, cbs=At(event, lambda learn: learn.model(torch.zeros(2,6)) if rank==0 else None))
    f.__name__ = f'calls {event}'
    return f
def norms(learn, rank): # torch waits in it without an end, and nobody else does
    learn.fit(1, cbs=At('after_step', lambda learn: learn.model[0].weight.norm().item() if rank==0 else None))

@pytest.mark.parametrize('f', [calls,predicts,get_preds,unit,in_a_fit('after_batch'),in_a_fit('before_batch'),in_a_fit('after_pred'),norms], ids=lambda f: f.__name__)
@pytest.mark.by_default('calls after_batch')
def test_one_rank_alone(f):
    for (how,text),bare,ws in on_ranks(lambda rank: lone(rank, f, patience=3 if f is norms else None), join=False, timeout=100):
        assert how in ('RankError','ValueError') and bare and ('did not move' if f is norms else 'HINT') in text, (how,text,bare)

class Looks(Callback):
    "fastai calls it for its own evaluation too"
    rank0_only = True
    def __init__(self, event, f):
        self.f,self.busy = f,False
        setattr(self, event, self.act)
    def act(self):
        if self.busy: return
        self.busy = True
        self.f(self.learn)

@pytest.mark.parametrize('event', ['after_epoch','after_batch','after_step'])
@pytest.mark.parametrize('look', [lambda learn: learn.model(torch.zeros(2,6)), lambda learn: learn.get_preds()], ids=['model','preds'])
@pytest.mark.by_default('after_step')
def test_a_callback_of_rank_0_that_evaluates(event, look):
    f = lambda rank: lone(rank, lambda learn, rank: learn.fit(1, cbs=Looks(event, look)))[0]
    (how,text),(other,told) = on_ranks(f, join=False, timeout=100)
    assert (how,other)==('RuntimeError','RankError') and 'You let rank 0 alone use a model in shards' in text and 'You let rank 0 alone' in told

def on_all(learn, rank):
    "What all ranks do together is no error, wherever they do it, and a rank that is late is waited for"
    x = torch.zeros(2,6)
    one = DataLoader([(x[0],x[0,:1])], bs=1, num_workers=0) # of which the others have no sample
    for f in (lambda: learn.model(x), lambda: learn.model[2](torch.zeros(2,9)), lambda: learn.get_preds(dl=one)):
        if rank: time.sleep(.5)
        with torch.no_grad(): f()
    for event in ('before_batch','after_pred','after_backward','after_batch'): learn.fit(1, cbs=At(event, lambda learn: learn.model(x)))

@pytest.mark.whole
def test_all_ranks_together(): test_eq([o[:2] for o in on_ranks(lambda rank: lone(rank, on_all), 3, join=False, timeout=100)], [(('went on',''),True)]*3)

def inner(learn, rank): learn.model[2].lin(torch.zeros(2,9))
def copies(learn, rank): deepcopy(learn.model)

@pytest.mark.parametrize('f,hint', [(inner,'transformer_cls_names_to_wrap'), (copies,'cannot be copied. HINT: copy it')])
def test_what_torch_refuses_has_a_hint(f, hint):
    def run(rank):
        learn = deep()
        before = traces(learn.model)
        def go():
            with quiet(learn), learn.distrib_ctx(shard=True): f(learn, rank)
        return heard(go),traces(learn.model)==before
    for (_,text),bare in on_ranks(run, join=False): assert hint in text and bare

# Entering

def enters(rank, change, **kw):
    "How entering ended, and whether the Learner is as before"
    learn = deep()
    change(learn, rank)
    before,values = traces(learn.model),whole(learn)
    def go():
        with quiet(learn), learn.distrib_ctx(shard=True, **kw): pass
    res = heard(go),traces(learn.model)==before,not learn._grab_cbs(DistributedTrainer) and len(learn.cbs)
    return *res,values==whole(learn)

def other_model(learn, rank):
    if rank: learn.model = nn.Linear(6,1)
def hook_after(learn, rank): learn.model[0].bias.register_post_accumulate_grad_hook(print)
def two_dtypes(learn, rank): learn.model[2].lin.bias.data = learn.model[2].lin.bias.data.double()

@pytest.mark.parametrize('change,said', [(other_model,'Ranks have different'), (hook_after,'register_post_accumulate_grad_hook for 0.bias'), (two_dtypes,'have two dtypes')])
@pytest.mark.by_default('hook_after')
def test_what_cannot_be_entered(change, said):
    for (how,text),bare,cbs,same in on_ranks(partial(enters, change=change), join=False):
        assert how=='ValueError' and said in text and bare and same, (how,text,bare,same)

def test_an_odd_model_is_entered():
    "A parameter without dimensions, one that is not contiguous, and one without elements"
    def change(learn, rank):
        learn.model[1].scale = nn.Parameter(torch.tensor(2.))
        learn.model[2].lin.weight = nn.Parameter(torch.randn(9,9).t())
        learn.model[3].none = nn.Parameter(torch.zeros(0,3))
    test_eq([o for o in on_ranks(partial(enters, change=change), 3, join=False)], [(('went on',''),True,4,True)]*3)

@pytest.mark.parametrize('who,at', [(1,0), *(pytest.param(*o, marks=pytest.mark.whole) for o in ((0,2),(2,3)))])
def test_an_error_amid_entering(who, at):
    def change(learn, rank):
        cut,n = Shards._shard,0
        def broken(self, m):
            nonlocal n
            n += 1
            return fails() if n==at+1 else cut(self, m)
        if rank==who: Shards._shard = broken
    for r,((how,text),bare,cbs,same) in enumerate(on_ranks(partial(enters, change=change), 3, join=False)):
        assert how==('RuntimeError' if r==who else 'RankError') and 'on purpose' in text and bare and same, (r,how,text,bare,same)

# Processes that end, or stop

def loses(rank, path):
    signal.signal(signal.SIGTERM, signal.SIG_IGN) # the head's, which ends all ranks when one is gone
    learn = deep()
    before = traces(learn.model)
    with warnings.catch_warnings(record=True) as seen, quiet(learn):
        warnings.simplefilter('always')
        f = lambda: learn.fit(1, cbs=At('after_backward', lambda learn: os.kill(os.getpid(), signal.SIGKILL) if rank==1 else None))
        with learn.distrib_ctx(shard=True, patience=3): how = heard(f)
    w = learn.model[1].lin.weight
    rows = w.isfinite().all(1).tolist()
    (path/str(rank)).write_text(repr((how[0], 'rank 1 failed' in how[1] and 'without an error message' in how[1], traces(learn.model)==before, rows, any('is NaN. HINT: a Checkpoint' in str(o.message) for o in seen))))

def test_a_rank_is_killed(tmp_path):
    "Nine rows are three of each rank"
    with pytest.raises(RankError, match='SIGKILL'): on_ranks(partial(loses, path=tmp_path), 3, join=False, timeout=100)
    for r in (0,2): test_eq(eval((tmp_path/str(r)).read_text()), ('RankError',True,True,[i//3==r for i in range(9)],True))

def stopped(rank, path):
    "Who does not answer for so long counts as lost"
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    learn = deep()
    before = traces(learn.model)
    f = lambda learn: os.kill(os.getpid(), signal.SIGSTOP) if rank==1 else None
    with quiet(learn), learn.distrib_ctx(shard=True, patience=2):
        pids = gather_objs(os.getpid())
        how,text = heard(learn.fit, 1, cbs=At('before_batch', f))
    (path/str(rank)).write_text(repr((how, 'rank 1' in text, traces(learn.model)==before)))
    if rank==2: os.kill(pids[1], signal.SIGKILL)

@pytest.mark.whole
@pytest.mark.filterwarnings('ignore')
def test_a_rank_that_is_stopped(tmp_path):
    with pytest.raises(RankError, match='SIGKILL'): on_ranks(partial(stopped, path=tmp_path), 3, join=False, timeout=100)
    for r in (0,2): test_eq(eval((tmp_path/str(r)).read_text()), ('RankError',True,True))

# Hooks of the user

def hooked(rank):
    learn,seen = deep(),Counter()
    p,frozen = learn.model[2].lin.weight,learn.model[0].bias
    h = p.register_hook(lambda g: seen.update([f'grad {tuple(g.shape)}']))
    frozen.register_hook(lambda g: seen.update(['frozen']))
    learn.model[2].register_forward_hook(lambda *_: seen.update(['forward']))
    learn.model[2].register_full_backward_hook(lambda *_: seen.update(['backward']))
    frozen.requires_grad_(False)
    with quiet(learn), learn.distrib_ctx(shard=True):
        learn.fit(1)
        a = dict(seen)
        try: learn.fit(1, cbs=At('before_batch', fails))
        except Exception: pass
        seen.clear()
        learn.fit(1)
    return a,dict(seen),list(p._backward_hooks.values())!=[] and len(learn.model[2]._forward_hooks)

@pytest.mark.whole
def test_hooks_fire():
    "Also after a process group was replaced"
    n = dict(forward=8, backward=4)|{'grad (9, 9)':4}
    for a,b,left in on_ranks(hooked, 3, join=False): test_eq((a,b,left), (n,n,1))

# Replicas of shards

def on_nodes(f):
    def run(rank):
        os.environ.update(LOCAL_RANK=str(rank%2), LOCAL_WORLD_SIZE='2', GROUP_RANK=str(rank//2), GROUP_WORLD_SIZE='2')
        return f(rank)
    return run

def hybrid():
    from accelerate.utils import FullyShardedDataParallelPlugin
    return dict(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1, sharding_strategy='HYBRID_SHARD'))

def hybrid_fails(rank):
    learn = deep()
    before = traces(learn.model)
    with quiet(learn), learn.distrib_ctx(**hybrid()):
        mesh = learn.model[0].weight.device_mesh
        how = heard(acts, in_backward, learn, rank==3)
        calm(learn)
        learn.fit(1)
    return mesh.shape,how,traces(learn.model)==before,whole(learn)

@pytest.mark.whole
def test_hybrid():
    "A rank of one node fails in its backward pass, in which ranks wait for those of their node, and nodes for each other"
    for r,(mesh,(how,text),bare,ws) in enumerate(res := on_ranks(on_nodes(hybrid_fails), 4, join=False, timeout=50)):
        assert tuple(mesh)==(2,2) and bare and how==('RuntimeError' if r==3 else 'RankError') and 'on purpose' in text, (r,mesh,how,text,bare)
        test_eq(ws, res[0][3])
