"Losses, metrics and weights that N ranks report with batch size `bs` are those of one process with `N*bs`"
import pytest
from collections import Counter,defaultdict
from contextlib import nullcontext
from fastcore.test import test_eq
from fastai.vision.all import *
from fastai.text.all import LMDataLoader,Perplexity
from fastdist import *
from compare import *
from tasks import *

runs = (37,4),(7,4),(7,1),(5,1),(1,4)
few = (37,4),(5,1),(1,1)

@sizes
@pytest.mark.parametrize('name', tasks)
@cases(valid=reports, train_and_valid=partial(reports, train_metrics=True))
@pytest.mark.by_default('classes-3', 'multi-2', 'tokens-3')
def test_metrics(cases, name, size): check(partial(task, *tasks[name]), size, cases, runs, **exact)

def root_error(p, y): return (p-y).pow(2).mean().sqrt()

@pytest.mark.whole
@sizes
@pytest.mark.parametrize('name,metric', [('regression',root_error), ('pixels',foreground_acc)])
@pytest.mark.by_default('regression')
def test_average_of_what_is_no_mean_of_samples(name, metric, size):
    ys,model,loss,_ = tasks[name]
    check(partial(task, ys, model, loss, lambda n: metric), size, dict(valid=reports, train=partial(reports, train_metrics=True)), few, **exact)

class Tensors(Metric):
    def reset(self): self.all = []
    def accumulate(self, learn): self.all.append(learn.pred.detach())
    value = property(lambda self: torch.cat(self.all).std())

class Joined(Metric):
    def reset(self): self.all = torch.tensor([])
    def accumulate(self, learn): self.all = torch.cat([self.all, learn.pred.detach().flatten()])
    value = property(lambda self: self.all.std())

class FromNone(Metric):
    def reset(self): self.all = None
    def accumulate(self, learn): self.all = torch.cat([o for o in (self.all,learn.pred.detach()) if o is not None])
    value = property(lambda self: self.all.std())

class Confusion(Metric):
    def reset(self): self.cm = None
    def accumulate(self, learn):
        cm = torch.bincount(3*learn.y+learn.pred.argmax(1), minlength=9)
        self.cm = cm if self.cm is None else self.cm+cm
    value = property(lambda self: (self.cm*torch.arange(9)**2).sum())

class Votes(Metric):
    def reset(self): self.votes = Counter()
    def accumulate(self, learn): self.votes.update(learn.pred.argmax(1).tolist())
    value = property(lambda self: sum(v*(k+1)**2 for k,v in self.votes.items()))

class ByClass(Metric):
    def reset(self): self.of = defaultdict(list)
    def accumulate(self, learn):
        for p,y in zip(learn.pred.max(1).values.tolist(), learn.y.tolist()): self.of[y].append(p)
    value = property(lambda self: np.mean([np.mean(o) for o in self.of.values()]))

class Totals(Metric):
    def reset(self): self.of,self.n = defaultdict(float),{}
    def accumulate(self, learn):
        for p,y in zip(learn.pred.max(1).values.tolist(), learn.y.tolist()):
            self.of[y] += p
            self.n[y] = self.n.get(y, 0)+1
    value = property(lambda self: max(self.of[k]/self.n[k] for k in self.n))

class Seen(Metric):
    def reset(self): self.seen = set()
    def accumulate(self, learn): self.seen.update(learn.x[:,0].tolist())
    value = property(lambda self: len(self.seen)+sum(sorted(self.seen)))

class Mean:
    def __init__(self): self.total,self.n = 0.,0
    def add(self, o): self.total,self.n = self.total+o.sum().item(),self.n+len(o)

class Helped(Metric):
    def reset(self): self.mean,self.by = Mean(),dict(top=Mean())
    def accumulate(self, learn):
        self.mean.add(learn.pred[:,0])
        self.by['top'].add(learn.pred.max(1).values)
    value = property(lambda self: self.mean.total/self.mean.n+self.by['top'].total/self.by['top'].n)

class Highest(Metric):
    def reset(self): self.top = None
    def accumulate(self, learn):
        top = learn.pred.max().detach()
        self.top = top if self.top is None else torch.maximum(self.top, top)
    value = property(lambda self: self.top)

class Peak(Metric):
    def reset(self): self.top = -math.inf
    def accumulate(self, learn): self.top = max(self.top, learn.pred.max().item())
    value = property(lambda self: self.top)

