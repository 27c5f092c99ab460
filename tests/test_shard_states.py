"A training in shards that is ended anywhere goes on where it was, in shards or not, on any number of ranks"
import pytest
from functools import cache
from tempfile import TemporaryDirectory
from fastcore.test import test_eq
from fastai.basics import *
from fastdist import *
from survive import *
from test_survive import differences,runs

kw = dict(saves=False, every=2)

@cache
def whole(size, drop=True, **how):
    "What the undisturbed run leaves"
    with TemporaryDirectory() as d: return runs(Path(d), size, drop, **kw|how)

# As many ranks in shards: to the bit, with dropout

ends = [Blow('kill the last', 'middle', 0, 1, 2, 4), Blow('kill the first', 'middle', 1, 1, 1, 1), Blow('kill all', 'validation', 1, 0, 3, 0),
    Blow('SIGTERM to one', 'last step', 1, 2, 3, 13), Blow('kill all', 'between fits', 0, 1, 0, 0), *(Blow('power cut', 'while writing', 1, 0, 1, n) for n in (0,7,3,5))]

@pytest.mark.parametrize('i', range(len(ends)), ids=lambda i: str(ends[i]))
def test_it_ends_as_the_undisturbed_run(tmp_path, i):
    size = 2+i%2
    assert runs(tmp_path, size, True, shard=True, blow=ends[i], **kw) is None
    res = runs(tmp_path, size, True, shard=True, **kw)
    for a,b in zip(whole(size, shard=True), res): test_eq(differences(a, b, True), [])

# Other ranks, other layouts

def near(a, b, *parts): return differences({k:a[k] for k in parts}, {k:b[k] for k in parts}, False)

@pytest.mark.parametrize('first,second', (((2,True),(3,True)), ((3,True),(2,False)), ((2,True),(1,False)), ((2,False),(3,True)), ((1,False),(2,True))))
def test_it_goes_on_in_another_layout(tmp_path, first, second):
    (n,shard),(m,then) = first,second
    assert runs(tmp_path, n, False, shard=shard, blow=Blow('kill all', 'middle', 1, 1, 1, 4), **kw) is None
    res = runs(tmp_path, m, False, shard=then, **kw)
    for a,b in zip(whole(1, False)*m, res): test_eq(near(a, b, 'snap','rec','log'), [])
