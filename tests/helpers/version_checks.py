"What is tried with each pair of versions: `python version_checks.py` prints a line a check; `tests/helpers/versions.py` runs it in one environment after the other"
import subprocess,sys,tempfile,time,traceback
from contextlib import nullcontext
from pathlib import Path

examples = Path(__file__).resolve().parents[2]/'examples'

def shell(*cmd, rc=0, timeout=600):
    "What a command prints; `rc` is `None` where it shall fail"
    p = subprocess.run([sys.executable, *map(str, cmd)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout)
    assert (p.returncode!=0) if rc is None else p.returncode==rc, f'exit code {p.returncode}:\n{p.stdout[-3000:]}'
    return p.stdout

def torchrun(*cmd, **kw): return shell('-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', 2, *cmd, **kw)

def learner(bs, drop=0, **kw):
    "A Learner whose last batches are ragged"
    from fastai.basics import DataLoaders,Learner,CrossEntropyLossFlat,Adam,accuracy,nn,set_seed,torch
    set_seed(3)
    data = [(torch.randn(8),i%3) for i in range(57)]
    dls = DataLoaders.from_dsets(data[:50], data[50:], bs=bs, shuffle=True, drop_last=False, num_workers=0, device='cpu')
    model = nn.Sequential(nn.Linear(8,7), nn.Tanh(), nn.Dropout(drop), nn.Linear(7,3))
    return Learner(dls, model, loss_func=CrossEntropyLossFlat(), opt_func=Adam, metrics=accuracy, **kw)

def trained(bs, joins, cbs=None, drop=0, **kw):
    "Weights, values and predictions of a Learner, and what it says about itself"
    learn = learner(bs, drop)
    with learn.distrib_ctx(**kw) if joins else nullcontext(), learn.no_bar(), learn.no_logging():
        learn.fit(2, .01, cbs=cbs and cbs())
        preds = learn.get_preds()[0]
    return [o.detach() for o in learn.model.parameters()],learn.recorder.values[-1],preds,getattr(learn, 'timeline', None) and str(learn.timeline)

def as_one_process(seed=None, **kw):
    from fastdist import on_ranks
    from fastcore.test import test_close
    from torch import Tensor
    if seed: kw |= dict(seed=seed, drop=.3)
    ws,vals,preds,_ = trained(16, bool(seed), **(kw if seed else {}))
    for r in on_ranks(lambda rank: trained(8, True, **kw), 2, join=False):
        assert all(type(o.data) is Tensor for o in r[0])
        test_close(r[0], ws, 1e-5)
        test_close(r[1], vals, 1e-5)
        test_close(r[2], preds, 1e-5)

def digits(): assert float(shell(examples/'digits.py').rpartition('accuracy: ')[2])>.9

def law(): as_one_process()

def seed(): as_one_process(seed=42)

def audit():
    from fastdist import Comparison,Trace,on_ranks
    def traced(rank, path, bs):
        learn = learner(bs)
        with learn.distrib_ctx(), learn.no_bar(), learn.no_logging(): learn.fit(1, cbs=Trace(path, 2))
    with tempfile.TemporaryDirectory() as d:
        on_ranks(lambda rank: traced(rank, f'{d}/one', 16), 1)
        on_ranks(lambda rank: traced(rank, f'{d}/two', 8), 2, join=False)
        report = Comparison(f'{d}/one', f'{d}/two')
    assert report.ok,str(report)

def shards(): as_one_process(shard=True)

def timeline():
    from fastdist import Timeline,on_ranks
    said = on_ranks(lambda rank: trained(8, True, Timeline)[3], 2, join=False)[0]
    assert 'rank' in said,said

failing = """
from fastai.basics import *
from fastdist import *
class Images:
    def __len__(self): return 80
    def __getitem__(self, i):
        if i==37: raise ValueError(f'image {i} is broken')
        return torch.full((8,), i/100.),i%2
learn = Learner(DataLoaders.from_dsets(Images(), Images(), bs=4, shuffle=False), nn.Linear(8,2), loss_func=CrossEntropyLossFlat())
with learn.distrib_ctx(): learn.fit(2)
"""

def fault():
    with tempfile.TemporaryDirectory() as d:
        path = Path(d)/'failing.py'
        path.write_text(failing)
        said = torchrun(path, rc=None)
    assert 'rank 1 failed' in said and 'image 37 is broken' in said,said[-3000:]

killed = """
import os,signal,sys
sys.path.insert(0, sys.argv[1])
from resume import *
class Kill(Callback):
    def after_batch(self):
        if self.training and self.learn.pct_train>.4 and this_world().rank: os.kill(os.getpid(), signal.SIGKILL)
learn = get_learner(sys.argv[2], 3, [Kill()])
with learn.distrib_ctx(): learn.fine_tune(3, 1e-2)
"""

def resume():
    "Killed in the midst of an epoch and started again, it has the digest of a training that was left alone"
    with tempfile.TemporaryDirectory() as d:
        path,digest = Path(d)/'killed.py',lambda folder: torchrun(examples/'resume.py', f'{d}/{folder}').rpartition('digest ')[2].strip()
        path.write_text(killed)
        torchrun(path, examples, f'{d}/a', rc=None)
        assert [*Path(f'{d}/a').rglob('state.json')], 'no state was written before the kill'
        a,b = digest('a'),digest('b')
        assert a==b and len(a)==8,(a,b)

cells = 'from fastai.basics import *\nfrom fastdist import *\nfrom accelerate import notebook_launcher', """
def get_learner():
    set_seed(3)
    data = [(torch.randn(8),i%3) for i in range(50)]
    dls = DataLoaders.from_dsets(data, data, bs=8, num_workers=0, device='cpu')
    return Learner(dls, nn.Linear(8,3), loss_func=CrossEntropyLossFlat(), metrics=accuracy)
def train():
    learn = get_learner()
    with learn.distrib_ctx(), learn.no_bar(): learn.fit(1)
notebook_launcher(train, num_processes=2)""", """
learn = get_learner()
before = learn.model.weight.clone()
Accelerator(nprocs=2, compute_setup='cpu').distribute(learn.fit)(1)
assert not torch.equal(before, learn.model.weight)
assert len(learn.recorder.values)==1"""

def notebook():
    "Both ways to start ranks from a kernel"
    import nbformat
    from nbclient import NotebookClient
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(o) for o in cells])
    NotebookClient(nb, timeout=600, kernel_name='python3').execute()
    said = ''.join(o.get('text', '') for c in nb.cells for o in c.outputs)
    assert '2 ranks' in said and 'notebook_launcher' in said,said

detached = """
from fastdist import *
def f(): return this_world().rank,this_world().size
print(Accelerator(nprocs=2, compute_setup='cpu').distribute(f, detach=True)().result())
"""

def detach():
    with tempfile.TemporaryDirectory() as d:
        path = Path(d)/'detached.py'
        path.write_text(detached)
        said = shell(path)
    assert '(0, 2)' in said,said

checks = [digits, law, seed, audit, fault, resume, shards, timeline, notebook, detach]

if __name__=='__main__':
    for f in checks:
        begin,why = time.monotonic(),''
        try: f()
        except Exception:
            why = traceback.format_exc()
            print(why, file=sys.stderr)
        print(f'{f.__name__}: {"did not" if why else "ran"} ({time.monotonic()-begin:.0f} s)', flush=True)
