# ranks: 3
# fastai's gradient accumulation, with clipping
from fastai.vision.all import *
from fastai.callback.all import *
from fastdist import *
from sklearn.datasets import load_digits
from _result import result

bs = 4
set_seed(10)
class CountSteps(Callback):
    def before_fit(self): self.n = 0
    def after_step(self): self.n += 1

xs,ys = load_digits(return_X_y=True)
data = [(tensor(x).float()/16, int(y)) for x,y in zip(xs[:200], ys)]
dls = DataLoaders.from_dsets(data[:150], data[150:], bs=bs)
count = CountSteps()
learn = Learner(dls, nn.Sequential(nn.Linear(64,20), nn.ReLU(), nn.Linear(20,10)), loss_func=CrossEntropyLossFlat(), metrics=accuracy)
with learn.distrib_ctx(): learn.fit(2, 1e-2, cbs=[GradientAccumulation(36),GradientClip(0.5),count])
result(learn, steps=count.n)
