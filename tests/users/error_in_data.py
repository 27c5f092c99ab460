# fails: ValueError: image 37 is broken
# fails: rank ?1
# last: if i==37: raise ValueError
# alone: no
# under: torchrun
# once: fails
# One file cannot be read
from fastai.vision.all import *
from fastdist import *

set_seed(27)
class Images:
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __getitem__(self, i):
        if i==37: raise ValueError(f'image {i} is broken')
        return torch.full((3,8,8), i/100),i%2

dls = DataLoaders.from_dsets(Images(80), Images(20), bs=4, shuffle=False)
learn = Learner(dls, nn.Sequential(Flatten(), nn.Linear(192,2)), loss_func=CrossEntropyLossFlat(), metrics=accuracy)
with learn.distrib_ctx(): learn.fit(2)
