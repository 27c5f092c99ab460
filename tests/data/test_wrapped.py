"What a callback puts in `learn.dl` in the place of a loader: something around the share, or batches that every rank goes through"
import random,warnings,pytest
from contextlib import nullcontext
from itertools import islice
from tqdm import tqdm
from fastai.basics import *
from fastdist import *
from fastcore.test import test_eq,test_close

class Around(Callback):
    "Puts what `f` makes of `learn.dl` in its place"
    def __init__(self, f, order, event='before_train'):
        self.f,self.order = f,order
        setattr(self, event, self.act)
    def act(self): self.learn.dl = self.f(self.dl)

def bar(dl): return tqdm(dl, disable=True)
def some(dl): return list(islice(dl, 3))

def trained(bs, ctx, n=31, **kw):
    set_seed(1)
    g = torch.Generator().manual_seed(2)
    x = torch.randn(n+9, 3, generator=g)
    data = list(zip(x, x.sum(1, keepdim=True)))
    dls = DataLoaders.from_dsets(data[:n], data[n:], bs=bs, drop_last=False, num_workers=0, device='cpu')
    learn = Learner(dls, nn.Linear(3,1), loss_func=MSELossFlat(), opt_func=SGD, lr=.05, cbs=Around(**kw) if kw else None)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        with learn.distrib_ctx() if ctx else nullcontext(), learn.no_logging(), learn.no_bar():
            learn.fit(2)
            values = np.array([list(o) for o in learn.recorder.values])
            learn.get_preds(dl=[dls.valid.one_batch()])
    return learn.model.weight.detach(),values,[str(o.message) for o in said if 'learn.dl is ' in str(o.message)]

@pytest.mark.parametrize('size', [2,3])
@pytest.mark.parametrize('f', [bar,some,list,iter])
@pytest.mark.parametrize('event', ['before_train','before_validate'])
def test_around_the_share(size, f, event):
    if f is iter: f = lambda dl: bar(list(dl))
    kw = dict(f=f, order=20, event=event)
    w,values,_ = trained(12, False, **kw)
    for got,vals,said in on_ranks(lambda rank: trained(12//size, True, **kw), size, join=False):
        test_eq(said, [])
        test_close(got, w, 1e-5)
        test_close(vals, values, 1e-5)

@pytest.mark.parametrize('event', ['before_train','before_validate'])
@pytest.mark.parametrize('f,order,name', [(some,0,'list'), (bar,0,'tqdm'), (lambda dl: [(torch.ones(2,3),torch.ones(2,1))], 20, 'list')])
def test_batches_of_every_rank_are_told_of_once(f, order, name, event):
    (_,_,said),(_,_,other) = on_ranks(lambda rank: trained(6, True, f=f, order=order, event=event), join=False)
    test_eq((len(said),other), (1,[]))
    assert f'learn.dl is a {name}' in said[0] and 'order is more than 11' in said[0]

def test_a_list_of_batches_that_was_asked_for(): test_eq([o[2] for o in on_ranks(lambda rank: trained(6, True), join=False)], [[],[]])

class Trips(Callback):
    "Fails on one rank in the midst of a fit"
    def __init__(self, rank): self.rank = rank
    def after_batch(self):
        if self.iter==2 and self.rank==1: raise ValueError('on purpose')

def after_an_error(rank):
    set_seed(1)
    dls = DataLoaders.from_dsets(list(zip(torch.randn(30,3), torch.randn(30,1)))*2, [], bs=4, num_workers=0, device='cpu')
    learn = Learner(dls, nn.Linear(3,1), loss_func=MSELossFlat(), cbs=Trips(rank))
    with learn.distrib_ctx(), learn.no_logging(), learn.no_bar():
        try: learn.fit(1)
        except Exception: return random.random(),np.random.rand(),torch.rand(1).item()

def test_ranks_share_a_random_state_after_an_error(): test_eq(len({*on_ranks(after_an_error, 3, join=False)}), 1)
