# Look for a learning rate, then train with it; what was random goes on from there
from fastai.vision.all import *
from fastdist import *
from sklearn.datasets import load_digits
from _result import result

bs = 16
set_seed(18)
xs,ys = load_digits(return_X_y=True)
data = [(tensor(x).float()/16, int(y)) for x,y in zip(xs[:240], ys)]
dls = DataLoaders.from_dsets(data[:200], data[200:], bs=bs)
learn = Learner(dls, nn.Sequential(nn.Linear(64,20), nn.ReLU(), nn.Linear(20,10)), loss_func=CrossEntropyLossFlat(), metrics=accuracy)
with learn.distrib_ctx():
    lr = learn.lr_find(num_it=30).valley
    learn.fit_one_cycle(2, lr)
result(learn, lr=lr)
