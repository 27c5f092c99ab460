"What it costs that ranks compare what they hold at the end of each epoch: `python benchmarks/desync.py --help`"
import torch
from statistics import median
from time import perf_counter,thread_time
from fastcore.all import call_parse
from jobs import save,show_table
from work import samples,works

def rows_of(rank, steps, rounds):
    "Milliseconds of an epoch's training, wall and processor, with and without the comparison, in turn"
    from fastai.basics import Callback,CrossEntropyLossFlat,DataLoaders,Learner,SGD
    w = works['cnn']
    data = samples(w.shape, w.bs*2*steps)
    dls = DataLoaders.from_dsets(data, data[:2], bs=w.bs, shuffle=False, num_workers=0, device='cpu')
    class Clock(Callback):
        "Takes the time of the whole epoch: the comparison comes after all callbacks of `after_train`"
        order = -100
        def before_epoch(self): self.start = perf_counter(),thread_time()
        def before_validate(self): took.append([1e3*(b-a) for a,b in zip(self.start, (perf_counter(),thread_time()))])
    res = {True:[], False:[]}
    torch.manual_seed(0)
    learn = Learner(dls, w.model(), loss_func=CrossEntropyLossFlat(), opt_func=SGD, cbs=Clock())
    for check in (True,False)*rounds:
        took = []
        with learn.no_logging(), learn.no_bar(), learn.distrib_ctx(sync_bn=False, desync_check=check): learn.fit(3)
        res[check] += took[1:]
    return res

@call_parse
def main(
    steps:int=50, # Of an epoch
    rounds:int=10, # Of three epochs with the comparison and three without; the first of three warms up
    out:str=None # JSON file for the rows
):
    "Time epochs of the CNN on 2 ranks with and without the comparison, in turn"
    from fastdist import on_ranks
    torch.set_num_threads(1)
    res = on_ranks(lambda rank: rows_of(rank, steps, rounds), join=False, timeout=1200)[0]
    rows = [[k, median(a for a,_ in v), median(b for _,b in v)] for k,v in (('with', res[True]), ('without', res[False]))]
    rows.append(['ratio', *[a/b for a,b in zip(rows[0][1:], rows[1][1:])]])
    heads = ['comparison','epoch','processor']
    show_table(f'An epoch of {steps} steps of the CNN on 2 ranks, milliseconds', heads, rows)
    save([dict(zip(heads, o)) for o in rows], out)
