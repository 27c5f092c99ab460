"Train until something happens: `broken.py FOLDER [BAD]`, started by any launcher. Sample `BAD` cannot be read; without one training goes on for ever"
import os,sys
from fastai.basics import *
from fastdist import *

bs = 4

class Data:
    "Numbers, one of which cannot be read"
    def __init__(self, out, bad=None): self.out,self.bad,self.xs = out,bad,torch.randn(80, 6, generator=torch.Generator().manual_seed(0))
    def __len__(self): return len(self.xs)
    def __getitem__(self, i):
        if i==self.bad: self.fail(i)
        return self.xs[i],self.xs[i].sum()[None]
    def fail(self, i):
        Path(f'{self.out}/failed').touch()
        raise ValueError(f'broken file {i}')

class Tell(Callback):
    "Says which process trains, as soon as it does"
    def __init__(self, out): self.out = out
    def after_step(self):
        if self.train_iter==2: Path(f'{self.out}/{this_world().rank}.{os.getpid()}').touch()

def train(out, bad=None):
    set_seed(1)
    dls = DataLoaders.from_dsets(Data(out, bad), Data(out), bs=bs, shuffle=False, num_workers=0, device='cpu')
    learn = Learner(dls, nn.Linear(6,1), loss_func=MSELossFlat(), opt_func=SGD, lr=0.001, cbs=Tell(out))
    with learn.distrib_ctx(), learn.no_bar(): learn.fit(1 if bad else 10**6)

if __name__=='__main__': train(sys.argv[1], *map(int, sys.argv[2:]))
