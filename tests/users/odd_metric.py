# shows: (?i)warn.*speed
# compared: steps
# alone: no
# once: no, its metric is the time
# How many samples a second: each rank has its own answer, and which model is best depends on it
from time import perf_counter
from fastai.vision.all import *
from fastdist import *
from sklearn.datasets import load_digits
from _result import result

bs = 16
set_seed(34)
class Speed(Metric):
    def reset(self): self.start,self.n = perf_counter(),0
    def accumulate(self, learn): self.n += len(learn.y)
    @property
    def value(self): return self.n/(perf_counter()-self.start)

xs,ys = load_digits(return_X_y=True)
data = [(tensor(x).float()/16, int(y)) for x,y in zip(xs[:250], ys)]
dls = DataLoaders.from_dsets(data[:160], data[160:], bs=bs)
learn = Learner(dls, nn.Linear(64,10), loss_func=CrossEntropyLossFlat(), metrics=[accuracy,Speed()], path='.')
with learn.distrib_ctx(): learn.fit(4, 1e-2, cbs=[EarlyStoppingCallback('speed', comp=np.greater, patience=2),SaveModelCallback('speed', comp=np.greater)])
result(learn)
