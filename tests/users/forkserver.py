# alone: no
# once: runs
# Python 3.14 starts data workers by forkserver, which cannot have a script's lambdas; on ranks they are forked, as before
import multiprocessing
from fastai.vision.all import *
from fastdist import *
from sklearn.datasets import load_digits
from _result import result

if multiprocessing.get_start_method()!='forkserver': multiprocessing.set_start_method('forkserver', force=True)
bs = 16
set_seed(5)
xs,ys = load_digits(return_X_y=True)
data = [(x,int(y)) for x,y in zip(xs[:200], ys)]
as_pair = lambda o: (tensor(o[0]).float()/16, o[1])
dls = DataLoaders(*[DataLoader(o, bs=bs, shuffle=s, num_workers=2, after_item=as_pair) for o,s in ((data[:160],True),(data[160:],False))])
learn = Learner(dls, nn.Linear(64,10), loss_func=CrossEntropyLossFlat(), metrics=accuracy)
with learn.distrib_ctx(): learn.fit(2, 1e-2)
assert multiprocessing.get_start_method()=='forkserver'
result(learn)
