"What it costs that ranks compare what they hold at the end of each epoch: `python benchmarks/desync.py --help`"
import torch
from statistics import median
from time import perf_counter,thread_time
from fastcore.all import call_parse
from jobs import save,show_table
from work import samples,works

def clocks(): return torch.tensor([perf_counter(),thread_time()])*1e3

def times_of(rank, steps, epochs):
    "Milliseconds, wall and processor, of each epoch's training and of the comparison in it; the first epoch warms up"
    from fastai.basics import Callback,CrossEntropyLossFlat,DataLoaders,Learner,SGD
    from fastdist.train.trainer import DistributedTrainer
    w,took,compare = works['cnn'],dict(epoch=[], comparison=[]),DistributedTrainer._compare
    def timed(self):
        start = clocks()
        compare(self)
        took['comparison'].append((clocks()-start).tolist())
    class Clock(Callback):
        order = -100
        def before_epoch(self): self.start = clocks()
        def before_validate(self): took['epoch'].append((clocks()-self.start).tolist())
    DistributedTrainer._compare = timed
    data = samples(w.shape, w.bs*2*steps)
    dls = DataLoaders.from_dsets(data, data[:2], bs=w.bs, shuffle=False, num_workers=0, device='cpu')
    learn = Learner(dls, w.model(), loss_func=CrossEntropyLossFlat(), opt_func=SGD, cbs=Clock())
    with learn.no_logging(), learn.no_bar(), learn.distrib_ctx(sync_bn=False): learn.fit(epochs+1)
    return {k:v[1:] for k,v in took.items()}

@call_parse
def main(
    steps:int=50, # Of an epoch
    epochs:int=15, # That are timed
    out:str=None # JSON file for the rows
):
    "Time the comparison of ranks beside the epochs of the CNN in which it happens, on 2 ranks"
    from fastdist import on_ranks
    torch.set_num_threads(1)
    res = on_ranks(lambda rank: times_of(rank, steps, epochs), join=False, timeout=1200)[0]
    rows = [[k, *map(median, zip(*v))] for k,v in res.items()]
    rows.append(['comparison, % of the epoch', *[100*b/a for a,b in zip(rows[0][1:], rows[1][1:])]])
    heads = ['median of rank 0','wall','processor']
    show_table(f'An epoch of {steps} steps of the CNN on 2 ranks, milliseconds', heads, rows)
    save([dict(zip(heads, o)) for o in rows], out)
