# ranks: 3
# once: 2, three ranks have too few of 8 samples to probe what Shift does, and say so
# Rare classes weigh more, some labels are to be ignored, and weights of the model are kept small by a callback
from fastai.vision.all import *
from fastdist import *
from sklearn.datasets import load_digits
from _result import result

bs = 8
set_seed(52)
class KeepSmall(Callback):
    def after_loss(self):
        if self.training: self.learn.loss_grad = self.loss_grad + 1e-2*sum(p.square().sum() for p in self.model.parameters())
class Shift(Callback):
    "Adds to the inputs what grows with the step"
    def before_batch(self):
        if self.training: self.learn.xb = (self.x+0.01*self.train_iter,)

xs,ys = load_digits(return_X_y=True)
data = [(tensor(x).float()/16, int(y) if i%7 else -100) for i,(x,y) in enumerate(zip(xs[:200], ys))]
dls = DataLoaders.from_dsets(data[:150], data[150:], bs=bs)
loss = CrossEntropyLossFlat(weight=torch.linspace(.2, 2, 10), ignore_index=-100)
learn = Learner(dls, nn.Linear(64,10), loss_func=loss, metrics=accuracy, cbs=[KeepSmall(),Shift()])
with learn.distrib_ctx(): learn.fit(2, 1e-2)
result(learn)