class Lowest(Metric):
    def reset(self): self.low = torch.tensor(math.inf)
    def accumulate(self, learn): self.low = torch.minimum(self.low, learn.pred.min().detach())
    value = property(lambda self: self.low)

class Array(Metric):
    def reset(self): self.sums = np.zeros(3)
    def accumulate(self, learn): self.sums += learn.pred.detach().sum(0).numpy()
    value = property(lambda self: (self.sums**2).sum())

class Median(Metric):
    def reset(self): self.all = np.array([])
    def accumulate(self, learn): self.all = np.concatenate([self.all, learn.pred[:,0].detach().numpy()])
    value = property(lambda self: np.median(self.all))

class Words(Metric):
    def reset(self): self.words = []
    def accumulate(self, learn): self.words += ['abc'[i] for i in learn.y]
    value = property(lambda self: ' '.join(self.words))

class InOrder(Metric):
    def reset(self): self.all = []
    def accumulate(self, learn): self.all += learn.pred[:,0].tolist()
    value = property(lambda self: sum(i*o for i,o in enumerate(self.all))/len(self.all))

class MeanOfMeans(Metric):
    def reset(self): self.total,self.batches = 0.,0
    def accumulate(self, learn): self.total,self.batches = self.total+learn.pred.mean().item(),self.batches+1
    value = property(lambda self: self.total/self.batches)

class BestYet(AvgMetric):
    "What it keeps lives on from epoch to epoch"
    epochs = 2
    def __init__(self):
        super().__init__(confidence)
        self.best = 0.
    @property
    def value(self):
        self.best = max(self.best, float(super().value))
        return self.best

class OfTheLoss(Metric):
    def reset(self): self.total,self.n = 0.,0
    def accumulate(self, learn): self.total,self.n = self.total+learn.loss.item()*len(learn.x),self.n+len(learn.x)
    value = property(lambda self: self.total/self.n)

own = [Tensors, Joined, FromNone, Confusion, Votes, ByClass, Totals, Seen, Helped, Highest, Peak, Lowest, Array, Median, Words, InOrder, MeanOfMeans, BestYet,
    OfTheLoss]

@pytest.mark.whole
def test_metrics_of_users(): check(partial(task, *tasks['classes']), 2, {o.__name__:partial(measured, o, True) for o in own}, few[:1], **exact)

@pytest.mark.whole
@sizes
def test_metrics_of_users_together(size):
    cases = {f'train_metrics {o}':partial(measured_together, own, o) for o in (False,True)}
    check(partial(task, *tasks['classes']), size, cases, few, **exact)

def trained(loss, learn):
    learn.loss_func = loss
    learn.fit(2, 0.02)
    weights = [o.detach().clone() for o in learn.model.parameters()]
    return dict(weights=weights, values=learn.recorder.values, losses=L(learn.recorder.losses).map(float))

def skipped(i): return i%5==0 or 4<=i<8 or 16<=i<20

def some_skipped(n, g): return torch.where(tensor([skipped(i) for i in range(n)]), -100, torch.randint(0, 3, (n,), generator=g))
weight = tensor([1.,5.,.2])

class Margin(nn.Module):
    "A module of a user's, with fastai's `reduction`"
    reduction = 'mean'
    def forward(self, p, y):
        loss = F.multi_margin_loss(p, y, reduction='none')
        return loss if self.reduction=='none' else getattr(loss, self.reduction)()

losses = dict(classes=(kinds, dict(flat=CrossEntropyLossFlat(), function=F.cross_entropy, module=nn.CrossEntropyLoss(), margin=Margin(),
    focal=FocalLossFlat(), focal_weight=FocalLossFlat(weight=weight), smooth=LabelSmoothingCrossEntropyFlat(),
    label_smoothing=CrossEntropyLossFlat(label_smoothing=.1))))
losses['sums'] = kinds,dict(flat=CrossEntropyLossFlat(reduction='sum'), module=nn.CrossEntropyLoss(reduction='sum'), focal=FocalLossFlat(reduction='sum'),
    function=partial(F.cross_entropy, reduction='sum'), smooth=LabelSmoothingCrossEntropyFlat(reduction='sum'))
