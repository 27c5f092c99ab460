"What stands beside the loss of a batch: a second pass through batch norm, losses that only look like cross entropy, a smoothed loss among the metrics"
import pytest
from torch.nn import functional as F
from fastai.basics import *
from fastai.callback.core import *
from fastai.learner import AvgSmoothLoss
from fastdist import *
from fastcore.test import test_close

weight = tensor([1.,3.,.2])

class Sam(Callback):
    "Steps by the gradient of the place to which the first gradient leads"
    def before_step(self):
        with torch.no_grad():
            moved = [(p, .05*p.grad) for p in self.model.parameters() if p.grad is not None]
            for p,d in moved: p.add_(d)
        self.learn.opt.zero_grad()
        self.learn.loss_func(self.learn.model(*self.xb), *self.yb).backward()
        with torch.no_grad():
            for p,d in moved: p.sub_(d)

class Focal(nn.CrossEntropyLoss):
    def forward(self, x, y):
        ce = F.cross_entropy(x, y, weight=self.weight, reduction='none')
        return ((1-(-ce).exp())**2*ce).mean()

def trained(loss, bs, cbs=None, metrics=None, n=103):
    set_seed(1)
    xs = torch.randn(n+45, 5)
    data = list(zip(xs, (xs[:,0]>.5).long()+(xs[:,1]>0).long()))
    dls = DataLoaders.from_dsets(data[:n], data[n:], bs=bs, drop_last=False, num_workers=0, device='cpu')
    model = nn.Sequential(nn.Linear(5,8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8,3))
    learn = Learner(dls, model, loss_func=loss, opt_func=partial(SGD, mom=0.), lr=.1, cbs=cbs, metrics=metrics)
    with learn.no_logging(), learn.no_bar(), learn.distrib_ctx(): learn.fit(2)
    return [p.detach().numpy() for p in learn.model.parameters()],np.array([list(o) for o in learn.recorder.values])

cases = dict(sam=dict(loss=CrossEntropyLossFlat(), cbs=Sam), sam_weighted=dict(loss=CrossEntropyLossFlat(weight=weight), cbs=Sam),
    focal=dict(loss=Focal(weight=weight)), smooth=dict(loss=CrossEntropyLossFlat(), metrics=AvgSmoothLoss))

@pytest.mark.parametrize('size', [2,3])
def test_as_in_one_process(size):
    def run(rank, bs=4): return {k:trained(v['loss'], bs, *[v[o]() if o in v else None for o in ('cbs','metrics')]) for k,v in cases.items()}
    alone = run(0, 4*size)
    for res in on_ranks(run, size, join=False):
        for k,(weights,values) in res.items():
            for a,b in zip(weights, alone[k][0]): assert np.allclose(a, b, 1e-4, 1e-5), k
            test_close(values, alone[k][1], 1e-4)
