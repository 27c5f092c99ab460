"Every kind of Learner fits on two ranks: the same weights and the same reports on both"
import pytest
from fastai.basics import set_seed,partial,L
from fastcore.test import test_eq
from fastdist import on_ranks,rank0_first
import learners

def state(learn): return [p.detach().clone() for p in learn.model.state_dict().values()]

def fit(mk, rank, epochs=1, **kw):
    set_seed(7)
    learn = mk()
    with learn.distrib_ctx(**kw), learn.no_bar(), learn.no_logging(): learn.fit(epochs, 1e-2)
    return state(learn),learn.recorder.values,L(learn.recorder.losses).map(float)

@pytest.mark.parametrize('name', 'vision tabular collab language_model text_classifier digits'.split())
@pytest.mark.by_default('vision', 'tabular', 'language_model', 'digits')
def test_fits_on_two_ranks(name):
    a,b = on_ranks(partial(fit, getattr(learners, name)), join=False, timeout=100)
    test_eq(a, b)
    assert a[1][-1][0]==a[1][-1][0] and len(a[2])>0

def built_by_rank_0_first(rank):
    set_seed(7)
    learn = rank0_first(learners.text_classifier)
    with learn.distrib_ctx(), learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-2)
    return state(learn)

def test_learner_from_rank0_first(): test_eq(*on_ranks(built_by_rank_0_first, join=False, timeout=100))
