# A Learner with a step of its own
from fastai.vision.all import *
from fastdist import *
from sklearn.datasets import load_digits
from _result import result

bs = 16
set_seed(22)
class TwoHeads(Learner):
    def _do_one_batch(self):
        self.pred = self.model(*self.xb)
        self('after_pred')
        self.loss = self.loss_grad = self.loss_func(self.pred, *self.yb) + 0.01*self.pred.square().mean()
        self('after_loss')
        if not self.training or not len(self.yb): return
        self('before_backward')
        self.loss_grad.backward()
        self('after_backward')
        self('before_step')
        self.opt.step()
        self('after_step')
        self.opt.zero_grad()

xs,ys = load_digits(return_X_y=True)
data = [(tensor(x).float()/16, int(y)) for x,y in zip(xs[:210], ys)]
dls = DataLoaders.from_dsets(data[:150], data[150:], bs=bs)
learn = TwoHeads(dls, nn.Sequential(nn.Linear(64,20), nn.ReLU(), nn.Linear(20,10)), loss_func=CrossEntropyLossFlat(), metrics=accuracy)
with learn.distrib_ctx(): learn.fit_one_cycle(2, 1e-2)
result(learn)
