# shows: computes in float32, as plain fastai does
# to_fp16 and to_bf16 on CPU ranks compute in float32, as one process of plain fastai does
from fastai.vision.all import *
from fastdist import *
from sklearn.datasets import load_digits
from _result import result

bs = 32
xs,ys = load_digits(return_X_y=True)
data = [(tensor(x).float()/16, int(y)) for x,y in zip(xs[:200], ys)]
class Seen(Callback):
    def before_fit(self): self.dtypes = set()
    def after_pred(self): self.dtypes.add(str(self.pred.dtype))
    order = MixedPrecision.order-1
seen = []
for half in ('to_fp16','to_bf16'):
    set_seed(46)
    dls = DataLoaders.from_dsets(data[:160], data[160:], bs=bs)
    learn = getattr(Learner(dls, nn.Linear(64,10), loss_func=CrossEntropyLossFlat(), metrics=accuracy, cbs=Seen()), half)()
    with learn.distrib_ctx(): learn.fit_one_cycle(2, 1e-2)
    seen.append(sorted(learn.seen.dtypes))
assert seen==[['torch.float32']]*2, seen
result(learn)
