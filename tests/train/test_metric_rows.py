"A metric that keeps rows has those of all ranks on each, and its value: at the moment, and of the type, of one process"
import cloudpickle,pickle
import pytest
from fastcore.test import test_eq
from fastai.vision.all import *
from fastdist import *
from fastdist.comm.job import current_job
from compare import *
from tasks import *

def kept(f): return AccumMetric(lambda p,y: f(p), flatten=False, name='kept')

class Kept(Metric):
    "Keeps all predictions, and their number"
    merge = 'sum'
    def reset(self): self.all,self.n = [],0
    def accumulate(self, learn):
        self.all.append(learn.pred.detach())
        self.n += len(learn.y)
    value = property(lambda self: torch.cat(self.all).std()*self.n)

class InSlots(Metric):
    __slots__,merge = ('rows',),'sum'
    def reset(self): self.rows = []
    def accumulate(self, learn): self.rows += learn.pred[:,0].tolist()
    value = property(lambda self: float(np.std(self.rows)))

class Appended(Metric):
    "Rows in one tensor"
    def reset(self): self.all = torch.zeros(0)
    def accumulate(self, learn): self.all = torch.cat([self.all, learn.pred[:,0].detach()])
    value = property(lambda self: self.all.std())

class Rounded(float): pass

values = dict(nothing=lambda p: None, named=lambda p: dict(mean=p.mean().item(), rows=p), tensor=lambda p: p.std(0), one=lambda p: p.std(), text=lambda p: f'{p.std():.3f}',
    numpy=lambda p: p.double().numpy().std(), array=lambda p: p.numpy().std(0), own=lambda p: Rounded(round(p.std().item(), 3)))

class Seen(Callback):
    "What is in the log when callbacks of any order look at it"
    def __init__(self, order, seen): self.order,self.seen = order,seen
    def _look(self, at): self.seen.append((at, self.order, list(self.recorder.log[1:]) if at=='validate' else [], self.metrics[-1].value))
    def after_validate(self): self._look('validate')
    def after_epoch(self): self._look('epoch')

def valued(mk, learn):
    learn.metrics,seen = L(accuracy, mk()),[]
    learn.recorder.train_metrics = True
    learn.fit(2, .05, cbs=[Seen(o, seen) for o in (49,50.5,70)])
    return learn.recorder.values,seen,list(learn.validate()),learn.metrics[-1].value,learn.metrics[-1].name

small = partial(task, *tasks['classes'][:3], lambda n: [])

@sizes
@cases(**{k:partial(valued, partial(kept, f)) for k,f in values.items()}, **{o.__name__:partial(valued, o) for o in (Kept,InSlots,Appended)})
def test_values(cases, size): check(small, size, cases, [(37,4)], **exact)

class Threshold(Metric):
    "Its value finds a threshold, by which all ranks predict; and counts how often it was asked"
    merge = 'sum'
    def __init__(self): self.asked,self.best = [],None
    def reset(self): self.all = []
    def accumulate(self, learn): self.all.append(learn.pred.detach().softmax(1)[:,0])
    @property
    def value(self):
        self.asked.append(rank_distrib())
        self.best = torch.cat(self.all).median().item()
        return self.best

class Decides(Callback):
    def after_epoch(self):
        if self.metrics[0].best>0: self.opt.set_hyper('lr', .01/self.metrics[0].best)

def with_threshold(learn):
    learn.metrics = L(Threshold())
    learn.fit(2, .05, cbs=Decides())
    return [o.detach().clone() for o in learn.model.parameters()],learn.metrics[0].best,learn.recorder.values

@pytest.mark.whole
@sizes
def test_numbers_that_the_value_sets(size): check(small, size, dict(best=with_threshold), [(37,4)], **exact)

def after_it(rank):
    learn = small(37, 4, rank)
    learn.metrics = L(Threshold())
    with learn.distrib_ctx(), learn.no_bar(), learn.no_logging():
        learn.fit(1, .05)
        m = learn.metrics[0]
        copies = {type(o) for o in (copy(m),deepcopy(m),*[pickle.loads(k.dumps(m, protocol=p)) for k in (pickle,cloudpickle) for p in (2,5)])}=={Threshold}
    return m.asked,sum(map(len, m.all)),copies,m.best,m.value==learn.final_record[2]

