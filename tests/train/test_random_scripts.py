"Random scripts give on ranks what they give in one process; what the search has found stays here, as values"
import pytest
from contextlib import suppress
from hypothesis import Phase
from random_scripts import *

mlp = 'mlp','mean','sgd','fastai',False,38,True
ordinary = ('mlp','mean','sgd','fastai',True,17,False),[('fit','fit',1,()),('preds',1),('validate',),('context',),('save',),('fit','fine_tune',1,('clip',)),('load',),('lr_find',),
    ('crash','after_loss',None),('fit','fit',1,('best',))]
saves = [('crash','after_pred',1),('save',),('context',),('fit','fit',1,())]
found_scripts = [pytest.param((('tied','ignored','adam','torch',True,18,False),saves), 4, id='a file is written after a mistake on one rank'),
    pytest.param((mlp,[('crash','after_pred',1),('validate',),('fit','fit',1,())]), 3, id='an evaluation after a mistake on one rank'),
    pytest.param((('norm','mean','sgd','fastai',True,25,False),[('crash','after_epoch',None),('preds',1)]), 2, id='a batch norm and a last batch of one sample'),
    pytest.param((('mlp','ignored','adam','torch',False,19,True),[('fit','fit_one_cycle',1,('nan',))]), 3, id='ignored targets and TerminateOnNaN')]
excused = [pytest.param((mlp,[('crash','after_step',None),('fit','fit',1,())]), 2, 'ranks forgot its gradients', id='a mistake leaves gradients')]

@pytest.mark.parametrize('script,size', [pytest.param(ordinary, 2, id='ordinary'),*found_scripts])
@pytest.mark.by_default('norm')
def test_found(script, size): assert compare(script, size)[0] is None

@pytest.mark.parametrize('script,size,what', excused)
def test_what_differs_is_said(script, size, what): assert any(what in o for o in compare(script, size)[1])

def weights_after_a_mistake(rank, connect):
    "Return what is said where weights in shards are read after a mistake on rank 1, and whether they are all there"
    learn = build(mlp, 3)
    with entered(learn, rank, True), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        with suppress(ValueError,RankError): learn.fit(1, .01, cbs=Crash('after_pred', 1, rank))
        if connect: learn.validate()
        state = learn.model.state_dict()
        return [str(o.message) for o in said if 'An error has stopped a rank' in str(o.message)],connect and all(v.isfinite().all() for v in whole(dict(state)).values())

@pytest.mark.whole
def test_weights_in_shards_after_a_mistake():
    for said,_ in on_ranks(partial(weights_after_a_mistake, connect=False), 3, join=False): assert len(said)==1 and 'HINT' in said[0]
    test_eq(on_ranks(partial(weights_after_a_mistake, connect=True), 3, join=False), [([],True)]*3)

three = ('norm','mean','adam','fastai',True,33,False),[('average',),('lr_find',),('fit','fine_tune',1,('best',)),('preds',1)]
resumed = [pytest.param(three, 1, [('SIGKILL','after_batch',4,0),('SIGTERM','after_loss',2,0)], (3,2,4), False, id='killed, stopped, on other ranks'),
    pytest.param((mlp,[('fit','fit_one_cycle',2,('csv',)),('validate',),('fit','fit',1,('early',))]), 2, [('raise','before_validate',2,None)], (2,3), True, id='in shards'),
    pytest.param((('mlp','mean','adam','fastai',False,30,False,True),[('fit','fit',2,()),('preds',1)]), 1, [('raise','after_batch',3,0)], (2,3), False, id='in bfloat16')]

@pytest.mark.whole
@pytest.mark.replicas # it says itself what is in shards
@pytest.mark.parametrize('script,every,kills,sizes,shard', resumed)
@pytest.mark.by_default('shards')
def test_a_killed_script_ends_as_if_it_were_not(script, every, kills, sizes, shard):
    assert compare_resumed(script, every, kills, sizes, shard=shard)[0] is None

def test_a_difference_is_seen(monkeypatch):
    "Ranks with other batches than one process has are not taken for alike"
    monkeypatch.setattr('random_scripts.play', lambda script, bs, rank=None, shard=False, play=play, **kw: play(script, bs if rank is None else 2*bs, rank, shard, **kw))
    with pytest.raises(AssertionError, match='step 0'): holds((mlp,[('fit','fit',1,())]))

@pytest.mark.parametrize('size,shard,resumed', [(2,False,none()),(3,True,none()),(2,False,resumes)])
@pytest.mark.by_default('2-False-resumed2')
def test_random(size, shard, resumed):
    "A few with fixed seeds"
    class Few(Scripts): pass
    Few.size,Few.shard,Few.resumed = size,shard,resumed
    run_state_machine_as_test(Few, settings=settings(max_examples=3, stateful_step_count=4, derandomize=True, phases=[Phase.generate], **quick))
