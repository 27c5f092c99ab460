"What an audit takes, next to its steps in one process: `python benchmarks/audit.py --help`"
import time
from statistics import median
from fastcore.all import call_parse
from fastai.basics import *
from fastdist import *
from fastdist.job.fork import on_ranks
from work import all_works,samples

def learner(work, bs):
    torch.manual_seed(0)
    w = all_works[work]
    dls = DataLoaders.from_dsets(samples(w.shape, w.bs*40), samples(w.shape, w.bs*20), bs=bs, num_workers=0, device='cpu')
    return Learner(dls, w.model(), loss_func=CrossEntropyLossFlat(), metrics=accuracy)

class Steps(Callback):
    "Times the steps from the second on, and the batches of validation"
    order = 200
    def before_fit(self): self.times = {True:[],False:[]}
    def before_batch(self): self.begun = time.perf_counter()
    def after_batch(self): self.times[self.training].append(time.perf_counter()-self.begun)

def one_process(work, size, k):
    "Seconds of `k` steps and `k` batches of validation in one process, with the batches of `size` ranks"
    cb,learn = Steps(),learner(work, all_works[work].bs*size)
    with learn.no_bar(),learn.no_logging(): learn.fit(1, cbs=cb)
    return sum(k*median(cb.times[o][1:]) for o in (True,False))

def audited(rank, work, k):
    "Seconds of an audit of `k` steps"
    learn = learner(work, all_works[work].bs)
    with learn.no_bar(),learn.no_logging(),learn.distrib_ctx(audit=k) as l:
        trainer = first(l._grab_cbs(DistributedTrainer))
        audit,took = trainer.rehearsal,[]
        def timed(o):
            if audit.busy: return # the audit's own steps are a fit, too
            begun = time.perf_counter()
            audit(o)
            took.append(time.perf_counter()-begun)
        trainer.rehearsal = timed
        for _ in range(3): l.fit(1)
    return took

@call_parse
def main(
    work:str='cnn', # Workload of `work.py`
    k:int=3, # Steps of the audit
    size:int=2 # Ranks
):
    "Print what an audit of a fit takes, the first in a process and later ones, as a multiple of its steps in one process"
    one = one_process(work, size, k)
    took = on_ranks(partial(audited, work=work, k=k), size, join=False)[0]
    print(f'{k} steps and {k} batches of validation in one process: {one*1e3:.0f} ms')
    print(f'audit of {work} on {size} ranks: {", ".join(f"{o*1e3:.0f} ms ({o/one:.1f} x)" for o in took)}')