def test_each_rank_has_all_rows_and_computes_the_value():
    res = on_ranks(after_it, 3, timeout=60, join=False)
    test_eq([(o[0][:1],*o[1:]) for o in res], [([r],37,True,res[0][3],True) for r in range(3)])

class Odd(Exception):
    def __init__(self, a, b): super().__init__(f'{a} and {b}')

class Fails:
    def __init__(self, err): self.err,self.on = err,True
    def __call__(self, p):
        if self.on: raise self.err()
        return p.std()

def failing(rank, err, again=True):
    learn = small(37, 4, rank)
    f = Fails(err)
    learn.metrics = L(kept(f))
    with learn.distrib_ctx(), learn.no_bar(), learn.no_logging():
        try: learn.validate()
        except Exception as e: res = type(e).__name__,str(e).split('\t')[-1],str(e.__cause__ or '')
        f.on = False
        return *res,learn.validate()[1] if again else None

def test_an_error_of_the_value_is_raised_on_all_ranks():
    a,b = on_ranks(lambda rank: failing(rank, lambda: ValueError('one class only')), timeout=60, join=False)
    test_eq((a[:2],b[:2],b[3]), (('ValueError','one class only'),)*2+(a[3],))

def test_an_error_that_cannot_be_sent():
    a,b = on_ranks(lambda rank: failing(rank, lambda: Odd('this', 'that'), False), timeout=60, join=False)
    test_eq((a[:2],b[:2]), (('Odd','this and that'),)*2)

def test_a_fit_ends_with_the_error_of_the_value():
    def f(rank):
        learn = small(37, 4, rank)
        learn.metrics = L(kept(Fails(lambda: ValueError('one class only'))))
        with learn.distrib_ctx(), learn.no_bar(), learn.no_logging(): learn.fit(1)
    with pytest.raises(RankError, match='raise self.err') as e: on_ranks(f, 3, timeout=60, join=False)
    assert isinstance(e.value, ValueError)

def cancelled(learn):
    "An evaluation that was cancelled asks no metric for its value"
    def stop(self): raise CancelValidException
    learn.metrics = L(kept(Fails(lambda: ValueError('one class only'))))
    learn.fit(1, .05, cbs=Callback(before_validate=stop))
    return learn.recorder.values

@pytest.mark.whole
@sizes
def test_a_value_that_nobody_reads(size): check(small, size, dict(cancelled=cancelled), [(37,4)], **exact)

def hidden(rank):
    learn = small(37, 4, rank)
    learn.metrics = L(kept(lambda p: lambda: len(p)))
    with learn.distrib_ctx(), learn.no_bar(), learn.no_logging(): return learn.validate()[1]()

def test_a_value_that_cannot_be_sent(): test_eq(on_ranks(hidden, timeout=60, join=False), [37,37])

class Large(Metric):
    "Sums of many elements: a matrix, an array, and one that begins as a number"
    merge = 'sum'
    def reset(self): self.a,self.b,self.c = torch.ones(64, 64),np.zeros((80,80), dtype=int),0.
    def accumulate(self, learn):
        self.a[1] += 1.5*len(learn.y)
        self.b += learn.y.bincount(minlength=6400).view(80, 80).numpy()
        self.c = self.c+torch.full((5000,), len(learn.y))
    value = property(lambda self: float(self.a.std()+self.b.sum()+self.c.sum()))

@pytest.mark.whole
@sizes
def test_large_sums(size): check(small, size, dict(large=partial(valued, Large)), [(37,4),(7,4),(2,1)], **exact)

def exchanged(rank, *mets):
    learn = small(37, 4, rank)
    learn.metrics = L(mets)
    with learn.distrib_ctx(), learn.no_bar(), learn.no_logging():
        learn.validate()
        n = current_job().exchanges.n
        learn.validate()
        return current_job().exchanges.n-n

def test_exchanges_of_a_validation():
    "As many with metrics that keep rows, however many there are"
    res = on_ranks(lambda rank: [exchanged(rank, *o) for o in ([accuracy], [accuracy,Perplexity()], [accuracy,F1Score(average='macro')],
        [accuracy,RocAuc(),Kept(),F1Score(average='macro')])], timeout=60, join=False)
    test_eq(res, [[res[0][0]]*4]*2)
