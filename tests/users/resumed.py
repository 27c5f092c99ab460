# to_distributed and detach_distributed by hand, saved in between, and trained on from the file
from fastai.vision.all import *
from fastdist import *
from sklearn.datasets import load_digits
from _result import result

bs = 16
xs,ys = load_digits(return_X_y=True)
data = [(tensor(x).float()/16, int(y)) for x,y in zip(xs[:200], ys)]
def get_learner():
    set_seed(51)
    dls = DataLoaders.from_dsets(data[:160], data[160:], bs=bs, shuffle=False)
    return Learner(dls, nn.Sequential(nn.Linear(64,20), nn.ReLU(), nn.Linear(20,10)), loss_func=CrossEntropyLossFlat(), metrics=accuracy, path='.')

learn = get_learner()
with learn.distrib_ctx():
    learn.fit(2, 1e-2, cbs=SaveModelCallback(every_epoch=True, with_opt=True))
    learn.save('last')
learn = get_learner().load('model_0', with_opt=True)
with learn.distrib_ctx(): learn.fit(2, 1e-2, start_epoch=1, reset_opt=False)
last = get_learner().load('last').model
result(learn, last=list(last.parameters()), files=sorted(o.name for o in Path('models').iterdir()))
