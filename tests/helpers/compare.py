"What each of several cases gives in one process and on ranks, compared; ranks are forked once for all of them"
import os,pytest,random,traceback
from contextlib import nullcontext
from copy import deepcopy
from torch.testing import assert_close
from fastcore.test import test_eq
from fastai.vision.all import *
from fastdist import *

runs = (37,4),(24,4),(7,4),(2,1),(1,4)
few = (37,4),(7,4),(1,4)
sizes = pytest.mark.parametrize('size', (2,3))
def cases(**kw): return pytest.mark.parametrize('cases', [kw], ids=['all'])

def assert_same(a, b, rtol=1e-5, atol=1e-6):
    "`b` is what `a` is: types, lengths, and values but for the rounding of float32"
    test_eq(type(b), type(a))
    if isinstance(a, dict):
        test_eq(list(b), list(a))
        for k in a: assert not (d := difference(a[k], b[k], rtol=rtol, atol=atol)), f'{k}: {d}'
    elif is_listy(a):
        test_eq(len(b), len(a))
        for x,y in zip(a, b): assert_same(x, y, rtol, atol)
    elif not isinstance(a, (torch.Tensor,np.ndarray,float)): test_eq(b, a)
    else: assert_close(*(torch.as_tensor(o).as_subclass(Tensor) for o in (b,a)), rtol=rtol, atol=atol, equal_nan=True)

class Failure(str): pass

def difference(a, b, **tol):
    if isinstance(b, Failure): return b
    try: assert_same(a, b, **tol)
    except AssertionError as e: return '; '.join(str(e).split('\n')[:4])

def whole(res):
    "What is in shards is put together, which all ranks do alike"
    if isinstance(res, dict): return {k:whole(v) for k,v in res.items()}
    if type(res) in (list,tuple,L): return type(res)(whole(o) for o in res)
    return res.full_tensor() if hasattr(res, 'full_tensor') else res

def call(f, learn): return whole(f(learn))
def attempt(f, learn):
    "What stops one case on a rank is not to hide the others"
    try: return whole(f(learn))
    except Exception as e:
        traceback.print_exc()
        return Failure(f'{type(e).__name__}: {e}')

def begin_again(learn, weights, rank):
    "As if no case had been there before; random state is another on each rank"
    random.seed(5+rank)
    np.random.seed(5+rank)
    torch.default_generator.manual_seed(5+rank) # `torch.manual_seed` records the stack for each kind of device that is not there
    learn.model.load_state_dict(weights)
    learn.opt = None
    for dl in learn.dls.loaders: dl.rng = random.Random(5+rank)

def inside(mk, cases, n, bs, rank=None, call=call):
    "What each of `cases` makes of a Learner, inside the context if there is a `rank`"
    learn,res = mk(n, bs, rank or 0),{}
    weights = deepcopy(learn.model.state_dict())
    with learn.distrib_ctx() if rank is not None else nullcontext(), learn.no_bar(), learn.no_logging():
        for k,f in cases.items():
            begin_again(learn, weights, rank or 0)
            res[k] = call(f, learn)
    return res

def on_one(mk, size, cases, runs): return [inside(mk, cases, n, bs*size) for n,bs in runs]
def on_all(mk, size, cases, runs, **kw):
    return on_ranks(lambda rank: [inside(mk, cases, n, bs, rank, **kw) for n,bs in runs], size, timeout=200, join=False)

whole_tables = 'WHOLE' in os.environ

def usual(table, *names):
    "Return the rows `names` of `table`, which run by default; with `--whole` all"
    return table if whole_tables else {k:table[k] for k in names}

def divided(cases, runs):
    "Return those of `cases` that each of `runs` has: all in the first, and one in the second and in the last; with `--whole` all in all"
    def has(i, j): return whole_tables or not i or i in (1,len(runs)-1) and (i-1)%len(cases)==j
    return [{k:f for j,(k,f) in enumerate(cases.items()) if has(i, j)} for i in range(len(runs))]

def check(mk, size, cases, runs=few, **tol):
    "Each of `cases` gives on every rank what it gives in one process; one difference is told for each"
    plan,wrong = [(*run,cs) for run,cs in zip(runs, divided(cases, runs)) if cs],{}
    one = [inside(mk, cs, n, bs*size) for n,bs,cs in plan]
    many = on_ranks(lambda rank: [inside(mk, cs, n, bs, rank, call=attempt) for n,bs,cs in plan], size, timeout=200, join=False)
    for rank,res in enumerate(many):
        for (n,bs,cs),a,b in zip(plan, one, res):
            for k in cs:
                d = difference(a[k], b[k], **tol)
                if d: wrong.setdefault(k, f'{k} on rank {rank} with n,bs={n},{bs}: {d}')
    assert not wrong, '\n'.join(wrong.values())

def learner(data, model, bs, rank, loss=None, drop_last=True, **kw):
    set_seed(5+rank)
    dls = DataLoaders.from_dsets(*data, bs=bs, drop_last=(drop_last,False), num_workers=0, device='cpu', **kw)
    return Learner(dls, model, loss_func=loss or CrossEntropyLossFlat(), opt_func=SGD)
