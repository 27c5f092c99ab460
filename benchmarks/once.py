"Two ranks by each way beside one process: seconds from the command to the first step and to the end, a second fit, memory: `python benchmarks/once.py --help`"
import json,os,signal,socket,subprocess,sys,time
from contextlib import suppress
from pathlib import Path
from random import shuffle
from statistics import median
from tempfile import TemporaryDirectory
from fastcore.all import call_parse
from jobs import save,show_table

common = """
import json,sys,time
from pathlib import Path
from accelerate import notebook_launcher
from fastai.basics import *
from sklearn.datasets import load_digits
from fastdist import *

out = Path(sys.argv[1])

class First(Callback):
    "Write the time at which rank 0 has made the first step of a fit"
    def after_step(self):
        if this_world().rank==0 and not self.train_iter: out.write_text(str(time.time()))

def digits():
    set_seed(0)
    data = [(tensor(x).view(1,8,8)/16, y) for x,y in zip(*load_digits(return_X_y=True))]
    dls = DataLoaders.from_dsets(data[:1440], data[1440:], bs=64, num_workers=0, device='cpu')
    convs = ConvLayer(1,16),ConvLayer(16,32,stride=2),ConvLayer(32,64,stride=2)
    model = nn.Sequential(*convs, nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(64,10))
    return Learner(dls, model, loss_func=CrossEntropyLossFlat(), metrics=accuracy, cbs=First())

class Rows:
    "`gb` GB of one tensor, which are read once an epoch"
    def __init__(self, gb): self.xs = torch.rand(int(gb*2**14), 2**14)
    def __len__(self): return len(self.xs)
    def __getitem__(self, i): return self.xs[i],self.xs[i,:1]

def large(gb):
    set_seed(0)
    dls = DataLoaders.from_dsets(Rows(gb), [], bs=64, num_workers=0, device='cpu')
    return Learner(dls, nn.Linear(2**14,1), loss_func=MSELossFlat(), opt_func=SGD)

def train(options, learn=None, epochs=3):
    learn = learn or digits()
    with learn.distrib_ctx(**options), learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(epochs, 1e-3)

def twice(options):
    "Print seconds to the first step and to the end of a fit, for two of them in one context"
    learn,found = digits(),[]
    with learn.distrib_ctx(**options), learn.no_bar(), learn.no_logging():
        for i in range(2):
            t = time.time()
            learn.fit(1, 1e-3)
            found.append((float(out.read_text())-t, time.time()-t))
    print(json.dumps(found))
"""

split,two = 'dict(split_batches=True)','dict(nprocs=2)'
bin_ = Path(sys.executable).parent
torchrun = bin_/'torchrun','--standalone','--nproc_per_node','2'
accelerate = bin_/'accelerate','launch','--multi_gpu','--num_processes','2','--main_process_port','0'
python = sys.executable,
ways = {'one process':(python,'{}'), 'nprocs=2':(python,two), 'torchrun':(torchrun,split),
    'accelerate launch':(accelerate,split), 'notebook_launcher':(python,split)}

def command(way, d, call):
    "Write the script of `way` that makes `call`; return its command and what it writes the time of the first step to"
    (d/'train.py').write_text(common + call)
    return [*ways[way][0], d/'train.py', d/'first'],d/'first'

def free_port():
    with socket.create_server(('127.0.0.1', 0)) as s: return s.getsockname()[1]

def options(): return dict(env=os.environ|dict(PYTHONWARNINGS='ignore', OMP_NUM_THREADS='1', CUDA_VISIBLE_DEVICES=''))

def finish(cmd):
    "Run `cmd` to its end; return what it printed"
    p = subprocess.run(cmd, capture_output=True, text=True, timeout=600, **options())
    if p.returncode: raise RuntimeError(f'{cmd} ended with {p.returncode}:\n{p.stderr[-2000:]}')
    return p.stdout

