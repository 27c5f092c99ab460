"A training that is ended anywhere, by whatever, on any number of ranks, ends where the undisturbed run ends when it is started again"
import itertools,os,pytest,random,shutil,warnings
from copy import copy
from functools import cache,partial
from tempfile import TemporaryDirectory
from fastcore.test import test_eq
from fastai.basics import *
from fastdist import *
from fastdist.state.folder import States
from fastdist.base.values import leaves
from compare import usual
from procs import alive
from survive import *

firsts,seconds = (1,2,3),(1,2,3,4)

# What is compared

def all_of(left): return {k:v for k,v in leaves('', left) if not k.startswith('reads')}

def is_near(a, b, exact):
    "Return whether `b` is `a`: to the bit if `exact`, else to the law's tolerance"
    if not isinstance(a, _numbers) or not isinstance(b, _numbers): return type(a) is type(b) and a==b
    if exact and type(a) is not type(b): return False
    a,b = (torch.as_tensor(o).as_subclass(Tensor) for o in (a,b))
    return torch.equal(a, b) if exact or not a.is_floating_point() else a.shape==b.shape and torch.allclose(a, b.to(a.dtype), rtol=1e-5, atol=1e-6)

_numbers = float,Tensor,np.ndarray,np.generic

def differences(a, b, exact):
    "Return what differs between what two runs left, by name"
    a,b = all_of(a),all_of(b)
    return [f'{k}: {a.get(k, "missing")} became {b.get(k, "missing")}' for k in {**a, **b} if k not in a or k not in b or not is_near(a[k], b[k], exact)]

# Runs

def clear(path):
    for f in [path/'struck', path/'validating', *path.glob('raise*')]: f.unlink(missing_ok=True)
    shutil.rmtree(path/'pids', ignore_errors=True)

def runs(path, size, drop, **kw):
    "Run the script on forked ranks; return what each left, and `None` where it was ended"
    clear(path)
    try: res = on_ranks(partial(train, path=path, size=size, drop=drop, **kw), size, timeout=60, join=False)
    except RankError as e: res,error = None,str(e)
    assert not [pid for pid in others(path).values() if alive(pid)]
    assert res or (path/'struck').exists(), error
    return res

@cache
def undisturbed(size, drop):
    with TemporaryDirectory() as d: return runs(Path(d), size, drop)

# The table

def drawn(how, where, n):
    "Return the `Blow` of one run, and what `Checkpoint` gets for `every`"
    rng = random.Random(f'{how} {where} {n}')
    fit,step = rng.randrange(2),{'first step':0, 'middle':rng.choice((1,2)), 'while writing':rng.choice((0,1))}.get(where, steps-1)
    if where=='between fits': fit,epoch = 0,epochs[0]-1
    else: epoch = rng.randrange(1 if where=='while writing' else epochs[fit])
    blow = Blow(how, where, fit, epoch, step, rng.randrange(60))
    return blow,blow.total if how=='power cut' else rng.choice((1,2)) if where=='while writing' else rng.choice((1,2,3,5))

def all_drawn(how, where, n):
    "Return what `drawn` does for each run that is ended"
    if where!='twice': return [drawn(how, where, n)]
    one,every = drawn(how, where, n)
    two,one.step = copy(one),0
    one.epoch = two.epoch = one.epoch-1 if one.epoch else 0
    return [(o, o.total if how=='power cut' else every) for o in (one,two)]

def survives(path, how, where, first, second, n=0):
    "Return what differs from the undisturbed run"
    exact,res = first==second,None
    kw = dict(path=path, drop=exact)
    for i,(blow,every) in enumerate(all_drawn(how, where, f'{first} {second} {n}')):
        res = runs(size=second if i else first, blow=blow, every=every, **kw)
        if not (path/'struck').exists(): return [f'the place was not reached: {blow}']
    res = runs(size=second, every=every, plain=n%2 and second==1, **kw)
    if res is None: return [f'it was ended by itself: {blow}']
    whole = undisturbed(first, True) if exact else undisturbed(1, False)*second
    return [f'rank {r}: {o}' for r,(a,b) in enumerate(zip(whole, res)) for o in differences(*(a,b) if exact or not r else ({'snap':o['snap']} for o in (a,b)), exact)]

whole = list(itertools.product(hows, wheres, firsts, seconds))

def sample(k=4):
    "Combinations by chance, none of which has a row or a column of another"
    rng,cols = random.Random(5),[hows,wheres,list(itertools.product(firsts, seconds))]
    hs,ws,ns = ([o for _ in range(2) for o in rng.sample(col, len(col))][:k] for col in cols)
    return [(h,w,*n) for h,w,n in zip(hs, ws, ns)]

def pytest_generate_tests(metafunc):
    if 'combination' not in metafunc.fixturenames: return
    n = metafunc.config.getoption('--whole')
    its = sample() if n is None else random.Random(n).sample(whole, len(whole))
    metafunc.parametrize('combination', its, ids=[f'{h}, {w}: {a} then {b}' for h,w,a,b in its])

