"A long shuffled order: drawn once on a node, into memory that its ranks share, and the same as in one process"
import os,random,resource,signal,tracemalloc,pytest,numpy as np
from fastcore.test import test_eq,expect_fail
from fastai.basics import *
from learners import digits
from fastdist import *
from fastdist.base.errors import RankError
from fastdist.job.fork import on_ranks
from fastdist.data import shuffle
from fastdist.data.loader import StepDL,DistributedDL

n = 2**22+5
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

def check(ranks, cls=StepDL):
    "Check that `ranks`, the results of `epochs` of all ranks, are what one process draws"
    rng = random.Random(0)
    orders = [shuffle.shuffled_range(n, rng) for _ in ranks[0][:-1]]
    test_eq([o[-1] for o in ranks], [rng.random()]*len(ranks))
    for k,order in enumerate(orders):
        for r,o in enumerate(ranks):
            alone = cls(loader(0), r, len(ranks))
            test_eq(o[k], order[alone.deal.positions(r)])

@pytest.fixture
def draws(monkeypatch):
    "Count the draws of a process"
    old,draws = shuffle._shuffle,[]
    monkeypatch.setattr(shuffle, '_shuffle', lambda *args: draws.append(1) or old(*args))
    return draws

def held():
    "Return the number of open descriptors of shared orders in this process"
    return sum('memfd:fastdist' in os.path.realpath(o) for o in Path('/proc/self/fd').iterdir())

@pytest.mark.parametrize('cls,size', [(StepDL,2), (StepDL,3), (DistributedDL,3)])
def test_one_rank_draws_for_its_node(cls, size, draws):
    def fn(rank): return epochs(loader(rank), cls),(len(draws),held())
    res,counts = zip(*on_ranks(fn, size))
    test_eq(counts, [(2,0)]+[(0,0)]*(size-1))
    check(res, cls)

def test_an_order_of_64_bits_is_shared_too(monkeypatch):
    monkeypatch.setattr(shuffle, 'int_type', lambda n: np.int64)
    res = on_ranks(lambda rank: epochs(loader(rank)))
    test_eq(res[0][0].dtype, np.int64)
    check(res)

def test_no_rank_holds_the_order():
    def fn(rank):
        share = StepDL(loader(rank, 2**24))
        share._pass.joint = True
        tracemalloc.start()
        share._draw()
        return tracemalloc.get_traced_memory()
    for held,peak in on_ranks(fn, 3): assert held<2**24*4/3+1e6 and peak<2**24*4

def test_ranks_of_several_nodes(monkeypatch, draws):
    def fn(rank):
        monkeypatch.setattr(shuffle, 'node_key', lambda: 'ab'[rank>1])
        return epochs(loader(rank)),len(draws)
    res,counts = zip(*on_ranks(fn, 3))
    test_eq(counts, [2,0,2])
    check(res)

def refuse(monkeypatch): resource.setrlimit(resource.RLIMIT_FSIZE, (n*4,n*4))
def hide(monkeypatch): monkeypatch.setattr(shuffle.os, 'getpid', lambda pid=os.getpid(): 2**22+pid) # as seen from another namespace
def no_linux(monkeypatch): monkeypatch.delattr(os, 'memfd_create')

@pytest.mark.parametrize('how', (refuse,hide,no_linux))
def test_ranks_draw_for_themselves_where_they_cannot_share(how, monkeypatch, draws):
    def fn(rank):
        how(monkeypatch)
        return epochs(loader(rank)),len(draws)
    res,counts = zip(*on_ranks(fn, 3))
    test_eq(counts, [2]*3)
    check(res)

@pytest.mark.parametrize('who', (0,1))
def test_ranks_that_draw_otherwise_get_the_order_of_rank_0(who):
    def fn(rank): return epochs(loader(rank, **(dict(shuffle_fn=lambda o: o[::-1]) if rank==who else {})), k=1)
    a,b = on_ranks(fn)
    order = np.arange(n)[::-1] if who==0 else shuffle.shuffled_range(n, random.Random(0))
    for r,o in enumerate((a,b)): test_eq(o[0], order[StepDL(loader(0), r, 2).deal.positions(r)])

def test_ranks_with_different_numbers_of_samples_get_the_order_of_rank_0():
    a,b = on_ranks(lambda rank: epochs(loader(rank, n+rank), k=1))
    order = shuffle.shuffled_range(n, random.Random(0))
    for r,o in enumerate((a,b)): test_eq(o[0], order[StepDL(loader(0), r, 2).deal.positions(r)])

def failing(rank, how, path):
    "A fit whose rank 0 fails in the midst of its draw"
    def fail(*args): os.kill(os.getpid(), signal.SIGKILL) if how=='kill' else 1/0
    learn,old = digits(),shuffle._interchange
    learn.dls.train.n = n
    if how=='kill': signal.signal(signal.SIGTERM, signal.SIG_IGN) # the head's, which ends all ranks when one is gone
    shuffle._interchange = old if rank else fail
    with learn.no_logging(), learn.no_bar(), learn.distrib_ctx():
        try: learn.fit(1)
        except Exception as e: said = f'{type(e).__name__} {getattr(e, "rank", None)}'
        (path/str(rank)).write_text(f'{said} {held()}')

def told(path): return [o.read_text() for o in sorted(path.iterdir())]

def test_all_ranks_hear_of_a_draw_that_fails(tmp_path):
    on_ranks(lambda rank: failing(rank, 'error', tmp_path), 3, join=False)
    test_eq(told(tmp_path), ['ZeroDivisionError None 0',*['RankError 0 0']*2])

def test_all_ranks_hear_of_a_rank_that_is_killed_while_it_draws(tmp_path):
    with expect_fail(RankError, 'SIGKILL'): on_ranks(lambda rank: failing(rank, 'kill', tmp_path), 3, join=False)
    test_eq(told(tmp_path), ['RankError 0 0']*2)
