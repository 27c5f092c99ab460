"The time and memory that 2 ranks need for the order of one epoch: `python benchmarks/order.py --help`"
import resource
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from torch import distributed as dist
from fastcore.all import call_parse
from jobs import open_jobs,save,show_table

peers = {'fastai.distributed':('order.Broadcast',2), 'fastdist':('order.InStep',2), 'fastai, one process':('order.Alone',1)}

def resident(): return int(Path('/proc/self/statm').read_text().split()[1])*resource.getpagesize()
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss*1024

class Alone:
    "fastai in one process: a shuffled loader over numbers that nobody lists, and what drawing its order takes"
    def __init__(self, rank, size): self.rank,self.size = rank,size
    def share(self, dl): return dl
    def draw(self, dl): return dl.get_idxs()
    def meet(self): "Wait until all ranks are here"

    def __call__(self, n):
        "Seconds, bytes at the peak beyond those before, and number of indices"
        from fastai.data.core import TfmdDL
        dl = self.share(TfmdDL(range(n), bs=64, shuffle=True, num_workers=0, device='cpu'))
        self.meet()
        before,start = resident(),perf_counter()
        idxs = self.draw(dl)
        return perf_counter()-start,peak()-before,len(idxs)

class Broadcast(Alone):
    "`fastai.distributed`: rank 0 sends its order, which each rank has drawn for itself too"
    def __init__(self, rank, size):
        from fast import join_without_gpu
        super().__init__(rank, size)
        join_without_gpu()

    def meet(self): dist.barrier()

    def share(self, dl):
        from fastai.distributed import DistributedDL
        return DistributedDL(dl, self.rank, self.size)

class InStep(Alone):
    "fastdist: the ranks draw the same order from rank 0's random state"
    def __init__(self, rank, size):
        import fastdist
        super().__init__(rank, size)
        fastdist.setup_distrib()

    def meet(self): dist.barrier()
    def draw(self, dl): return dl._draw()

    def share(self, dl):
        from fastdist.data.loader import StepDL
        share = StepDL(dl, self.rank, self.size)
        share._pass.joint = True
        return share

class OneOf(Alone):
    "One rank of many, with no group: what its share of an order takes, in either layout"
    def __call__(self, n, ranks, kind, shuffle):
        "Seconds, bytes at the peak and bytes that stay, beyond those before, and number of indices"
        from fastai.data.core import TfmdDL
        from fastdist.data import loader
        dl = getattr(loader, kind)(TfmdDL(range(n), bs=64, shuffle=shuffle, num_workers=0, device='cpu'), ranks-1, ranks)
        before,start = resident(),perf_counter()
        idxs = dl._draw()
        return perf_counter()-start,peak()-before,resident()-before,len(idxs)

def shares(n, ranks):
    "Seconds, and peak and resident MB of the last of `ranks` ranks, each in a new process"
    rows = []
    for kind,shuffle in product(('DistributedDL','StepDL'), (False,True)):
        with open_jobs({'one':('order.OneOf',1)}) as jobs:
            jobs['one'].answers()
            (secs,top,left,_), = jobs['one'].ask(n, ranks, kind, shuffle)
        rows.append(dict(kind=kind, shuffle=shuffle, n=n, ranks=ranks, seconds=secs, peak=top/1e6, resident=left/1e6))
    return rows

def report_shares(n, ranks, rows):
    cells = [[f'{o["kind"]}, {"shuffled" if o["shuffle"] else "in sequence"}', o['seconds'], o['peak'], o['resident']] for o in rows]
    show_table(f'Share of one of {ranks} ranks of {n:,} samples', ['', 'seconds', 'peak MB', 'resident MB'], cells)

def drawn(name, size, n):
    "Seconds and bytes a sample in new processes, each the larger one of the ranks"
    with open_jobs({name:(name,size)}) as jobs:
        jobs[name].answers()
        secs,size,lens = zip(*jobs[name].ask(n))
    if sum(lens)!=n+n%len(lens): raise ValueError(f'{name}: the ranks have {lens} of {n} samples')
    return max(secs),max(size)/n

def summary(peer, n, runs):
    secs,size = [list(o) for o in zip(*runs)]
    return dict(peer=peer, n=n, seconds=median(secs), bytes=median(size), rounds=dict(seconds=secs, bytes=size))

def report(n, rows):
    ref = rows[0]
    cells = [[o['peer'], o['seconds'], o['seconds']/ref['seconds'], o['bytes'], o['bytes']/ref['bytes']] for o in rows]
    show_table(f'Order of one epoch of {n:,} samples, shuffled', ['', 'seconds', 'ratio', 'peak bytes a sample', 'ratio'], cells)

@call_parse
def main(
    n:int=10_000_000, # Number of samples
    ranks:int=0, # Instead, what the share of one of so many ranks takes
    rounds:int=3, # Times that each peer draws an order, in new processes
    out:str=None # JSON file for the rows
):
    "Compare `fastai.distributed` and fastdist at drawing the order of an epoch, on 2 CPU ranks; or measure the share of one rank of many"
    if ranks:
        rows = shares(n, ranks)
        report_shares(n, ranks, rows)
        return save(rows, out)
    runs = {k:[] for k in peers}
    for _ in range(rounds):
        for k,(name,size) in peers.items(): runs[k].append(drawn(name, size, n))
    rows = [summary(k, n, o) for k,o in runs.items()]
    report(n, rows)
    save(rows, out)
