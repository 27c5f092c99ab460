# A moving average of the weights, with which is validated
from copy import deepcopy
from fastai.vision.all import *
from fastdist import *
from sklearn.datasets import load_digits
from _result import result

bs = 16
set_seed(9)
class EMA(Callback):
    order = 70
    def __init__(self, decay=0.9): self.decay = decay
    def before_fit(self): self.avg = deepcopy(self.model)
    def after_step(self):
        with torch.no_grad():
            for a,p in zip(self.avg.parameters(), self.model.parameters()): a.lerp_(p, 1-self.decay)
    def _swap(self):
        for a,p in zip(self.avg.parameters(), self.model.parameters()): a.data,p.data = p.data,a.data
    before_validate,after_validate = _swap,_swap

xs,ys = load_digits(return_X_y=True)
data = [(tensor(x).float()/16, int(y)) for x,y in zip(xs[:200], ys)]
dls = DataLoaders.from_dsets(data[:150], data[150:], bs=bs)
ema = EMA()
learn = Learner(dls, nn.Sequential(nn.Linear(64,20), nn.ReLU(), nn.Linear(20,10)), loss_func=CrossEntropyLossFlat(), metrics=accuracy, cbs=ema)
with learn.distrib_ctx(): learn.fit(3, 1e-2)
result(learn, average=list(ema.avg.parameters()))
