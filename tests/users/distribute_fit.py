# start: python
# under: python, kernel
# once: no, `distribute` has its own number of ranks
# Two ranks from a plain script: what trained there is here again
import multiprocessing
multiprocessing.set_start_method('fork', force=True) # outside of a context, for Python 3.14
from fastai.vision.all import *
from fastdist import *
from sklearn.datasets import load_digits
from _result import result

bs = 16
set_seed(40)
class Noisy(Transform):
    def encodes(self, x:PILImageBW): return PILImageBW.create(np.array(x)//2+60)
class Count(Callback):
    def __init__(self): self.n = 0
    def after_batch(self): self.n += self.training

xs,ys = load_digits(return_X_y=True)
block = DataBlock((ImageBlock(PILImageBW),CategoryBlock), get_x=lambda i: (xs[i]*15).astype(np.uint8).reshape(8,8), get_y=lambda i: int(ys[i]),
    splitter=RandomSplitter(seed=42), item_tfms=Noisy)
dls = block.dataloaders(list(range(200)), bs=bs)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64,20), nn.ReLU(), nn.Linear(20,10))
    def forward(self, x): return self.layers(x)

learn = Learner(dls, Net(), loss_func=lambda pred,targ: F.cross_entropy(pred, targ), metrics=accuracy, cbs=Count())
Accelerator(nprocs=2).distribute(learn.fit_one_cycle)(2, 1e-2)
preds,_ = learn.get_preds()
result(learn, preds=preds, seen=learn.count.n)
