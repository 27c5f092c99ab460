"Where a number of a GPU would be waited for, another branch runs; here it runs on CPU ranks, whose tensors say that they are none"
import pytest
from unittest import mock
from fastai.basics import *
from fastai.callback.all import *
from fastai.optimizer import Lamb,Larc,QHAdam,RAdam
from fastdist import *
from compare import check,few,learner

class Both(Module):
    "A loss with a weight of its own"
    def __init__(self): self.w = nn.Parameter(torch.ones(3))
    def forward(self, out, y): return F.cross_entropy(out*self.w, y)

def data(n):
    g = torch.Generator().manual_seed(0)
    return list(zip(torch.randn(n, 5, generator=g), torch.randint(0, 3, (n,), generator=g)))

weights = torch.tensor([1.,2.,5.])
of = partial(partial, CrossEntropyLossFlat)
losses = dict(mean=of(), weighted=of(weight=weights), ignored=of(ignore_index=2), summed=of(reduction='sum'), both=of(weight=weights, ignore_index=0), own=Both)
opts = dict(sgd=partial(SGD, mom=.9), adam=Adam, radam=RAdam, qhadam=QHAdam, larc=Larc, lamb=Lamb)

def make(n, bs, rank, loss):
    set_seed(1)
    return learner((data(n),data(11)), nn.Linear(5,3), bs, rank, loss=losses[loss](), drop_last=False)

def fit(learn, opt=SGD, lr=.02, **kw):
    learn.opt_func = opt
    learn.fit(2, lr, **kw)
    return [p.detach().clone() for p in learn.model.parameters()],learn.recorder.values,[float(o) for o in learn.recorder.losses]

def cases(loss):
    "What each loss is trained with; a window that stays open is the last"
    some = {k:partial(fit, opt=o) for k,o in opts.items()} if loss=='mean' else dict(sgd=fit)
    return some | dict(clipped=lambda o: fit(o, cbs=GradientClip(.1)), accumulated=lambda o: fit(o, cbs=GradientAccumulation(12)))

@pytest.mark.parametrize('size', (2,3))
@pytest.mark.parametrize('loss', losses)
@pytest.mark.by_default('own')
def test_the_branches_of_a_gpu(loss, size):
    "Learners in one process are plain fastai, which looks at none of it"
    with mock.patch.object(torch.Tensor, 'is_cpu', False, create=True): check(partial(make, loss=loss), size, cases(loss), few, atol=5e-6)
