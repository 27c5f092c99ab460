# fails: OSError: \[Errno 28\] No space left on device
# fails: rank ?0
# last: raise OSError
# alone: no
# once: fails
# Rank 0 finds the disk full in its logger, while the others wait for it to export
from fastai.vision.all import *
from fastdist import *

set_seed(35)
class Journal(Callback):
    def after_fit(self):
        if rank_distrib()==0: raise OSError(28, 'No space left on device')

data = [(torch.randn(4), torch.randn(1)) for _ in range(60)]
learn = Learner(DataLoaders.from_dsets(data, data, bs=4), nn.Linear(4,1), loss_func=MSELossFlat(), cbs=Journal(), path='.')
with learn.distrib_ctx():
    learn.fit(1)
    learn.export('model.pkl')
    learn.save('model')
