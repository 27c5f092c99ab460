# fails: (?i)attribute scale of .*Scaled
# fails: belongs in a buffer
# alone: no
# A number that a module draws is no parameter, and each rank has its own
from fastai.vision.all import *
from fastdist import *

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale,self.lin = random.Random(os.getpid()).random(),nn.Linear(4,1)
    def forward(self, x): return self.lin(x)*self.scale

data = [(torch.ones(4)*i/60, torch.ones(1)) for i in range(60)]
learn = Learner(DataLoaders.from_dsets(data, data, bs=4), Scaled(), loss_func=MSELossFlat())
with learn.distrib_ctx(): learn.fit(2)
