"What ranks must hold alike when a fit begins: what transforms have learned from their data"
import os,pytest
from fastai.basics import *
from fastdist import *
from fastdist.job.fork import *

def _fit(vocab, mean=.5):
    "Train on two classes with `vocab`; return the error's text, or ''"
    dsets = Datasets(range(16), [[lambda i: tensor(float(i))],[lambda i: 'ab'[i%2],Categorize(vocab, sort=False)]], splits=[range(12),range(12,16)])
    norm = Normalize(torch.tensor([mean]), torch.tensor([1.]), axes=(0,))
    dls = dsets.dataloaders(bs=4, num_workers=0, device='cpu')
    dls.train.after_batch.fs.append(norm)
    learn = Learner(dls, nn.Sequential(Lambda(lambda x: x.view(-1,1).float()), nn.Linear(1,2)), loss_func=CrossEntropyLossFlat())
    try:
        with learn.no_logging(), learn.no_bar(), learn.distrib_ctx(): learn.fit(1)
    except ValueError as e: return str(e)
    return ''

@pytest.mark.parametrize('n', [2,3])
def test_transforms(n):
    "Other classes or means on one rank are an error on all, named with both values; equal ones are silent"
    vocab = on_ranks(lambda rank: _fit(['a','b'] if rank else ['b','a']), n)
    assert all('vocab of Categorize' in o and 'sorted(set(' in o and "['b', 'a']" in o and "['a', 'b']" in o for o in vocab), vocab
    mean = on_ranks(lambda rank: _fit(['a','b'], .5+rank), n)
    assert all('mean of Normalize' in o and '1.5' in o for o in mean), mean
    assert on_ranks(lambda rank: _fit(['a','b']), n)==['']*n

class Counting(list):
    "A data set that counts its reads, in all its copies"
    reads = []
    def __getitem__(self, i):
        self.reads.append(i)
        return super().__getitem__(i)

class Looked:
    "Inputs and targets that are looked up when they are read"
    def __init__(self, n, lookup): self.n,self.lookup = n,lookup
    def __len__(self): return self.n
    def __getitem__(self, i): return tensor([float(i)]),tensor([float(self.lookup(i))])

class Scale(nn.Module):
    "Multiplies by a number that it is given"
    def __init__(self, by):
        super().__init__()
        self.by,self.last,self.lin = by,None,nn.Linear(1,1)
    def forward(self, x):
        self.last = self.lin(x*self.by)
        return self.last

def _train(train, valid=None, model=None, fits=1):
    "Train; return the error's text, or ''"
    dls = DataLoaders(*(DataLoader(o, bs=4, num_workers=0) for o in (train,ifnone(valid, train))))
    learn = Learner(dls, model or nn.Linear(1,1), loss_func=MSELossFlat())
    try:
        with learn.no_logging(), learn.no_bar(), learn.distrib_ctx():
            learn.distributed_trainer.first.seconds = 60.
            for _ in range(fits): learn.fit(1)
    except ValueError as e: return str(e).split(' HINT')[0]
    return ''

@pytest.mark.parametrize('n', [2,3])
def test_items(n):
    "Other targets behind the same numbers, in training or validation, are an error on all ranks; draws are not, also where two readings are the same by chance"
    res = on_ranks(lambda rank: _train(Looked(12, lambda i: rank)), n)
    assert all('target 0 of training item 0' in o and '1.0' in o for o in res), res
    res = on_ranks(lambda rank: _train(Looked(12, lambda i: 0), Looked(9, lambda i: rank*(i==8))), n)
    assert all('target 0 of validation item 8' in o for o in res), res
    draws = random.random, lambda: random.random()<.5, lambda: torch.rand(1).item()<.5, lambda: np.random.default_rng().random()<.5, lambda: os.urandom(1)[0]%2
    for draw in draws: assert on_ranks(lambda rank: _train(Looked(12, lambda i: draw())), n)==['']*n

def test_reads():
    "Items are read twice each before the first fit of a context, and not before later ones; random states stay"
    def run(rank):
        first,data = [],Counting((torch.ones(1), torch.ones(1)) for _ in range(9))
        class Begin(Callback):
            order = -100
            def before_fit(self): first.append(sorted(data.reads)) or data.reads.clear()
            def after_fit(self): data.reads.clear()
        dls = DataLoaders(*(DataLoader(data, bs=4, num_workers=0) for _ in range(2)))
        learn = Learner(dls, nn.Linear(1,1), loss_func=MSELossFlat(), cbs=Begin())
        with learn.no_logging(), learn.no_bar(), learn.distrib_ctx():
            data.reads.clear()
            learn.distributed_trainer.first.seconds = 60.
            learn.fit(1)
            learn.fit(1)
        return first
    assert on_ranks(run)==[[sorted([0,4,8]*4),[]]]*2

def test_attributes():
    "A number or a tensor that each rank's module draws is an error; what forward writes is not, nor the rank's own number"
    for by in (lambda rank: .5+rank, lambda rank: torch.full((2,), 1.+rank).mean()):
        res = on_ranks(lambda rank: _train(Looked(12, lambda i: 0), model=Scale(by(rank))))
        assert all('attribute by of the model (Scale)' in o for o in res), res
    def knows(rank):
        model = Scale(1.)
        model.rank,model.last = rank,torch.tensor([1.+rank])
        return _train(Looked(12, lambda i: 0), model=model, fits=2)
    assert on_ranks(knows)==['']*2
