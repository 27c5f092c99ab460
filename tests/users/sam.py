# Sharpness-aware minimisation: climb to where the loss is worse, and take the gradient there
from fastai.vision.all import *
from fastdist import *
from sklearn.datasets import load_digits
from _result import result

bs = 16
set_seed(8)
class SAM(Callback):
    def __init__(self, rho=0.05): self.rho = rho
    def before_step(self):
        params = [p for p in self.model.parameters() if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        climbs = [p.grad*self.rho/norm for p in params]
        with torch.no_grad():
            for p,e in zip(params, climbs): p.add_(e)
        self.opt.zero_grad()
        self.loss_func(self.model(*self.xb), *self.yb).backward()
        with torch.no_grad():
            for p,e in zip(params, climbs): p.sub_(e)

xs,ys = load_digits(return_X_y=True)
data = [(tensor(x).float()/16, int(y)) for x,y in zip(xs[:200], ys)]
dls = DataLoaders.from_dsets(data[:150], data[150:], bs=bs)
learn = Learner(dls, nn.Sequential(nn.Linear(64,20), nn.ReLU(), nn.Linear(20,10)), loss_func=CrossEntropyLossFlat(), metrics=accuracy, cbs=SAM())
with learn.distrib_ctx(): learn.fit(2, 1e-2)
result(learn)