def from_command(way, d):
    "Seconds from the command to the first step, and to its end"
    o = ways[way][1]
    call = f'train({o})' if way!='notebook_launcher' else f"notebook_launcher(train, ({o},), num_processes=2, use_port='{free_port()}')"
    cmd,first = command(way, d, call)
    t = time.time()
    finish(cmd)
    return float(first.read_text())-t,time.time()-t

def two_fits(way, d):
    "Seconds to the first step and to the end of each of two fits in a context"
    cmd,_ = command(way, d, f'twice({ways[way][1]})')
    return json.loads(finish(cmd).splitlines()[-1])

def family(pid):
    "The process `pid` and all that it and its children have started"
    parents = {}
    for o in Path('/proc').glob('[0-9]*/stat'):
        with suppress(OSError): parents[int(o.parent.name)] = int(o.read_text().rpartition(')')[2].split()[1])
    found = [pid]
    for p in found: found += [k for k,v in parents.items() if v==p]
    return found

def pss(pid):
    "Megabytes of `family(pid)`, a page that several share counted once; all are stopped meanwhile, since a fork between two readings would count pages twice"
    pids,total = family(pid),0
    def send(signum):
        for o in pids:
            with suppress(OSError): os.kill(o, signum) # it may have ended
    send(signal.SIGSTOP)
    for o in pids:
        with suppress(OSError): total += sum(int(l.split()[1]) for l in Path(f'/proc/{o}/smaps_rollup').read_text().splitlines() if l.startswith('Pss:'))
    send(signal.SIGCONT)
    return total*1024/1e6

def memory(way, d, gb):
    "Most megabytes that the processes of `way` had together, while they read `gb` GB of data that lie in memory"
    cmd,_ = command(way, d, f'train({ways[way][1]}, large({gb}), 2)')
    p,most = subprocess.Popen(cmd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options()),0
    while p.poll() is None:
        most = max(most, pss(p.pid))
        time.sleep(.1)
    if p.returncode: raise RuntimeError(f'{way} ended with {p.returncode}')
    return most

def against(rows, k): return [dict(r, ratio=r[k]/rows[0][k]) for r in rows]

def table(title, rows, names):
    "Print `rows`, the columns `names` of them"
    show_table(title, ['',*names], [[r['way'],*(r[k] for k in names)] for r in rows])

@call_parse
def main(
    rounds:int=3, # Of each way, in random order
    gb:float=1., # Data in memory
    out:str=None # JSON file to write the rows to
):
    "Time the ways to two ranks beside one process, and measure their memory"
    first,fits,most = [{k:[] for k in ways} for _ in range(3)]
    here,large = ('one process','nprocs=2'),('one process','nprocs=2','torchrun')
    with TemporaryDirectory() as d:
        d = Path(d)
        for i in range(rounds):
            todo = [(first,o) for o in ways] + [(fits,o) for o in here]
            shuffle(todo)
            for res,o in todo: res[o].append(from_command(o, d) if res is first else two_fits(o, d))
            print(f'round {i+1} of {rounds}, load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores', flush=True)
        for o in large: most[o].append(memory(o, d, gb))
    mid = lambda xs,*at: median(x[at[0]][at[1]] if len(at)==2 else x[at[0]] for x in xs)
    started = against([dict(way=k, first=mid(v, 0), end=mid(v, 1)) for k,v in first.items()], 'first')
    again = [dict(way=f'{k}, fit {i+1}', first=mid(fits[k], i, 0), end=mid(fits[k], i, 1)) for k in here for i in range(2)]
    used = against([dict(way=k, mb=most[k][0]) for k in large], 'mb')
    table('digits, seconds from the command', started, ['first','ratio','end'])
    table('two fits in a context, seconds from the call', again, ['first','end'])
    table(f'{gb:g} GB of data in memory, most MB of all processes', used, ['mb','ratio'])
    save(started+again+used, out)
