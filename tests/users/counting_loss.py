# A loss function with a count of its own, by which it weighs: it is called as often as in one process
from fastai.vision.all import *
from fastdist import *
from sklearn.datasets import load_digits
from _result import result

bs = 16
set_seed(47)
class WarmUp:
    def __init__(self): self.n = 0
    def __call__(self, pred, targ):
        self.n += 1
        return F.cross_entropy(pred, targ)*min(1, self.n/20)

xs,ys = load_digits(return_X_y=True)
data = [(tensor(x).float()/16, int(y)) for x,y in zip(xs[:224], ys)]
dls = DataLoaders.from_dsets(data[:160], data[160:], bs=bs)
loss = WarmUp()
learn = Learner(dls, nn.Linear(64,10), loss_func=loss, metrics=accuracy)
with learn.distrib_ctx(): learn.fit(3, 1e-2)
result(learn, calls=loss.n)