losses['weights'] = kinds,dict(flat=CrossEntropyLossFlat(weight=weight), module=nn.CrossEntropyLoss(weight), function=partial(F.cross_entropy, weight=weight),
    label_smoothing=CrossEntropyLossFlat(weight=weight, label_smoothing=.1))
losses['ignored'] = kinds,dict(flat=CrossEntropyLossFlat(ignore_index=1), module=nn.CrossEntropyLoss(ignore_index=1),
    weight=CrossEntropyLossFlat(weight=weight, ignore_index=1))
losses['skipped'] = some_skipped,dict(flat=CrossEntropyLossFlat(), module=nn.CrossEntropyLoss(), function=F.cross_entropy,
    weight=CrossEntropyLossFlat(weight=weight), sum=CrossEntropyLossFlat(reduction='sum'))
losses['several'] = several,dict(bce=BCEWithLogitsLossFlat(), module=nn.BCEWithLogitsLoss(), weight=BCEWithLogitsLossFlat(pos_weight=weight),
    mse=MSELossFlat(), l1=L1LossFlat(), sum=MSELossFlat(reduction='sum'), function=F.mse_loss)
losses['opaque'] = kinds,dict(sum=lambda p,y: F.cross_entropy(p, y, reduction='sum'), mean=lambda p,y: F.cross_entropy(p, y))

def in_order(ys, n, bs, rank=0):
    "Samples in order, so that those of a whole slice are without a target where `skipped` says so"
    set_seed(3)
    return learner((data(n, ys),data(n, ys, 1)), Shaped(3), bs, rank, drop_last=False, shuffle=False)

@pytest.mark.by_default('classes', 'sums', 'opaque')
@sizes
@pytest.mark.parametrize('name', losses)
def test_losses(name, size):
    ys,fs = losses[name]
    check(partial(in_order, ys), size, {k:partial(trained, o) for k,o in fs.items()}, [(37,4),(7,4)], **exact)

class Pages(Callback):
    def __init__(self): self.pages = dict(train=[], valid=[])
    def before_batch(self): self.pages['train' if self.training else 'valid'].append((self.x.clone(),self.y.clone()))

def corpus(n): return [torch.arange(n)[i:j] for i,j in [(0,n//2),(n//2,n-7),(n-7,n)]]

def reader(n, bs, rank, shuffle):
    set_seed(3)
    model = nn.Sequential(nn.Embedding(64,4), nn.Linear(4,64))
    set_seed(5+rank)
    dls = DataLoaders(*[LMDataLoader(corpus(n), bs=bs, seq_len=5, shuffle=o) for o in (shuffle,False)])
    return Learner(dls, model, loss_func=CrossEntropyLossFlat(), opt_func=SGD, metrics=Perplexity())

def read(n, bs, shuffle, rank=None):
    learn,cb = reader(n, bs, rank or 0, shuffle),Pages()
    with learn.distrib_ctx() if rank is not None else nullcontext(), learn.no_bar(), learn.no_logging(): learn.fit(2, 0.1, cbs=cb)
    return dict(cb.pages, values=learn.recorder.values)

def assert_goes_on(pages):
    "Targets are one ahead, and a row begins where it ended in the batch before"
    for x,y in pages: test_eq(y[:,:-1], x[:,1:])
    half = len(pages)//2
    for epoch in (pages[:half],pages[half:]):
        for (_,y),(x,_) in zip(epoch, epoch[1:]): test_eq(x[:,0], y[:,-1])

@pytest.mark.by_default('True')
@sizes
@pytest.mark.parametrize('shuffle', (False,True))
def test_rows_of_a_language_model(shuffle, size):
    ns = range(37, 61, (1,4)[shuffle] if whole_tables else 13)
    many = on_ranks(lambda rank: [read(n, 2, shuffle, rank) for n in ns], size, timeout=60, join=False)
    for n,res in zip(ns, zip(*many, strict=True), strict=True):
        one = read(n, 2*size, shuffle)
        for part in ('train','valid'):
            for o in res: assert_goes_on(o[part])
            rows = [[torch.cat(o) for o in zip(*step)] for step in zip(*[o[part] for o in res], strict=True)]
            for a,b in zip(one[part], rows, strict=True): test_eq(*[sorted(torch.cat(o, 1).tolist()) for o in (a,b)])
        for o in res: assert_same(one['values'], o['values']) # Perplexity, an exponential, makes more of the rounding of the loss
