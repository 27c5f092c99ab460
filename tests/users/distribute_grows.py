# start: python
# under: python
# fails: ReturnError: What trained on the ranks does not fit what the parent process has: the model was a Linear, is a Sequential
# alone: no
# once: no, `distribute` has its own number of ranks
# A callback replaces the model on the ranks by a larger one, which the script does not have
from fastai.vision.all import *
from fastdist import *

set_seed(50)
class Grow(Callback):
    def before_fit(self):
        self.learn.model = nn.Sequential(self.model, nn.Linear(1,1))
        self.learn.create_opt()

data = [(torch.randn(4), torch.randn(1)) for _ in range(60)]
learn = Learner(DataLoaders.from_dsets(data, data, bs=4), nn.Linear(4,1), loss_func=MSELossFlat(), cbs=Grow())
Accelerator(nprocs=2).distribute(learn.fit)(1)
