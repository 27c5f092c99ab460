# start: python
# once: no, `distribute` has its own number of ranks
# A callback replaces the model on the ranks by a larger one, with which the script goes on
from fastai.vision.all import *
from fastdist import *
from _result import result

bs = 8
set_seed(50)
class Grow(Callback):
    def before_fit(self):
        if len(self.model)==1: self.model.append(nn.Linear(1,1))
        self.learn.create_opt()

data = [(torch.randn(4), torch.randn(1)) for _ in range(60)]
learn = Learner(DataLoaders.from_dsets(data, data, bs=bs, device='cpu'), nn.Sequential(nn.Linear(4,1)), loss_func=MSELossFlat(), cbs=Grow())
Accelerator(nprocs=2).distribute(learn.fit)(1)
result(learn)
