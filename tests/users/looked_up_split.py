# fails: (?i)(input|target) 0 of (training|validation) item
# fails: (?i)seed
# alone: no
# A data set looks up its split when an item is read, and it is drawn by each rank: ranks would train on what others validate on
from fastai.vision.all import *
from fastdist import *

order = torch.randperm(200, generator=torch.Generator().manual_seed(os.getpid()))
class Part:
    def __init__(self, start, n): self.start,self.n = start,n
    def __len__(self): return self.n
    def __getitem__(self, i):
        j = order[self.start+i]
        return torch.ones(4)*j/200,j.float()[None]

learn = Learner(DataLoaders.from_dsets(Part(0, 160), Part(160, 40), bs=4), nn.Linear(4,1), loss_func=MSELossFlat())
with learn.distrib_ctx(): learn.fit(2)
