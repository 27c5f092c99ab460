"From a command to the first training step, by torchrun and by `distribute`, and the way of a large model to the ranks and home: `python benchmarks/start.py --help`"
import os,subprocess,sys,time,torch
from pathlib import Path
from pickle import dumps,loads
from statistics import median
from tempfile import TemporaryDirectory
from fastcore.all import call_parse
from jobs import save,show_table

script = """
import sys,time
from pathlib import Path
from fastai.basics import *
from fastdist import *

class First(Callback):
    def after_step(self):
        if this_world().rank==0 and not self.train_iter: Path(sys.argv[1]).write_text(str(time.time()))

def train():
    set_seed(0)
    data = [(torch.randn(8), torch.randn(1)) for _ in range(64)]
    learn = Learner(DataLoaders.from_dsets(data, data, bs=8, num_workers=0), nn.Linear(8,1), loss_func=MSELossFlat(), cbs=First())
    with learn.distrib_ctx(), learn.no_bar(), learn.no_logging(): learn.fit(1)
"""
ends = dict(torchrun='train()', distribute="Accelerator(nprocs=2, compute_setup='cpu').distribute(train)()")
commands = dict(torchrun=[str(Path(sys.executable).parent/'torchrun'), '--standalone', '--nproc_per_node', '2'], distribute=[sys.executable])

def first_step(how, d):
    "Seconds from the command to the first step, and to its end"
    (d/'train.py').write_text(script+ends[how])
    t = time.time()
    subprocess.run([*commands[how], d/'train.py', d/'first'], check=True, capture_output=True, timeout=120, env=os.environ|dict(PYTHONWARNINGS='ignore', OMP_NUM_THREADS='1'))
    return float((d/'first').read_text())-t,time.time()-t

def timed(f):
    t = time.perf_counter()
    f()
    return time.perf_counter()-t

def travel(mb):
    "Seconds in which a model of `mb` MiB goes to two ranks that are there, and back; and what pickling it takes, once for each rank and once back"
    from fastdist import Accelerator
    model = torch.nn.Linear(1024, mb*256, bias=False)
    send = Accelerator(nprocs=2, compute_setup='cpu').distribute(lambda m: m)
    send(torch.nn.Linear(1,1))
    return timed(lambda: send(model)),3*timed(lambda: loads(dumps(model)))

@call_parse
def main(
    rounds:int=5, # Of each command, in turn
    mb:int=400, # Size of the model that travels, MiB
    out:str=None # JSON file to write the rows to
):
    "Time the start of ranks"
    res = {k:[] for k in ends}
    with TemporaryDirectory() as d:
        for i in range(rounds):
            for how in list(ends)[::(-1)**i]: res[how].append(first_step(how, Path(d)))
            print(f'round {i+1} of {rounds}', flush=True)
    rows = [dict(how=k, first=median(o[0] for o in v), end=median(o[1] for o in v)) for k,v in res.items()]
    for r in rows: r['ratio'] = r['first']/rows[0]['first']
    show_table('seconds from the command, two ranks', ['','first step','ratio','end'], [[r['how'],r['first'],r['ratio'],r['end']] for r in rows])
    ours,pickled = travel(mb)
    rows.append(dict(how='travel', mb=mb, ours=ours, pickled=pickled))
    show_table(f'seconds for a model of {mb} MiB to two ranks and home', ['','seconds'], [['a mapped file',ours],['pickling alone',pickled]])
    save(rows, out)
