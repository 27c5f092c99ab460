# A callback puts a larger model in the place of the first, and another thaws a layer in the middle of an epoch
from fastai.vision.all import *
from fastdist import *
from sklearn.datasets import load_digits
from _result import result

bs = 16
set_seed(30)
class Grow(Callback):
    def before_fit(self):
        torch.manual_seed(3)
        self.learn.model = nn.Sequential(self.model[0], nn.ReLU(), nn.Linear(20,20), nn.ReLU(), self.model[2])
        self.learn.create_opt()
class Thaw(Callback):
    def before_fit(self): self.model[0].requires_grad_(False)
    def before_batch(self):
        if self.training and self.train_iter==4: self.model[0].requires_grad_(True)

xs,ys = load_digits(return_X_y=True)
data = [(tensor(x).float()/16, int(y)) for x,y in zip(xs[:200], ys)]
dls = DataLoaders.from_dsets(data[:160], data[160:], bs=bs)
learn = Learner(dls, nn.Sequential(nn.Linear(64,20), nn.ReLU(), nn.Linear(20,10)), loss_func=CrossEntropyLossFlat(), opt_func=SGD, metrics=accuracy)
with learn.distrib_ctx():
    learn.fit(1, 1e-1, cbs=Grow())
    learn.fit(2, 1e-1, cbs=Thaw())
result(learn)
