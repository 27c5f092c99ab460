# A second head that is used from the second epoch on, and not at all before
from fastai.vision.all import *
from fastdist import *
from sklearn.datasets import load_digits
from _result import result

bs = 16
set_seed(54)
class Heads(Module):
    def __init__(self): self.body,self.a,self.b,self.both = nn.Linear(64,16),nn.Linear(16,10),nn.Linear(16,10),False
    def forward(self, x):
        x = self.body(x).relu()
        return self.a(x)+self.b(x) if self.both else self.a(x)
class UseBoth(Callback):
    def before_epoch(self): self.model.both = self.epoch>0

xs,ys = load_digits(return_X_y=True)
data = [(tensor(x).float()/16, int(y)) for x,y in zip(xs[:200], ys)]
dls = DataLoaders.from_dsets(data[:150], data[150:], bs=bs)
learn = Learner(dls, Heads(), loss_func=CrossEntropyLossFlat(), metrics=accuracy, cbs=UseBoth())
with learn.distrib_ctx(): learn.fit(3, 1e-2)
result(learn)
