# fails: find_unused_parameters=True
# fails: \bb\.weight
# alone: no
# A second head that nobody uses: torch's DDP wants to be told, in words that a user of fastai can follow
from fastai.vision.all import *
from fastdist import *

set_seed(57)
class Heads(Module):
    def __init__(self): self.a,self.b = nn.Linear(4,1),nn.Linear(4,1)
    def forward(self, x): return self.a(x)

data = [(torch.randn(4), torch.randn(1)) for _ in range(40)]
learn = Learner(DataLoaders.from_dsets(data, data, bs=4), Heads(), loss_func=MSELossFlat())
with learn.distrib_ctx(): learn.fit(2)
