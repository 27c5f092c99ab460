"The time and memory that a metric needs which keeps all predictions: `python benchmarks/rows.py --help`"
import resource,torch
from time import perf_counter
from fastcore.all import call_parse
from jobs import save,show_table

def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss/1024

def score(p, y):
    from sklearn.metrics import roc_auc_score
    return roc_auc_score(y.numpy(), p.numpy(), multi_class='ovr')

def filled(rank, n, classes, bs):
    "A metric that has its rank's predictions, and its state before"
    from fastai.metrics import AccumMetric
    from fastdist.evaluate.metrics import zero_state
    m,g = AccumMetric(score, flatten=False),torch.Generator().manual_seed(rank)
    m.reset()
    zero = zero_state(m)
    for _ in range(n//bs):
        m.preds.append(torch.rand(bs, classes, generator=g).softmax(1))
        m.targs.append(torch.randint(0, classes, (bs,), generator=g))
    return m,zero

def measure(rank, size, n, classes, bs):
    "MB at the peak beyond those before, and seconds, of the merge and the value"
    from fastdist.evaluate.metrics import merge_metrics
    m,zero = filled(rank, n//size, classes, bs)
    before,start = peak(),perf_counter()
    merge_metrics([m], [bs]*(n//size//bs), {id(m):zero})
    value = m.value
    return peak()-before,perf_counter()-start,value

@call_parse
def main(
    n:int=2_000_000, # Number of predictions, of all ranks
    classes:int=10, # Numbers in each
    size:int=4, # Number of ranks
    bs:int=1000, # Batch size of a rank
    out:str=None # JSON file for the rows
):
    "Measure ROC-AUC over the predictions of CPU ranks, which have them in an `AccumMetric`"
    from fastdist import on_ranks
    torch.set_num_threads(1)
    res = on_ranks(lambda rank: measure(rank, size, n, classes, bs), size, timeout=1200)
    show_table(f'ROC-AUC of {n:,} x {classes} predictions on {size} ranks', ['rank','peak MB','seconds'], [[str(i),*o[:2]] for i,o in enumerate(res)])
    save([dict(rank=i, peak=o[0], seconds=o[1], value=o[2]) for i,o in enumerate(res)], out)
