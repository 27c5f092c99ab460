# Samples from a stream whose length the loader is told, as fastai's documentation has it
from torch.utils.data import IterableDataset
from fastai.vision.all import *
from fastdist import *
from _result import result

bs = 4
class Stream(IterableDataset):
    def __init__(self, n): self.n = n
    def __iter__(self):
        g = torch.Generator().manual_seed(self.n)
        for i in range(self.n):
            x = torch.randn(3, generator=g)
            yield x,x.sum().view(1)

set_seed(15)
train,valid = DataLoader(Stream(60), bs=bs, n=60, num_workers=1),DataLoader(Stream(21), bs=bs, n=21, num_workers=1)
learn = Learner(DataLoaders(train, valid), nn.Linear(3,1), loss_func=MSELossFlat(), opt_func=SGD, metrics=mse)
with learn.distrib_ctx(): learn.fit(2, 0.05)
result(learn)
