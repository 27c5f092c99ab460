"What ranks must have alike: what transforms have learned from their data, and what a sample is"
import pytest,random,warnings
from fastai.basics import *
from fastcore.test import *
from fastdist import *
from fastdist.launch.fork import *

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

class Named:
    "Classes by name, numbered in the order in which this rank found them; with noise in its inputs if `noise` is set"
    def __init__(self, turn, noise=False, slow=False): self.at,self.noise,self.n,self.rng = {c:(i+turn)%3 for i,c in enumerate('abc')},noise,0,random.Random()
    def __len__(self): return 20
    def __getitem__(self, i):
        self.n += 1
        return torch.full((2,), float(i))+(self.rng.random() if self.noise else 0),self.at['abc'[i%3]]
class Salted(Named):
    "Targets that no attribute shows"
    def __getitem__(self, i): return torch.ones(2),hash(f'{i}-{salt}')%7
class Turned(Named):
    "Targets drawn anew at each reading"
    def __getitem__(self, i): return torch.ones(2),random.randrange(3)
salt = 0

def _read(mk, cls, **kw):
    "Warnings of two fits with another data set each, and how often samples were read in the second"
    dls = [cls([mk() for _ in range(2)]) for _ in range(2)]
    with warnings.catch_warnings(record=True) as ws:
        warnings.simplefilter('always')
        learn = Learner(dls[0], nn.Linear(2,7), loss_func=CrossEntropyLossFlat())
        with learn.no_logging(), learn.no_bar(), learn.distrib_ctx(**kw):
            learn.fit(1)
            learn.dls = dls[1]
            learn.fit(1)
    return [str(w.message) for w in ws if str(w.message).startswith('Ranks differ in')],dls[1].train.dataset.n

def _fastais(ds): return DataLoaders.from_dsets(*ds, bs=4, num_workers=0, device='cpu')
def _torchs(ds): return DataLoaders(*[torch.utils.data.DataLoader(d, batch_size=4) for d in ds])
def _by_salt(rank):
    global salt
    salt = rank
    return _read(lambda: Salted(0), _fastais)[0]

@pytest.mark.parametrize('loaders', [_fastais,_torchs])
@pytest.mark.by_default('_torchs')
def test_samples(loaders):
    "Another target of a sample is named once, by both values; reading leaves no trace"
    (first,n),*others = on_ranks(lambda rank: _read(lambda: Named(rank), loaders), 2)
    test_eq([o.partition(' at')[0] for o in first], [f'Ranks differ in target 0 of {o} sample 0' for o in ('training','validation')])
    assert all('with 1 instead of 0' in o and 'sorted(set(' in o for o in first) and not others[0][0], first
    test_eq(on_ranks(lambda rank: _read(lambda: Named(0), loaders), 2), [([],n)]*2)
    test_eq(on_ranks(lambda rank: _read(lambda: Named(0), loaders, desync_check=False), 2), [([],n)]*2)

def test_samples_that_no_attribute_shows():
    first,other = on_ranks(_by_salt, 2)
    assert len(first)==2 and not other, first

@pytest.mark.parametrize('mk', [lambda: Named(0, noise=True), lambda: Turned(0)])
@pytest.mark.by_default('<lambda>1')
def test_drawn_samples(mk):
    "What is drawn is not compared, by whatever generator"
    test_eq([o for o,_ in on_ranks(lambda rank: _read(mk, _fastais), 2)], [[],[]])
