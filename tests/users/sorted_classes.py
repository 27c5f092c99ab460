# under: torchrun
# The classes of a set, in an order that all processes share
from fastai.vision.all import *
from fastdist import *
import _result

bs = 8
set_seed(7)
names = [f'{o} bird' for o in ('red','blue','green','grey','white')]
vocab = sorted(set(names))
xs = torch.randn(80,4)
dsets = Datasets(range(80), [[lambda i: xs[i]], [lambda i: names[i%5], Categorize(vocab, sort=False)]], splits=[range(60),range(60,80)])
learn = Learner(dsets.dataloaders(bs=bs, device='cpu'), nn.Linear(4,5), loss_func=CrossEntropyLossFlat(), metrics=accuracy)
with learn.distrib_ctx(): learn.fit(2, lr=0.01)
_result.result(learn)
