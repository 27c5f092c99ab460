"What ranks must hold alike when a fit begins: what transforms have learned from their data"
import pytest
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
