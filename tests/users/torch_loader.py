# PyTorch's own loaders, with a sampler from this script, in a Learner
import torch
from torch.utils.data import DataLoader,Dataset,Sampler
from fastai.vision.all import *
from fastdist import *
from _result import result

bs = 8
class Points(Dataset):
    def __init__(self, n): self.xs = torch.randn(n, 4, generator=torch.Generator().manual_seed(n))
    def __len__(self): return len(self.xs)
    def __getitem__(self, i): return self.xs[i],self.xs[i].sum().view(1)
class Hardest(Sampler):
    "The largest first, in an order that is drawn among neighbours"
    def __init__(self, xs): self.xs = xs
    def __len__(self): return len(self.xs)
    def __iter__(self): return iter((self.xs.norm(dim=1)+torch.rand(len(self.xs))/4).argsort(descending=True).tolist())

torch.manual_seed(14)
train,valid = Points(101),Points(30)
dls = DataLoaders(DataLoader(train, bs, sampler=Hardest(train.xs), num_workers=2), DataLoader(valid, 2*bs))
learn = Learner(dls, nn.Linear(4,1), loss_func=nn.MSELoss(), opt_func=SGD, metrics=[mae])
with learn.distrib_ctx(): learn.fit(2, 0.05)
result(learn)
