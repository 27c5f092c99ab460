# start: python
# under: python
# fails: ValueError: image 37 is broken
# fails: rank ?1
# last: if i==37: raise ValueError
# alone: no
# once: no, `distribute` has its own number of ranks
# One file cannot be read, in ranks that a plain script starts
from fastai.vision.all import *
from fastdist import *

set_seed(41)
class Images:
    def __len__(self): return 80
    def __getitem__(self, i):
        if i==37: raise ValueError(f'image {i} is broken')
        return torch.full((3,8,8), i/100),i%2

dls = DataLoaders.from_dsets(Images(), Images(), bs=4, shuffle=False)
learn = Learner(dls, nn.Sequential(Flatten(), nn.Linear(192,2)), loss_func=CrossEntropyLossFlat(), metrics=accuracy)
accelerator = Accelerator(nprocs=2)
accelerator.distribute(learn.fit)(2)
