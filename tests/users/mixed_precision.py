# once: 2, bfloat16 rounds each part of a batch by itself
# Half precision as a subclass of fastai's callback wants it
from fastai.vision.all import *
from fastdist import *
from sklearn.datasets import load_digits
from _result import result

bs = 32
set_seed(17)
class Halves(MixedPrecision):
    "Bfloat16 without a scaler, on the CPU"
    def before_fit(self):
        self.autocast,self.learn.scaler = torch.autocast('cpu', dtype=torch.bfloat16),torch.amp.GradScaler(enabled=False)
        self.scales,self.seen = L(),set()
    def after_pred(self):
        self.seen.add(str(self.pred.dtype))
        super().after_pred()

xs,ys = load_digits(return_X_y=True)
data = [(tensor(x).float()/16, int(y)) for x,y in zip(xs[:200], ys)]
dls = DataLoaders.from_dsets(data[:160], data[160:], bs=bs)
halves = Halves()
learn = Learner(dls, nn.Linear(64,10), loss_func=CrossEntropyLossFlat(), opt_func=SGD, cbs=halves)
with learn.distrib_ctx(): learn.fit(2, 0.1)
result(learn, seen=sorted(halves.seen))
