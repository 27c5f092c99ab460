"All ranks save or stop after one step: asked for by any rank at any moment, by several at once, with nothing exchanged for it"
import random,pytest
from fastai.basics import *
from fastdist import *
from fastdist.comm.collectives import all_reduce
from fastdist.parallel.layout import Requests
from fastcore.test import test_eq
from collectives import counting
from learners import digits

def many(rank, n=300):
    "Steps that exchange a number, in some of which this rank asks for something; what was decided, and how long each request waited"
    rng,res,asked,waited,size = random.Random(rank),[],None,[],this_world().size
    requests = Requests(size)
    for i in range(n):
        if rng.random()<.05: requests.own,asked = rng.choice(Requests.kinds),i
        requests.without(all_reduce(requests.with_local(torch.ones(2)), kind='step')/size)
        res.append(requests.decided())
        if asked is not None and requests.own is None:
            waited.append(i-asked)
            asked = None
    return res,waited

@pytest.mark.parametrize('size', (2,3,4))
def test_all_decide_alike(size):
    out = on_ranks(many, size, timeout=100)
    test_eq([o for o,_ in out], [out[0][0]]*size)
    assert {*Requests.kinds}<={*out[0][0]}
    assert all(o==0 for _,waited in out for o in waited[:1])

@pytest.mark.parametrize('size,save,stop', [(2,1,1), (300,299,1), (1000,1,0), (1000,1,1000)])
def test_rounding_of_large_sums(size, save, stop):
    "The mean of single precision that an exchange gives"
    r = Requests(size)
    total = sum(r._number(o)*n for o,n in zip(r.kinds, (save,stop)))
    r.without(torch.tensor([0.,total/size]))
    test_eq(r.decided(), 'stop' if stop else 'save')

def collectives(rank, cbs):
    learn = digits(n=160)
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx():
        learn.fit(1)
        with counting() as ran: learn.fit(1, cbs=cbs())
    return ran['c10d::allreduce_']

def test_a_checkpoint_adds_no_collective_to_a_step(tmp_path):
    each = lambda cbs: on_ranks(lambda rank: collectives(rank, cbs), join=False)[0]
    few = each(lambda: Checkpoint(tmp_path/'a', minutes=60))-each(lambda: None)
    assert few<5, few
