"A rank's memory goes with its share: what 1,024 ranks hold of an order, by arithmetic"
import random,tracemalloc,pytest,numpy as np
from torch.utils.data import DataLoader as TorchLoader
from fastcore.test import test_eq
from fastai.basics import *
from fastdist import DistributedDL
from fastdist.data.sharding import *
from fastdist.data.loader import StepDL

def own(n, **kw): return DataLoader(range(n), bs=3, **kw)
def torchs(n): return TorchLoader(range(n), batch_size=3)

def share_of(cls, dl, rank, size=1024):
    "The samples of `rank`, drawn without a group"
    return cls(dl, rank, size)._draw()

shuffled = partial(own, shuffle=True)

@pytest.mark.parametrize('mk,n', [*((mk,n) for mk in (own,torchs) for n in (777, 3*1024*2, 3*1024*2+777)), (shuffled,1777)])
@pytest.mark.by_default('own-6921', 'torchs-777')
def test_1024_ranks_share_an_order(mk, n):
    def one(cls, rank):
        dl = mk(n)
        dl.rng = random.Random(0)
        return share_of(cls, dl, rank)
    order = random.Random(0).sample(range(n), n) if mk is shuffled else list(range(n))
    parts,g = [np.array(one(StepDL, r), dtype=int) for r in range(1024)],3*1024
    for k in range(0, n, g): test_eq(np.concatenate([o[k//1024:k//1024+3] for o in parts])[:n-k].tolist(), order[k:k+g])
    blocks = np.concatenate([np.array(one(DistributedDL, r)) for r in range(1024)])
    test_eq(blocks.tolist(), (order*(1024//n+2))[:-(-n//1024)*1024])
    assert all(len(parts[r])>=max(map(len, parts))-2 for r in (0,1,1023))

def peak_of(f):
    tracemalloc.start()
    try: return f(),tracemalloc.get_traced_memory()[1]
    finally: tracemalloc.stop()

@pytest.mark.parametrize('cls', (DistributedDL,StepDL))
@pytest.mark.parametrize('mk', (own,torchs))
def test_a_share_of_an_order_in_sequence_takes_memory_for_itself(cls, mk):
    share = cls(mk(10**8), 1023, 1024)
    idxs,peak = peak_of(share._draw)
    assert len(idxs)<10**5 and peak<16*len(idxs)

@pytest.mark.whole
def test_a_shuffled_order_takes_one_array():
    share = StepDL(own(400_000, shuffle=True), 7, 8)
    idxs,peak = peak_of(share._draw)
    assert idxs.nbytes==200_000 and peak<6*400_000+1.5e6

def test_an_order_past_32_bits():
    share = StepDL(own(2**33), 2**20-1, 2**20)
    idxs = share._draw()
    test_eq((idxs.dtype, len(idxs), idxs[-1]), (np.int64, 2**13, 2**33-1))
