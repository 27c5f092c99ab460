"Which rank is named late: simulated steps, with many seeds, of ranks that are late, alike, or late once"
import numpy as np,pytest
from functools import partial
from fastcore.test import test_eq
from fastdist.tools.step_clock import parts
from fastdist.tools.timeline import Steps,find_late,sentence

def steps(own):
    "Steps of ranks whose data take `own` ms and that then wait for the last one"
    ms = np.zeros((*own.shape, len(parts)))
    ms[...,parts.index('data')],ms[...,parts.index('exchange')] = own,own.max(0)+1-own
    return Steps(ms)

def noise(g, size, n): return 5+g.gamma(2., .15, (size,n))
def heavy(g, size, n): return noise(g, size, n)+.5*g.pareto(1.3, (size,n))
def late(g, size, n, by=1.5, kind=noise): return kind(g, size, n)+by*(np.arange(size)==1)[:,None]
def hiccup(g, size, n, ms=1000):
    own = noise(g, size, n)
    own[g.integers(size),g.integers(n)] += ms
    return own

def turns(g, size, n, k=1):
    own = noise(g, size, n)
    own[np.arange(n)//k%size,np.arange(n)] += 8
    return own

def loaded(g, size, n, workers, slow, kind=noise):
    "Two epochs in which each rank's `workers` fetch two batches each ahead, which takes `slow` ms on rank 1 and 1 ms on others"
    work,n = kind(g, size, n),n//2
    took = np.where(np.arange(size)==1, slow, 1.)[:,None]*g.uniform(.95, 1.1, (size,2*n))
    own = np.zeros((size,2*n))
    for e in (0,n):
        now,free,met = 0.,np.zeros((size,workers)),np.zeros(n)
        for i in range(n):
            w = free[:,i%workers] = np.maximum(free[:,i%workers], met[i-2*workers] if i>=2*workers else 0.)+took[:,e+i]
            met[i] = max(now, w.max())
            own[:,e+i] = np.maximum(w-now, 0.)+work[:,e+i]
            now += own[:,e+i].max()+1
    return own[:,1:]

def wrong(make, want, size, n, seeds):
    "Part of the `seeds` for which another rank than `want` is named, or none, or any if that is `None`"
    found = [find_late(steps(make(np.random.default_rng(o), size, n))).ranks for o in range(seeds)]
    return np.mean([o!=([] if want is None else [want]) for o in found])

def sizes(f): return pytest.mark.parametrize('size', (2,3,4))(pytest.mark.parametrize('n', (42,200))(f))
def check(make, want, size, n, most=.02, seeds=60):
    part = wrong(make, want, size, n, seeds)
    assert part<=most, f'{part:.0%}'

@sizes
@pytest.mark.parametrize('workers', (1,2,3,4,8,16))
def test_workers_that_fetch_ahead(workers, size, n):
    if n/workers>7: check(partial(loaded, workers=workers, slow=12*workers), 1, size, n)

@sizes
@pytest.mark.parametrize('workers', (2,4))
def test_workers_and_heavy_tails(workers, size, n): check(partial(loaded, workers=workers, slow=20*workers, kind=heavy), 1, size, n, most=.07)

@pytest.mark.parametrize('size', (2,3,4))
@pytest.mark.parametrize('n', (79,85,157))
def test_one_epoch_in_which_each_fourth_step_waits(n, size):
    "Ranks are alike in the first eight steps, whose batches were fetched while they began; every later block of steps has one that waits"
    def own(g, size, n):
        own = noise(g, size, n)
        own[1,8::4] += 120
        return own
    check(own, 1, size, n)

@sizes
def test_workers_and_a_hiccup(size, n):
    check(lambda g,size,n: np.maximum(loaded(g, size, n, 4, 48), hiccup(g, size, n, 300)[:,1:]), 1, size, n)

lates = dict(always=late, heavy=partial(late, by=6, kind=heavy), and_a_hiccup=lambda g,size,n: late(g, size, n, 4)+hiccup(g, size, n, 200))
@sizes
@pytest.mark.parametrize('k', lates)
def test_late_in_all_steps(k, size, n): check(lates[k], 1, size, n, most=.07)

nobody = dict(alike=noise, heavy=heavy, hiccup=hiccup, turns=turns, longer_turns=partial(turns, k=4),
    hiccup_and_tails=lambda g,size,n: hiccup(g, size, n)+heavy(g, size, n), few=lambda g,size,n: sum(hiccup(g, size, n, 60) for _ in range(5)),
    transfer=lambda g,size,n: np.zeros((size,1))+noise(g, 1, n))
@sizes
@pytest.mark.parametrize('k', nobody)
def test_nobody(k, size, n): check(nobody[k], None, size, n)

def test_two_of_four():
    make = lambda g,size,n: np.where((np.arange(size)%2==1)[:,None], 2., 0)+noise(g, size, n)
    test_eq([find_late(steps(make(np.random.default_rng(o), 4, 42))).ranks for o in range(20)], [[1,3]]*20)

def test_two_of_four_with_heavy_tails():
    make = lambda g: np.where((np.arange(4)%2==1)[:,None], 4., 0)+heavy(g, 4, 200)
    assert np.mean([find_late(steps(make(np.random.default_rng(o)))).ranks==[1,3] for o in range(60)])>.75

def test_by_how_much():
    "What the others wait for it in the mean over all steps, also where that is in a few of them"
    own = np.full((3,40), 10.)
    own[1,::4] += 40
    res = find_late(steps(own))
    test_eq((res.ranks,res.by,res.part,res.share), ([1],10.,'data',10/21))
    test_eq(sentence(steps(own)), 'rank 1 is late by 10 ms a step, in data; the others wait 48% of the time (40 steps of 21 ms)')

def test_what_is_said_where_no_rank_is_named():
    own = np.full((2,40), 9.)
    own[1,[3,17]] += 100
    test_eq(sentence(steps(own)), 'no rank is late throughout; ranks wait 17% of the time (40 steps of 15 ms)')
    test_eq(sentence(steps(np.array([[9.]*40,[9.5]*40]))), 'no rank is late throughout; ranks wait 2% of the time (40 steps of 10.5 ms)')
    test_eq(sentence(steps(own[:,3:6])), 'no rank is late throughout; ranks wait 38% of the time (3 steps of 43.3 ms)')
    test_eq(sentence(steps(own[:,:1])), 'no rank is late throughout; ranks wait 0% of the time (1 step of 10 ms)')
