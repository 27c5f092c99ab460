"A first batch that does not tell what a metric is, and what metrics read from callbacks: N ranks report what one process reports, or say what is wrong"
import pytest,warnings
from fastcore.test import test_close,test_eq
from fastai.vision.all import *
from fastdist import *
from test_preds import check,sizes
from test_reports import Shaped,exact,reports,task

def in_classes(first):
    "Targets sorted by class, as files in folders are, so that the first batches have one class each"
    return lambda n, g: (torch.arange(n)*3//n+first)%3

def recall(p, y): return ((p.argmax(1)==1)&(y==1)).sum()/(y==1).sum().clamp(min=1)
def precision(p, y): return ((p.argmax(1)==1)&(y==1)).sum()/(p.argmax(1)==1).sum().clamp(min=1)
def own_accuracy(p, y): return (p.argmax(1)==y).float().mean()
def of_known(p, y):
    known = y!=2
    return (p.argmax(1)==y)[known].float().mean() if known.any() else tensor(0.)
def hinge(p, y): return torch.relu(1-p[:,0])[p[:,0]>0].mean().nan_to_num()

class OwnMean(Metric):
    "An average of batches, kept by hand"
    def reset(self): self.total,self.n = 0.,0
    def accumulate(self, learn):
        self.total += recall(learn.pred, learn.y).item()*len(learn.y)
        self.n += len(learn.y)
    value = property(lambda self: self.total/self.n)

class HighOfLate(Metric):
    "The highest number, of samples that come late"
    def reset(self): self.top = 0.
    def accumulate(self, learn):
        late = learn.pred[learn.y==2]
        if len(late): self.top = max(self.top, late.max().item())
    value = property(lambda self: self.top)

metrics = [recall, precision, own_accuracy, of_known, hinge, OwnMean(), HighOfLate()]

@sizes
@pytest.mark.parametrize('first', (0,1))
@pytest.mark.by_default('1-3')
def test_data_sorted_by_class(first, size):
    "What holds for samples of one class need not hold for others"
    f = partial(task, in_classes(first), partial(Shaped, 3), CrossEntropyLossFlat(), lambda n: metrics)
    check(f, size, dict(valid=partial(reports, epochs=2), train=partial(reports, train_metrics=True)), [(37,4),(7,1)], **exact)

class Masks(Callback):
    def __init__(self): self.n = 0
    def before_batch(self):
        self.mask = self.x[:,0]>0
        self.n += self.mask.sum().item()

class Masked(Metric):
    def reset(self): self.n = 0
    def accumulate(self, learn): self.n += learn.masks.mask.sum().item()
    value = property(lambda self: self.n)

class Counted(Masked):
    def accumulate(self, learn): self.n = learn.masks.n

class OfMasked(Masked):
    def accumulate(self, learn): self.n += learn.pred[learn.masks.mask].sum().item()

class TopOfSome(Metric):
    "What it keeps begins to change with a sample that is not in the first batch, whatever its target"
    def reset(self): self.top,self.n = 0.,0
    def accumulate(self, learn):
        some = learn.x[:,0][(learn.x[:,0]>.6)&(learn.x[:,0]<1)]
        self.n += len(learn.y)
        if len(some): self.top = max(self.top, some.max().item())
    value = property(lambda self: self.top+self.n)

def small(rank, metrics=(), cbs=()):
    learn = task(in_classes(0), partial(Shaped, 3), CrossEntropyLossFlat(), lambda n: metrics, 37, 4, rank)
    learn.add_cbs(cbs)
    return learn

def said(rank, *args, **kw):
    "What a fit says, or how it fails, and what it reported"
    learn = small(rank, *args)
    with warnings.catch_warnings(record=True) as w, learn.no_bar(), learn.no_logging():
        warnings.simplefilter('always')
        try:
            with learn.distrib_ctx(**kw): learn.fit(2, .1)
        except Exception as e: return ' '.join([type(e).__name__, str(e), *getattr(e, '__notes__', [])])
    return ' '.join(str(o.message) for o in w if 'rank' in str(o.message)),[o[-1] for o in learn.recorder.values]

@pytest.mark.parametrize('met', (Masked,Counted))
def test_a_metric_that_reads_a_callback_is_told_of_it(met):
    (first,a),(other,b) = on_ranks(lambda rank: said(rank, [met()], [Masks()]), join=False)
    test_eq((first.count('read what a callback keeps of the samples of one rank'),other,b), (1,'',a))

def test_an_error_of_a_metric_that_reads_a_callback():
    for text in on_ranks(lambda rank: said(rank, [OfMasked()], [Masks()]), join=False): assert 'IndexError' in text and 'what a callback keeps is of the samples of one rank' in text

def test_what_begins_to_change_later_is_exact():
    alone = said(0, [TopOfSome()])[1]
    for text,a in on_ranks(lambda rank: said(rank, [TopOfSome()]), join=False):
        test_eq(text, '')
        test_close(a, alone)

class FromLoss(Callback):
    def __init__(self, event): self.event = event
    def __call__(self, event_name):
        if event_name==self.event and self.training: self.opt.set_hyper('lr', .1*float(self.learn.loss))

def test_a_learning_rate_from_the_loss():
    for text in on_ranks(lambda rank: said(rank, (), [FromLoss('after_loss')]), join=False): assert text.startswith('DesyncError') and 'learn.loss' in text and 'after_backward' in text
    with_all = lambda rank, bs: small_fit(rank, bs, [FromLoss('after_backward')])
    for o in on_ranks(lambda rank: with_all(rank, 4), join=False): test_close(o, with_all(0, 8), 1e-5)

def small_fit(rank, bs, cbs):
    learn = task(in_classes(0), partial(Shaped, 3), CrossEntropyLossFlat(), lambda n: [], 37, bs, rank)
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(): learn.fit(2, .1, cbs=cbs)
    return torch.cat([p.detach().flatten() for p in learn.model.parameters()])

def lazy(rank, seen=False):
    learn = small(rank)
    learn.model = nn.LazyLinear(3)
    if seen: learn.model.to(learn.dls.device)(*learn.dls.one_batch()[:learn.dls.n_inp])
    with learn.no_bar(), learn.no_logging():
        try:
            with learn.distrib_ctx(): learn.fit(1, .1)
        except ValueError as e: return str(e)
    return learn.model.weight.tolist()

def test_lazy_modules():
    for text in on_ranks(lazy, join=False): assert 'weight, bias have no shape yet' in text and 'one_batch' in text
    a,b = on_ranks(lambda rank: lazy(rank, True), join=False)
    test_eq(a, b)

def both(rank, order):
    learn = small(rank)
    try:
        with order[0](learn), order[1](learn), learn.no_bar(): learn.fit(1)
    except RuntimeError as e: return str(e)

def test_two_wrappers():
    ctxs = Learner.distrib_ctx,Learner.parallel_ctx
    for order in (ctxs,ctxs[::-1]):
        for text in on_ranks(lambda rank: both(rank, order), join=False): assert 'and not both' in text
