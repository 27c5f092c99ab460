"A shuffled order: the same on all ranks and in one process, of which a rank keeps its share"
import random,tracemalloc,pytest,numpy as np
from fastcore.test import test_eq
from fastai.basics import *
from fastdist import *
from fastdist.data.sharding import shuffled_range
from fastdist.data.loader import StepDL,DistributedDL

n = 4099
def loader(rank, n=n, **kw):
    dl = DataLoader(range(n), bs=3, shuffle=True, num_workers=0, **kw)
    dl.rng = random.Random(rank) # rank 0's is the one that counts
    return dl

def epochs(dl, cls=StepDL, k=2):
    "The shares of this rank of `k` epochs, and what the generator of `dl` draws next"
    share,res = cls(dl),[]
    for _ in range(k):
        share._pass.joint = True
        res.append(share._draw().copy())
    return *res,dl.rng.random()

@pytest.mark.parametrize('cls,size', [(StepDL,2), (StepDL,3), (DistributedDL,3)])
def test_ranks_draw_what_one_process_draws(cls, size):
    "The first epochs of fastai's own loader, and what its generator draws next"
    ranks,alone = on_ranks(lambda rank: epochs(loader(rank), cls), size),loader(0)
    orders = [np.array(alone.get_idxs()) for _ in range(2)]
    test_eq([o[-1] for o in ranks], [alone.rng.random()]*size)
    for k,order in enumerate(orders):
        for r,o in enumerate(ranks): test_eq(o[k], order[cls(loader(0), r, size).partition.positions(r)])

def test_memory_of_an_order():
    "15 bytes a sample at the peak, so that 10 million take 150 MB"
    n = 2**18
    def fn(rank):
        share = StepDL(loader(rank, n))
        share._pass.joint = True
        tracemalloc.start()
        share._draw()
        return tracemalloc.get_traced_memory()
    for held,peak in on_ranks(fn, 3): assert held<n*4/3+1e5 and peak<n*15, (held,peak)

@pytest.mark.parametrize('who', (0,1))
def test_ranks_that_draw_otherwise_get_the_order_of_rank_0(who):
    def fn(rank): return epochs(loader(rank, **(dict(shuffle_fn=lambda o: o[::-1]) if rank==who else {})), k=1)
    a,b = on_ranks(fn)
    order = np.arange(n)[::-1] if who==0 else shuffled_range(n, random.Random(0))
    for r,o in enumerate((a,b)): test_eq(o[0], order[StepDL(loader(0), r, 2).partition.positions(r)])

def test_ranks_with_different_numbers_of_samples_get_the_order_of_rank_0():
    a,b = on_ranks(lambda rank: epochs(loader(rank, n+rank), k=1))
    order = shuffled_range(n, random.Random(0))
    for r,o in enumerate((a,b)): test_eq(o[0], order[StepDL(loader(0), r, 2).partition.positions(r)])
