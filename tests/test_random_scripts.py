"Random scripts give on ranks what they give in one process; what the search has found stays here, as values"
import pytest
from hypothesis import Phase
from random_scripts import *

mlp = 'mlp','mean','sgd','fastai',False,38,True
ordinary = ('mlp','mean','sgd','fastai',True,17,False),[('fit','fit',1,()),('preds',1),('validate',),('context',),('save',),('fit','fine_tune',1,('clip',)),('load',),('lr_find',),
    ('crash','after_loss',None),('fit','fit',1,('best',))]
saves = [('crash','after_pred',1),('save',),('context',),('fit','fit',1,())]
found_scripts = [pytest.param((('tied','ignored','adam','torch',True,18,False),saves), 4, id='a file is written after a mistake on one rank'),
    pytest.param((('mlp','ignored','adam','torch',False,19,True),[('fit','fit_one_cycle',1,('nan',))]), 3, id='ignored targets and TerminateOnNaN')]
excused = [pytest.param((mlp,[('crash','after_step',None),('fit','fit',1,())]), 2, 'ranks forgot its gradients', id='a mistake leaves gradients')]

@pytest.mark.parametrize('script,size', [pytest.param(ordinary, 2, id='ordinary'),*found_scripts])
def test_found(script, size): assert compare(script, size)[0] is None

@pytest.mark.parametrize('script,size,what', excused)
def test_what_differs_is_said(script, size, what): assert any(what in o for o in compare(script, size)[1])

def test_a_difference_is_seen(monkeypatch):
    "Ranks with other batches than one process has are not taken for alike"
    monkeypatch.setattr('random_scripts.play', lambda script, bs, rank=None, shard=False, play=play: play(script, bs if rank is None else 2*bs, rank, shard))
    with pytest.raises(AssertionError, match='step 0'): holds((mlp,[('fit','fit',1,())]))

@pytest.mark.parametrize('size,shard', [(2,False),(3,True)])
def test_random(size, shard):
    "A few with fixed seeds"
    class Few(Scripts): pass
    Few.size,Few.shard = size,shard
    run_state_machine_as_test(Few, settings=settings(max_examples=3, stateful_step_count=4, derandomize=True, phases=[Phase.generate], **quick))
