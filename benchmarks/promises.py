"`python benchmarks/promises.py`: what fastdist promises, tried on it and on its peers, on two CPU ranks"
import tempfile,torch
from argparse import ArgumentParser
from jobs import open_jobs,save,show_table
from promised import bs,valid

peers = dict(fastdist='ByFastdist', **{'fastai.distributed':'ByFastaiDistributed', 'Accelerate':'ByAccelerate', 'Lightning':'ByLightning'})

class Failed(Exception): "What a rank has answered in the place of a result"

def ask(name, size, *request, timeout=60):
    "Return what each rank of a new job answers; raise `TimeoutError`, or `Failed` if a rank fails or dies"
    with open_jobs({0:(f'promised.{peers[name]}', size)}) as jobs:
        jobs[0].answers()
        for c in jobs[0].conns: c.send(request)
        try: return jobs[0].answers(timeout)
        except RuntimeError as e: raise Failed(str(e).strip().splitlines()[-1]) from None

def apart(a, b): return (torch.tensor(a)-torch.tensor(b)).abs().max().item()

def exact(name):
    "Return how far the parameters of two ranks are from those of one process, and accuracy and predictions from what these parameters give"
    (one,*_),(w,acc,preds) = ask('fastdist', 1, 'exact', 2*bs)[0],ask(name, 2, 'exact', bs)[0]
    xs,ys = map(torch.stack, zip(*[(x,torch.as_tensor(y)) for x,y in valid]))
    true = xs@torch.tensor(w[:8]).view(2,4).T+torch.tensor(w[8:])
    return apart(w, one),abs(acc-(true.argmax(1)==ys).float().mean().item()),order(preds, true.tolist())

def order(a, b):
    "Return in words how the predictions `a` are related to the true ones `b`"
    if len(a)!=len(b): return f'{len(a)} of {len(b)}'
    return 'in order' if apart(a, b)<1e-5 else 'in another order' if apart(sorted(a), sorted(b))<1e-5 else f'{sum(apart(x, y)>1e-5 for x,y in zip(a, b))} differ'

def hears(name, most):
    "Return the seconds after which rank 0 knows that rank 1 has failed"
    try: return ask(name, 2, 'failing', timeout=most)[0][0]
    except TimeoutError: return f'not in {most} s'

def survives(name):
    "Return how far the parameters after a kill, and the same call again, are from those without; a text where it cannot"
    with tempfile.TemporaryDirectory() as d:
        try: plain = ask(name, 2, 'survives', f'{d}/plain', None)[0]
        except Failed as e:
            if 'NotImplementedError' in str(e): return 'no'
            raise
        try: ask(name, 2, 'survives', f'{d}/killed', 9)
        except Failed: return apart(ask(name, 2, 'survives', f'{d}/killed', None)[0], plain)
    raise AssertionError(f'{name} was not killed')

heads = ['', 'parameters', 'accuracy', 'predictions', 'error heard', 'killed']

if __name__=='__main__':
    p = ArgumentParser(description=__doc__)
    p.add_argument('--most', type=float, default=30, help='seconds to wait for an error')
    p.add_argument('--out', help='JSON of the rows')
    a = p.parse_args()
    rows = [[k,*exact(k),hears(k, a.most),survives(k)] for k in peers]
    show_table('Two ranks beside one process', heads, [[f'{c:.0e}' if isinstance(c, float) and c<.01 else c for c in r] for r in rows])
    save([dict(zip(heads, r)) for r in rows], a.out)
