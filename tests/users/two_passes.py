# Two losses, two backward passes, one step: an adversarial example in a Learner's step
from fastai.vision.all import *
from fastdist import *
from sklearn.datasets import load_digits
from _result import result

bs = 16
set_seed(31)
class Adversarial(Callback):
    "Half of the gradient comes from the batch moved to where its loss is worse"
    def after_backward(self):
        x = self.x.clone().requires_grad_()
        grad, = torch.autograd.grad(self.loss_func(self.model(x), self.y), x)
        self.loss_func(self.model(x.detach()+0.05*grad.sign()), self.y).backward()

xs,ys = load_digits(return_X_y=True)
data = [(tensor(x).float()/16, int(y)) for x,y in zip(xs[:210], ys)]
dls = DataLoaders.from_dsets(data[:160], data[160:], bs=bs)
learn = Learner(dls, nn.Sequential(nn.Linear(64,20), nn.ReLU(), nn.Linear(20,10)), loss_func=CrossEntropyLossFlat(), opt_func=SGD, cbs=Adversarial())
with learn.distrib_ctx(): learn.fit(2, 1e-1)
result(learn)
