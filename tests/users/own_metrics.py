# Metrics as people write them: in lists that are cleared, in helpers, from the loss of a batch
from fastai.vision.all import *
from fastdist import *
from sklearn.datasets import load_digits
from sklearn.metrics import cohen_kappa_score
from _result import result

bs = 16
set_seed(21)
class Hits:
    "As torchmetrics has it"
    def __init__(self): self.reset()
    def reset(self): self.right,self.total = tensor(0.),tensor(0.)
    def update(self, pred, targ):
        self.right += (pred.argmax(1)==targ).sum()
        self.total += len(targ)
    def compute(self): return self.right/self.total
class Helper(Metric):
    def __init__(self): self.hits = Hits()
    def reset(self): self.hits.reset()
    def accumulate(self, learn): self.hits.update(learn.pred, learn.y)
    @property
    def value(self): return self.hits.compute()
class Kappa(Metric):
    def __init__(self): self.preds,self.targs = [],[]
    def reset(self):
        self.preds.clear()
        self.targs.clear()
    def accumulate(self, learn):
        self.preds.append(learn.pred.argmax(1))
        self.targs.append(learn.y)
    @property
    def value(self): return cohen_kappa_score(torch.cat(self.targs), torch.cat(self.preds))
class ByClass(Metric):
    def __init__(self): self.n = {k:np.zeros(10) for k in ('right','all')}
    def reset(self):
        for o in self.n.values(): o.fill(0)
    def accumulate(self, learn):
        for p,y in zip(learn.pred.argmax(1).tolist(), learn.y.tolist()):
            self.n['all'][y] += 1
            self.n['right'][y] += p==y
    @property
    def value(self): return (self.n['right']/self.n['all'].clip(1)).mean()
class MeanLoss(Metric):
    def reset(self): self.total,self.n = 0.,0
    def accumulate(self, learn):
        self.total += learn.loss.item()*len(learn.y)
        self.n += len(learn.y)
    @property
    def value(self): return self.total/self.n

xs,ys = load_digits(return_X_y=True)
data = [(tensor(x).float()/16, int(y)) for x,y in zip(xs[:263], ys)]
dls = DataLoaders.from_dsets(data[:160], data[160:], bs=bs)
mets = [accuracy,Helper(),Kappa(),ByClass(),MeanLoss()]
learn = Learner(dls, nn.Sequential(nn.Linear(64,20), nn.ReLU(), nn.Linear(20,10)), loss_func=CrossEntropyLossFlat(), metrics=mets)
with learn.distrib_ctx(): learn.fit(3, 1e-2)
result(learn)
