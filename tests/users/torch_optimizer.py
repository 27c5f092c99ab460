# torch's optimizer in a Learner, with groups of parameters, and a schedule of one's own
from fastai.vision.all import *
from fastdist import *
from sklearn.datasets import load_digits
from _result import result

bs = 16
set_seed(53)
xs,ys = load_digits(return_X_y=True)
data = [(tensor(x).float()/16, int(y)) for x,y in zip(xs[:200], ys)]
dls = DataLoaders.from_dsets(data[:150], data[150:], bs=bs)
model = nn.Sequential(nn.Linear(64,20), nn.ReLU(), nn.Linear(20,10))
def layers(m): return [params(m[0]),params(m[2])]
opt_func = partial(OptimWrapper, opt=partial(torch.optim.AdamW, amsgrad=True))
learn = Learner(dls, model, loss_func=nn.CrossEntropyLoss(), opt_func=opt_func, splitter=layers, metrics=[accuracy,top_k_accuracy])
sched = dict(lr=combine_scheds([.3,.7], [SchedLin(1e-3,1e-2),SchedCos(1e-2,1e-4)]))
with learn.distrib_ctx(): learn.fit(3, cbs=ParamScheduler(sched))
result(learn, lrs=learn.recorder.lrs)
