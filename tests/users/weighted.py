# Rare samples more often: fastai's WeightedDL
from fastai.vision.all import *
from fastdist import *
from sklearn.datasets import load_digits
from _result import result

bs = 16
set_seed(13)
xs,ys = load_digits(return_X_y=True)
dblock = DataBlock((TransformBlock,CategoryBlock), get_x=lambda i: tensor(xs[i]).float()/16,
    get_y=lambda i: int(ys[i]), splitter=IndexSplitter(range(170, 200)))
dls = dblock.weighted_dataloaders(list(range(200)), np.array([1+4*(y==3) for y in ys[:170]]), bs=bs)
class Reweigh(Callback):
    "From the second epoch on another class counts more"
    def before_epoch(self):
        if self.epoch==1: self.dls.train.wgts = (w := np.array([1.+4*(y==5) for y in ys[:170]]))/w.sum()

learn = Learner(dls, nn.Linear(64,10), loss_func=CrossEntropyLossFlat(), metrics=accuracy, cbs=Reweigh())
with learn.distrib_ctx(): learn.fit(3, 1e-2)
result(learn)
