"What a batch costs that a loader makes in its own process: `python benchmarks/batches.py --help`"
import torch
from statistics import median
from time import perf_counter
from fastcore.all import call_parse
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import TensorDataset
from jobs import save,show_table

class Own:
    "A data set with a `__getitem__` in Python"
    def __init__(self, x, y): self.x,self.y = x,y
    def __len__(self): return len(self.x)
    def __getitem__(self, i): return self.x[i],self.y[i]

def sets(n):
    x,y,images = torch.randn(n, 64),torch.randint(0, 10, (n,)),torch.randn(n, 3, 32, 32)
    return dict(list=list(zip(x, y)), tensors=TensorDataset(x, y), array=x.numpy(), images=list(zip(images, y)), own=Own(x, y))

def loaders(ds, bs):
    "Loaders of the same batches, but for the share of two ranks, which has every second"
    from fastai.data.core import TfmdDL
    from fastdist.data.loader import StepDL
    dl = TfmdDL(ds, bs=bs, num_workers=0, device='cpu', shuffle=True)
    return dict(torch=TorchLoader(ds, batch_size=bs, shuffle=True), fastai=dl, of_2=StepDL(dl, 0, 2), alone=StepDL(dl, 0, 1))

def time_pass(dl):
    "Microseconds of each batch of a pass over `dl` after the first, before which the order is drawn"
    n,it = 0,iter(dl)
    next(it)
    start = perf_counter()
    for _ in it: n += 1
    return (perf_counter()-start)/n*1e6

@call_parse
def main(
    n:int=6400, # Samples
    bs:int=64, # Batch size
    rounds:int=15, # Passes over each loader, in turn; one more warms up
    out:str=None # JSON file for the rows
):
    "Time a batch of torch's loader, of fastai's, and of shares of that: of one of two ranks, and of one process alone"
    torch.set_num_threads(1)
    rows = []
    for name,ds in sets(n).items():
        dls = loaders(ds, bs)
        took = [{k:time_pass(dl) for k,dl in dls.items()} for _ in range(rounds+1)][1:]
        rows.append(dict(data=name, **{k:median(o[k] for o in took) for k in dls}, rounds=took))
    heads = [k for k in rows[0] if k!='rounds']
    show_table(f'Microseconds a batch of {bs}, median of {rounds} passes', heads, [[o[k] for k in heads] for o in rows])
    save(rows, out)
