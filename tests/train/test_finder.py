"Looking for a learning rate on ranks: it finds what one process finds, and leaves behind what it leaves there"
import random,matplotlib,pytest
from contextlib import nullcontext
matplotlib.use('agg')
import matplotlib.pyplot as plt
from fastai.basics import *
from fastai.callback.schedule import *
from fastdist import *
from fastcore.test import test_eq
from learners import digits,tabular

adamw = partial(OptimWrapper, opt=torch.optim.AdamW)
sizes = pytest.mark.parametrize('size', [2,3])

@pytest.fixture(autouse=True)
def no_figures(): plt.close('all')

def make(size=1, n=360, **kw):
    "A Learner with batches of 12 over `size` ranks, which all begin alike"
    set_seed(1)
    return digits(n=n, bs=12//size, path='.', **kw)

def find(learn, num_it=20, **kw):
    with learn.distrib_ctx(), learn.no_bar(), learn.no_logging(): return learn.lr_find(num_it=num_it, **({'show_plot':False} | kw))

def fit(learn, n=1):
    with learn.distrib_ctx(), learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(n, 0.02)

def found(size, n=360, dls_kw=None, **kw):
    "What is suggested, and the curve that led to it"
    learn = make(size, n, dls_kw=dls_kw)
    res = find(learn, **kw)
    return list(res),learn.recorder.lrs,[float(o) for o in learn.recorder.losses]

def check(size, tol=1e-5, **kw):
    "Ranks find the same, and what one process does; the number of steps"
    one,ranks = found(1, **kw),on_ranks(lambda rank: found(size, **kw), size, join=False)
    for o in ranks:
        test_eq(o, ranks[0])
        test_eq(len(o[2]), len(one[2]))
        for a,b in zip(o, one): np.testing.assert_allclose(a, b, rtol=tol)
    return len(one[2])

@sizes
def test_as_one_process(size): test_eq(check(size, suggest_funcs=(valley,minimum,steep)), 20)

@pytest.mark.whole
@sizes
@pytest.mark.parametrize('kw', [dict(), dict(dls_kw=dict(drop_last=False))], ids=['full','ragged'])
def test_several_epochs(size, kw): test_eq(check(size, n=110, **kw), 20)

@pytest.mark.whole
def test_as_many_steps_as_the_loader_has(): test_eq(check(2, num_it=24), 24)

@sizes
def test_stops_where_the_loss_diverges(size):
    n = check(size, 1e-3, start_lr=1e-4, end_lr=1e4, num_it=60)
    assert 10<n<60

@pytest.mark.whole
def test_goes_on_where_it_diverges(): test_eq(check(2, 1e-3, start_lr=1e-4, end_lr=1e2, num_it=30, stop_div=False), 30)

# What is left behind

def states(learn):
    "Weights and buffers, and the optimizer's state; an optimizer that is not there yet counts as a new one"
    if learn.opt is None: learn.create_opt()
    opt = learn.opt.state_dict()['state']
    return {k:v.tolist() for k,v in learn.model.state_dict().items()},[plainly(o) for o in opt]

def plainly(o):
    if isinstance(o, dict): return {k:plainly(v) for k,v in o.items()}
    return o.tolist() if isinstance(o, Tensor) else o

def before_and_after(rank, size, before):
    learn = make(size)
    before(learn)
    new,old = learn.opt is None,states(learn)
    if new: learn.opt = None
    for _ in range(2): find(learn)
    test_eq([a==b for a,b in zip(states(learn), old)], [True]*2)
    return 'grad_avg' in old[1][0],any(p.grad is not None and p.grad.any().item() for p in learn.model.parameters())

@pytest.mark.whole
@sizes
@pytest.mark.parametrize('before', [noop,Learner.create_opt,fit], ids=['none','created','fitted'])
@pytest.mark.by_default('created', 'fitted')
def test_all_is_as_before(size, before):
    test_eq(on_ranks(lambda rank: before_and_after(rank, size, before), size, join=False), [(before is fit,False)]*size)

@pytest.mark.whole
def test_state_of_torchs_optimizers():
    def f(rank):
        learn = make(2, opt_func=adamw)
        fit(learn)
        old = plainly(learn.opt.state_dict()['state'])
        find(learn)
        return old==plainly(learn.opt.state_dict()['state']),len(old)>0
    test_eq(on_ranks(f, join=False), [(True,True)]*2)

def plain_learner(size, nw):
    "A Learner whose gradients are all more than rounding, so that Adam agrees on them"
    set_seed(1)
    data = [(torch.randn(8), i%3) for i in range(201)]
    dls = DataLoaders.from_dsets(data[:-20], data[-20:], bs=12//size, device='cpu', **nw)
    model = nn.Sequential(nn.Linear(8,16,bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16,3))
    return Learner(dls, model, loss_func=CrossEntropyLossFlat(), path='.')

def searched(size, nw, times, stop):
    "Weights, and all that the recorder holds, of fits behind searches; on one rank that of plain fastai"
    learn,rows = plain_learner(size, nw),[]
    with learn.distrib_ctx() if size>1 else nullcontext(), learn.no_bar(), learn.no_logging():
        for i in range(times):
            learn.lr_find(num_it=20, show_plot=False, **stop)
            learn.fit_one_cycle(1, 0.02)
            rows += [*map(list, learn.recorder.values), [float(o) for o in learn.recorder.losses], learn.recorder.lrs]
    return [p.tolist() for p in learn.model.parameters()],rows,random.random()

no_workers,diverges = dict(num_workers=0),dict(start_lr=1e-2, end_lr=1e4)

@pytest.mark.whole
@pytest.mark.parametrize('size,nw,times,stop', [(2,dict(),1,dict()), (2,no_workers,2,diverges), (3,no_workers,2,dict())], ids=['workers','diverges','three'])
@pytest.mark.by_default('workers')
def test_a_later_fit_is_that_of_one_process(size, nw, times, stop):
    one,ranks = searched(1, nw, times, stop),on_ranks(lambda rank: searched(size, nw, times, stop), size, join=False)
    for o in ranks:
        test_eq(o[2], one[2])
        for a,b in zip([*o[0],*o[1]], [*one[0],*one[1]]): np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)

def test_hypers_are_those_of_one_process():
    def f(rank, size):
        learn = make(size)
        find(learn)
        return learn.opt.hypers,learn.opt.frozen_idx
    one = f(0, 1)
    for o in on_ranks(partial(f, size=2), join=False): test_eq(o, one)

@pytest.mark.whole
def test_no_file_and_one_plot():
    def f(rank):
        learn = make(2)
        find(learn, show_plot=True)
        return plt.get_fignums(),[str(o) for o in Path('.').rglob('*')]
    test_eq(on_ranks(f, join=False), [([1],[]),([],[])])

@pytest.mark.whole
def test_plot_without_suggestions():
    def f(rank):
        learn = make(2)
        return find(learn, show_plot=True, suggest_funcs=None),len(plt.get_fignums())
    test_eq(on_ranks(f, join=False), [(None,1),(None,0)])

@pytest.mark.whole
def test_other_learners():
    def f(rank):
        set_seed(1)
        return list(find(tabular(), 10))
    a,b = on_ranks(f, join=False)
    test_eq(a, b)

def by_hand(size, ctx=None, **kw):
    "What a fit of two epochs leaves that a search was added to by hand: it makes no more steps than the fit has"
    learn = make(size)
    with learn.no_bar(), learn.no_logging(), ctx(learn) if ctx else learn.distrib_ctx(): learn.fit(2, cbs=LRFinder(**kw))
    rec,ws = learn.recorder,[p.tolist() for p in learn.model.parameters()]
    return len(rec.lrs),learn.n_epoch,rec.lrs,[float(o) for o in rec.losses],sum(map(list, rec.values), []),ws

@pytest.mark.parametrize('kw', [dict(num_it=100, stop_div=False), dict(num_it=30), dict(start_lr=1e-2, end_lr=1e4)], ids=['long','short','diverges'])
def test_added_by_hand(kw):
    one = by_hand(1, lambda learn: nullcontext(), **kw)
    ranks = on_ranks(lambda rank: by_hand(2, **kw), 2, join=False)
    for o in (by_hand(1, **kw), *ranks, by_hand(1, lambda learn: learn.distrib_ctx(nprocs=2), **kw)):
        test_eq(o[:2], one[:2])
        for a,b in zip(o[2:5], one[2:5]): np.testing.assert_allclose(a, b, rtol=1e-3)
        test_eq(o[5], one[5])

def test_all_steps_where_each_rank_has_a_batch():
    "The script's loader has twice as many batches as two ranks make steps"
    learn = make(1)
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(nprocs=2, split_batches=False): learn.lr_find(num_it=25, stop_div=False, show_plot=False)
    test_eq(len(learn.recorder.lrs), 25)
