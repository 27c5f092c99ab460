# Callbacks that cancel from places where reading their code does not show it
from fastai.vision.all import *
from fastdist import *
from sklearn.datasets import load_digits
from _result import result

bs = 16
set_seed(26)
class Budget(Callback):
    "Takes all events in one method"
    def __init__(self, n): self.n = n
    def __call__(self, event_name):
        if event_name=='after_batch' and self.training and self.train_iter>=self.n: raise CancelFitException()
class Skip(Callback):
    "Raises what it was given"
    def __init__(self, ex): self.ex = ex
    def before_batch(self):
        if self.training and self.iter==1: raise self.ex
def stop(ex): raise ex()
class Short(Callback):
    "Lets another function raise"
    def after_batch(self):
        if self.training and self.epoch==0 and self.iter==3: stop(CancelTrainException)

xs,ys = load_digits(return_X_y=True)
data = [(tensor(x).float()/16, int(y)) for x,y in zip(xs[:200], ys)]
dls = DataLoaders.from_dsets(data[:160], data[160:], bs=bs)
learn = Learner(dls, nn.Linear(64,10), loss_func=CrossEntropyLossFlat(), metrics=accuracy, cbs=[Budget(7),Skip(CancelBatchException()),Short()])
with learn.distrib_ctx(): learn.fit(5, 1e-2)
result(learn, steps=learn.train_iter)