def table(ended):
    "Return the lines of the table of all combinations, from the names of the tests that have `passed` and `failed`"
    count = lambda kind, h, w: sum(f'[{h}, {w}: ' in o for o in ended[kind])
    def cell(h, w):
        bad,good = (count(o, h, w) for o in ('failed','passed'))
        return f'{bad} of {bad+good} bad' if bad else f'{good} ok' if good else '-'
    return [' '.join(f'{o:14}' for o in row) for row in [['',*wheres], *([h,*(cell(h, w) for w in wheres)] for h in hows)]]

def test_survives(combination, tmp_path, request):
    wrong = survives(tmp_path, *combination, request.config.getoption('--whole') or 0)
    assert not wrong, '\n'.join(wrong[:20])

# What else a script that is started again meets

def ended(path, size, drop=False, **kw):
    "Begin a training that is asked to stop in the second epoch of its second fit"
    assert runs(path, size, drop, blow=Blow('SIGTERM to all', 'middle', 1, 1, 1, 0), every=1, **kw) is None

@pytest.mark.whole
@pytest.mark.parametrize('size', (1,2))
def test_what_is_done_is_not_done_again(tmp_path, size):
    "No step is made and no sample is read, and all is as if it had been trained there"
    runs(tmp_path, size, True, every=3)
    res = runs(tmp_path, size, True, every=3)
    for a,b in zip(undisturbed(size, True), res): test_eq((differences(a, b, True), b['reads']), ([], [0,0]))

foreign = dict(model=(dict(width=20),'another model'), data=(dict(n=44),'number of training samples was 43, is 44'), batch=(dict(bs=5),'samples on all ranks together'),
    epochs=(dict(epochs=(4,3)),'number of epochs was 2, is 4'))

@pytest.mark.whole
@pytest.mark.parametrize('size', (1,2))
@pytest.mark.by_default('2')
def test_a_state_of_another_training_changes_nothing(tmp_path, size):
    ended(tmp_path, size)
    for kw,text in usual(foreign, 'model', 'epochs').values():
        for kind,said,same,reads in on_ranks(partial(outcome, path=tmp_path, size=size, **kw), size, join=False):
            assert kind in ('ResumeError','RankError') and text in said and same and not reads, (kind,said,same,reads)
    res = runs(tmp_path, size, False, every=1)
    for a,b in zip(undisturbed(size, False), res): test_eq(differences(a, b, True), [])

def test_a_foreign_state_of_a_later_fit(tmp_path, monkeypatch):
    "The end of the first fit was not kept, so a later state is put back for it"
    monkeypatch.setattr(States, 'pins', 2)
    for width in (16,16): test_eq(on_ranks(partial(four_fits, path=tmp_path, width=width), 1, join=False), [None])
    (said,same), = on_ranks(partial(four_fits, path=tmp_path, width=20), 1, join=False)
    assert 'another model: body.0.bias was of shape (16,), is of shape (20,)' in said and same

def warned(rank, **kw):
    "Return what `train` does, and the warnings in it"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('default')
        return train(rank, **kw),[str(o.message) for o in said]

@pytest.mark.parametrize('size', (1,2))
@pytest.mark.by_default('2')
def test_a_torn_state_is_left_for_the_one_before(tmp_path, size):
    ended(tmp_path, size)
    newest = max((tmp_path/'states').glob('0*'))
    os.truncate(newest/'tensors.safetensors', (newest/'tensors.safetensors').stat().st_size-7)
    res,said = zip(*on_ranks(partial(warned, path=tmp_path, size=size, drop=False, every=1), size, join=False))
    test_eq([sum(f'{newest} is not complete' in o for o in texts) for texts in said], [1,0][:size])
    for a,b in zip(undisturbed(size, False), res): test_eq(differences(a, b, True), [])

def twice(rank, path):
    learner(path, 1, False, [Checkpoint(path/'states')]).fit(1)
    with pytest.raises(ResumeError, match='another Learner of this script'): learner(path, 1, False, [Checkpoint(path/'states')]).fit(1)
    learner(path, 1, False, [Checkpoint(path/'others')]).fit(1)

def test_two_learners_have_two_paths(tmp_path): on_ranks(partial(twice, path=tmp_path), 1, join=False)

@pytest.mark.whole
def test_a_model_of_several_buckets(tmp_path):
    "Three ranks add up in an order that depends on the buckets, which DDP lays anew after its first step"
    wide = dict(width=60_000, epochs=(1,2))
    whole = runs(tmp_path/'whole', 3, True, **wide)
    ended(tmp_path, 3, True, **wide)
    for a,b in zip(whole, runs(tmp_path, 3, True, every=1, **wide)): test_eq(differences(a, b, True), [])

def windows(): return GradientAccumulation(24)

@pytest.mark.whole
@pytest.mark.parametrize('first,second', [(1,3), (3,2)])
def test_gradients_that_no_step_has_used(tmp_path, first, second):
    "The first fit ends in the midst of a window, whose gradients each rank has a part of, and another number of ranks goes on"
    (whole,) = runs(tmp_path/'whole', 1, False, more=windows)
    assert runs(tmp_path, first, False, more=windows, blow=Blow('kill all', 'first step', 1, 0, 0, 0), every=1) is None
    test_eq(differences(whole, runs(tmp_path, second, False, more=windows, every=1)[0], False), [])
