"How much longer a step takes with a `Timeline`: `python benchmarks/timeline.py --help`"
import gc
from statistics import median,quantiles
from time import perf_counter,process_time
from fastcore.all import call_parse
from fastai.basics import *
from jobs import open_jobs,save,show_table
from steps import env
from work import Peer,works

class Timed(Peer):
    "Fits of one epoch, in turn without and with a `Timeline`, on one Learner"
    def pairs(self, model, w, n, steps):
        from fastdist import Timeline
        data = self.data(w, steps)
        dls = DataLoaders.from_dsets(data, data[:w.bs], bs=w.bs, num_workers=0, device='cpu')
        learn,marks = Learner(dls, model, loss_func=CrossEntropyLossFlat(), opt_func=SGD, lr=self.lr, metrics=accuracy),[]
        model.register_forward_pre_hook(lambda m,_: marks.append((perf_counter(), process_time())) if m.training else None)
        def step(cbs):
            marks.clear()
            gc.collect()
            learn.fit(1, cbs=cbs)
            return [median(b-a for a,b in zip(o, o[1:])) for o in zip(*marks)]
        with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(sync_bn=False):
            step(None),step(Timeline())
            res = []
            for i in range(n):
                first,second = step(Timeline() if i%2 else None),step(None if i%2 else Timeline())
                res.append((second,first) if i%2 else (first,second))
        return res

def row(work, size, answers):
    "Medians over pairs, of the slower rank; ratios are of fits that followed one another"
    pairs = [[[max(a[i][j][k] for a in answers)*1e3 for k in (0,1)] for j in (0,1)] for i in range(len(answers[0]))]
    res = dict(work=work, ranks=size, plain=median(o[0][0] for o in pairs), timed=median(o[1][0] for o in pairs))
    for k,name in enumerate(('wall','cpu')):
        ratios = [b[k]/a[k] for a,b in pairs]
        low,*_,high = quantiles(ratios, n=4)
        res |= {name:median(ratios), f'{name}_from':low, f'{name}_to':high}
    return res

@call_parse
def main(
    pairs:int=30, # Fits without, each beside one with a `Timeline`
    steps:int=40, # Of a fit
    out:str=None # JSON file for the rows
):
    "Time steps of the same Learner without and with a `Timeline`, in turn, on 1 and 2 CPU ranks"
    with open_jobs({n:('timeline.Timed',n) for n in (1,2)}, env) as jobs:
        for o in jobs.values(): o.answers()
        rows = [row(work, n, job.ask('pairs', work, pairs, steps)) for work in works for n,job in jobs.items()]
    keys = 'plain timed wall wall_from wall_to cpu cpu_from cpu_to'.split()
    show_table('milliseconds of a step, and ratio of a step with a Timeline to one without, with quartiles', ['', *keys], [[f'{o["work"]}, {o["ranks"]} ranks']+[f'{o[k]:.3f}' for k in keys] for o in rows])
    save(rows, out)
