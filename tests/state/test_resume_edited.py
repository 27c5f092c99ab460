"A script that was edited before it is started again: the state wins where it has a value, the script elsewhere; what would mix rows or steps is refused"
import pytest
from fastcore.test import test_eq
from fastai.basics import *
from fastai.callback.all import *
from fastdist import *
from fastdist.base.errors import ResumeError
from procs import *

class Break(Callback):
    "Ends the fit within its second epoch"
    order = 2*Checkpoint.order
    def after_batch(self):
        if self.training and (self.epoch,self.iter)==(1,2): raise KeyboardInterrupt
Break.__module__ = 'fastdist.tests' # a user's would be named, as it is gone the second time

def as_it_was(): return dict(lr=0.01, wd=None, metrics=[mae], loss=MSELossFlat(), opt=SGD, frozen=False, cbs=[], cycle=False)

def script(path, cut, lr, wd, metrics, loss, opt, frozen, cbs, cycle, epochs=3):
    set_seed(1)
    data = list(zip(torch.randn(40,4), torch.randn(40,1)))
    dls = DataLoaders.from_dsets(data[:30], data[30:], bs=3, num_workers=0)
    model,split = nn.Sequential(nn.Linear(4,2), nn.Linear(2,1)),lambda m: [params(m[0]),params(m[1])]
    learn = Learner(dls, model, loss_func=loss, metrics=metrics, opt_func=opt, splitter=split, cbs=[Checkpoint(path, every=2), *cbs, *[Break()]*cut])
    if frozen: learn.freeze()
    with learn.distrib_ctx(), learn.no_bar(), learn.no_logging(): (learn.fit_one_cycle if cycle else learn.fit)(epochs, lr, wd=wd)
    return learn

def end_of(learn):
    rec,h = learn.recorder,learn.opt.hypers[0]
    grads = [p.requires_grad for p in learn.model.parameters()]
    return dict(rows=len(rec.values), names=list(rec.metric_names), lr=h['lr'], wd=h['wd'], lrs=list(rec.lrs), grads=grads)

def run(rank, path, cut, kw):
    "What a rank comes to"
    try: return end_of(script(path, cut, **as_it_was()|kw))
    except (KeyboardInterrupt,ResumeError,RankError) as e: return f'{type(e).__name__}: {e}'

def again(path, n, kw, was={}):
    "What ranks of a script that was cut off, edited to have `kw` and started again come to"
    for o in on_ranks(lambda rank: run(rank, path, True, was), n, join=False): assert 'KeyboardInterrupt' in o
    return on_ranks(lambda rank: run(rank, path, False, kw), n, join=False)

cases = dict(lr=dict(lr=0.1), wd=dict(wd=0.2), frozen=dict(frozen=True), loss=dict(loss=L1LossFlat()), callbacks=dict(cbs=[GradientClip(0.5)]), nothing={})

@pytest.mark.parametrize('case,n', zip(cases, (2,3,2,2,1,2)))
@pytest.mark.by_default('lr', 'loss', 'callbacks', 'nothing')
def test_what_the_state_has_goes_on(tmp_path, case, n):
    for o in again(tmp_path, n, cases[case]): test_eq((o['rows'],o['lr'],o['wd'],o['grads']), (3,0.01,0.,[True]*4))

def test_a_schedule_that_was_edited_counts(tmp_path):
    for o in again(tmp_path, 3, dict(lr=0.1, cycle=True), dict(cycle=True)): assert o['rows']==3 and max(o['lrs'])>0.02

refused = dict(metrics=(dict(metrics=[rmse]), "metrics was ['mae'], is ['_rmse']"), more=(dict(metrics=[mae,rmse]), 'metrics was'), optimizer=(dict(opt=Adam), 'steps of the optimizer was'))

@pytest.mark.parametrize('case,n', zip(refused, (2,1,3)))
@pytest.mark.by_default('metrics', 'more')
def test_what_would_mix_rows_or_steps_is_refused_on_all_ranks(tmp_path, case, n):
    kw,msg = refused[case]
    ends = again(tmp_path, n, kw)
    assert ends[0].startswith('ResumeError') and all(msg in o for o in ends), ends
    o = on_ranks(lambda rank: run(rank, tmp_path, False, {}), n, join=False)[0] # nothing is lost
    test_eq((o['rows'],o['names'][-2:]), (3,['mae','time']))

@pytest.mark.parametrize('n', [1,2])
@pytest.mark.by_default('2')
def test_a_fit_that_is_done_keeps_its_rows(tmp_path, n):
    for kw in ({},dict(metrics=[rmse], lr=0.1)):
        o = on_ranks(lambda rank: run(rank, tmp_path, False, kw), n, join=False)[0]
        test_eq((o['names'][-2:],o['lr']), (['mae','time'],0.01))
