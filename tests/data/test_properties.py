"What the arithmetic promises, for whatever hypothesis finds: shuffles, shares of an order, states of metrics, sums of batch norm"
import random
from hypothesis import given
from hypothesis.strategies import booleans,data,floats,integers,lists,sampled_from
from fastai.basics import *
from fastcore.test import test_eq
from fastdist.evaluate.metrics import *
from fastdist.parallel.norms import *
from fastdist.data.sharding import *

sizes,bss,counts = integers(1, 9),integers(1, 17),integers(0, 400)

@given(integers(0, 3000) | sampled_from([1999,2000,2001,4095,4096,4097]), integers(0, 2**64), integers(0, 700))
def test_a_shuffle_is_pythons(n, seed, drawn):
    "The same permutation, and the same state afterwards, wherever in its block of draws the generator stands"
    mine,its = random.Random(seed),random.Random(seed)
    for rng in (mine,its): [rng.random() for _ in range(drawn)]
    test_eq(shuffled_range(n, mine).tolist(), its.sample(range(n), n))
    test_eq(mine.getstate(), its.getstate())

@given(counts, sizes)
def test_parts_are_even_and_follow_each_other(n, size):
    bounds = [part(n, r, size) for r in range(size)]
    test_eq([0,*[b for _,b in bounds]], [*[a for a,_ in bounds],n])
    assert max(b-a for a,b in bounds)-min(b-a for a,b in bounds)<=1

@given(counts, sizes)
def test_blocks_are_the_order_padded_from_its_start(n, size):
    whole = np.concatenate([block(n, r, size) for r in range(size)]).tolist()
    test_eq(whole, [i%max(n, 1) for i in range(ceil_div(n, size)*size)])

def steps(pos, bs): return [pos[i:i+bs].tolist() for i in range(0, len(pos), bs)]

def unpadded(n, bs, rank, size, drop=False):
    full,m = divmod(n, bs*size)
    lo,hi = part(0 if drop else m, rank, size)
    return slices(n, bs*size, rank, size, drop)[:full*bs+hi-lo]

@given(counts, bss, sizes, booleans())
def test_slices_of_a_step_are_the_batch_of_one_process(n, bs, size, drop):
    g = bs*size
    ranks = [steps(unpadded(n, bs, r, size, drop), bs) for r in range(size)]
    want = steps(np.arange(n//g*g if drop else n), g)
    test_eq([sum((o[k] for o in ranks if k<len(o)), []) for k in range(len(want))], want)
    assert max(map(len, ranks), default=0)==len(want)

@given(counts, bss, sizes, booleans())
def test_padding_makes_the_same_steps_and_adds_one_sample_at_most(n, bs, size, drop):
    for r in range(size):
        mine,padded = unpadded(n, bs, r, size, drop),slices(n, bs*size, r, size, drop)
        test_eq(len(steps(padded, bs)), n//(bs*size) if drop else ceil_div(n, bs*size))
        test_eq(padded[:len(mine)], mine)
        assert len(padded)-len(mine)<=1

@given(counts, bss, sizes, booleans())
def test_a_batch_of_any_size_is_divided(n, g, size, drop):
    partitions = [Partition(Division(r, size, splits=True), n, g, drop) for r in range(size)]
    ranks = [steps(o.positions(r), o.each) for r,o in enumerate(partitions)]
    want = steps(np.arange(n//g*g if drop else n), g)
    for k,batch in enumerate(want):
        real = [o[k] if d.weights.get(k, d.full) else [] for o,d in zip(ranks, partitions)]
        test_eq(sum(real, []), batch)
        test_close([d.weights.get(k, d.full)*len(batch)/size for d in partitions], list(map(len, real)))
    test_eq([len(o) for o in ranks], [len(want)]*size)

@given(lists(integers(-99, 99)), data())
def test_what_is_picked_is_the_same_from_a_list_and_an_array(idxs, draw):
    pos = np.array(draw.draw(lists(integers(0, len(idxs)-1))) if idxs else [], dtype=int)
    test_eq(listed(pick(np.array(idxs, dtype=int), pos)), pick(idxs, pos))

# What ranks have counted

def divided(n, bs, size):
    "The positions of each rank in each of its batches, and the sizes of these"
    ranks = [steps(unpadded(n, bs, r, size), bs) for r in range(size)]
    return ranks,[list(map(len, o)) for o in ranks]

@given(counts, bss, sizes)
def test_batches_of_ranks_in_turn_are_the_order(n, bs, size):
    ranks,lens = divided(n, bs, size)
    test_eq(sum(in_turn([sum(o, []) for o in ranks], lens), []), list(range(n)))

def held(xs):
    "What a metric may hold after the samples `xs`"
    return dict(n=5+len(xs), total=torch.tensor([1.,sum(xs)]), counts=np.bincount([x%7 for x in xs], minlength=7), all=list(xs),
        by={x%3:[o for o in xs if o%3==x%3] for x in xs}, both=[len(xs),float(sum(xs))])

zero = held([])|dict(both=[0,0.])

@given(lists(integers(-50, 50), min_size=1, max_size=80), bss, integers(1, 5))
def test_states_of_ranks_merge_into_that_of_one_process(xs, bs, size):
    ranks,lens = divided(len(xs), bs, size)
    parts = [(held([xs[i] for i in sum(o, [])]),l) for o,l in zip(ranks, lens) if o]
    res,one = merge(zero, *map(list, zip(*parts))),held(xs)
    res['by'],one['by'] = [{k:sorted(v) for k,v in o['by'].items()} for o in (res,one)] # a rank does not tell which batch the items of a group came with
    for k in one: test_eq(res[k], one[k])

@given(lists(floats(-9, 9), max_size=80), bss, sizes, booleans())
def test_losses_of_slices_are_those_of_batches(xs, bs, size, summed):
    ranks,lens = divided(len(xs), bs, size)
    batches,rows = steps(np.array(xs), bs*size),torch.zeros(size, len(lens[0]), 2, dtype=torch.float64)
    for r,o in enumerate(ranks):
        for k,b in enumerate(o): rows[r,k] = torch.tensor([sum(xs[i] for i in b), len(b)/(len(batches[k]) if summed else 1)], dtype=torch.float64)
    for o in lens: o += [0]*(len(lens[0])-len(o)) # a rank without samples makes the step
    total,n = batch_losses([*rows], lens)
    want = sum(sum(b)*(len(b) if summed else 1) for b in batches)
    assert n==len(xs) and abs(float(total)-want)<1e-9*(1+sum(map(abs, xs))*len(xs))

@given(lists(integers(0, 6), min_size=1, max_size=6).filter(any), integers(1, 4), integers(0, 1000), floats(-1e4, 1e4))
def test_batch_norm_of_uneven_ranks_is_that_of_all(ns, channels, seed, shift):
    "Far from zero too, where a sum of squares would cancel"
    x = torch.randn(sum(ns), channels, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))+shift
    means = [o.mean(0) if len(o) else o.new_zeros(channels) for o in x.split(ns)]
    mean,var,n = combine(torch.stack([torch.cat([m, (o-m).square().sum(0), o.new_tensor([len(o)])]) for m,o in zip(means, x.split(ns))]))
    test_eq(n.item(), sum(ns))
    torch.testing.assert_close(mean, x.mean(0), rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(var, x.var(0, unbiased=False), rtol=1e-9, atol=1e-9)
