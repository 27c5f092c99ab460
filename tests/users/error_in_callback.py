# fails: KeyError: .*learning rate
# fails: rank ?0
# last: self.logs\['learning rate'\]
# hides: rank0\]: \[rank0
# alone: no
# once: fails
# A logger of one's own has a typo, which rank 0 finds while the others save
from fastai.vision.all import *
from fastdist import *

set_seed(28)
class Journal(Callback):
    order = 65
    def before_fit(self): self.logs = dict(lr=[])
    def after_epoch(self):
        if rank_distrib()==0 and self.n_epoch==2: self.logs['learning rate'].append(self.opt.hypers[-1]['lr'])

data = [(torch.randn(4), torch.randn(1)) for _ in range(40)]
learn = Learner(DataLoaders.from_dsets(data, data, bs=4), nn.Linear(4,1), loss_func=MSELossFlat(), cbs=Journal(), path='.')
for n in (1,2):
    with learn.distrib_ctx(): learn.fit(n, cbs=SaveModelCallback(every_epoch=True))
