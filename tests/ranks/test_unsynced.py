"Ranks that train apart, each for itself, since the script does not say that they belong together: it is said once"
import pytest,warnings
from fastai.basics import *
from fastdist import *
from fastdist.comm.collectives import *
from fastcore.test import test_eq
from learners import digits
from torch.nn.parallel import DistributedDataParallel

def said(rank, train):
    "What is said of ranks that train apart while `train` runs"
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        learn = digits(n=60, bs=8, path='.')
        with learn.no_bar(), learn.no_logging(): train(learn)
    return [str(o.message) for o in seen if 'ranks' in str(o.message)]

def parallel(learn):
    with learn.parallel_ctx():
        for _ in range(2): learn.fit(1)

def joined(learn):
    setup_distrib()
    parallel(learn)
    teardown_distrib()

def twice(learn):
    for _ in range(2): learn.fit(1)

@pytest.mark.parametrize('train', [parallel,joined,twice])
def test_it_is_said_once(train):
    texts,*rest = on_ranks(partial(said, train=train), 3, join=False)
    test_eq(rest, [[],[]])
    test_eq(len(texts), 1)
    assert 'started 3 ranks' in texts[0] and 'by itself' in texts[0] and 'HINT' in texts[0] and 'learn.distrib_ctx()' in texts[0]
    test_eq('parallel_ctx' in texts[0], train is not twice)

def together(learn):
    with learn.distrib_ctx(): learn.fit(1)
def own_group(learn):
    "A script that does it by hand"
    torch.distributed.init_process_group('gloo')
    learn.model = DistributedDataParallel(learn.model)
    learn.fit(1)
    torch.distributed.destroy_process_group()
def looks(learn):
    learn.validate()
    learn.get_preds()

@pytest.mark.parametrize('train', [together,own_group,looks])
def test_nothing_is_said_where_ranks_train_together(train): test_eq(on_ranks(partial(said, train=train), join=False), [[],[]])

def test_nothing_is_said_in_one_process(): test_eq(said(0, parallel), [])

def test_an_odd_environment_is_no_error_of_those_who_join_nothing(monkeypatch):
    monkeypatch.setenv('RANK', '1')
    test_eq(said(0, twice), [])
