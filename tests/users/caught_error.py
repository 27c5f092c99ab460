# The script catches what goes wrong in a fit, and trains again
from fastai.vision.all import *
from fastdist import *
from _result import result

bs = 8
set_seed(36)
class Once(Callback):
    "Fails in the second epoch of the first fit, on the last rank"
    def __init__(self): self.done = False
    def after_batch(self):
        if self.epoch==1 and self.train_iter==5 and not self.done:
            self.done = True
            if rank_distrib()==max(0, num_distrib()-1): raise RuntimeError('out of memory')

data = [(torch.randn(4), torch.randn(1)) for _ in range(60)]
learn = Learner(DataLoaders.from_dsets(data[:50], data[50:], bs=bs), nn.Linear(4,1), loss_func=MSELossFlat(), opt_func=SGD, cbs=Once())
with learn.distrib_ctx():
    try: learn.fit(2, 0.01)
    except RuntimeError as e:
        if rank_distrib()==0: print('once more, after', str(e).strip().split(': ')[-1].split('\n')[-1])
    learn.fit(2, 0.01)
result(learn)
