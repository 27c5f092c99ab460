# A loss function that has something to learn too: the centre of each class
from fastai.vision.all import *
from fastdist import *
from sklearn.datasets import load_digits
from _result import result

bs = 16
set_seed(23)
class CentreLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.centres,self.scale = nn.Parameter(torch.randn(10,10)),nn.Parameter(tensor(1.))
    def forward(self, pred, targ): return F.cross_entropy(self.scale*pred, targ)+0.1*(pred-self.centres[targ]).square().mean()

xs,ys = load_digits(return_X_y=True)
data = [(tensor(x).float()/16, int(y)) for x,y in zip(xs[:200], ys)]
dls = DataLoaders.from_dsets(data[:150], data[150:], bs=bs)
loss = CentreLoss()
learn = Learner(dls, nn.Linear(64,10), loss_func=loss, metrics=accuracy, splitter=lambda m: [list(m.parameters()),list(loss.parameters())])
with learn.distrib_ctx(): learn.fit(3, 1e-2)
result(learn, loss=list(loss.parameters()))
