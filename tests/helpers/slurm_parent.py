"Send a training to the tasks of a job of submitit, as a script or a cell does: `slurm_parent.py FOLDER HOW [CLUSTER]`"
import os,subprocess,sys,time
sys.path[:0] = [os.path.join(os.path.dirname(__file__), o) for o in ('../../examples','.')]
import submitit
from fastai.basics import *
from resume import *
from restarted import Faulty,write

began,scale = time.time(),16

class Digits(torch.utils.data.Dataset):
    def __init__(self, lo, hi): self.xs,self.ys = [o[lo:hi] for o in load_digits(return_X_y=True)]
    def __len__(self): return len(self.xs)
    def __getitem__(self, i): return torch.tensor(self.xs[i]).float()/scale,int(self.ys[i])

class Note(Callback):
    def after_batch(self):
        if self.training and self.epoch==self.iter==0 and this_world().rank==0: print(f'first step after {time.time()-began:.2f} s', flush=True)

def engine(kind, folder):
    res = submitit.AutoExecutor(folder, cluster=kind)
    res.update_parameters(tasks_per_node=1 if kind=='slurm' else 2, nodes=2 if kind=='slurm' else 1, timeout_min=10, slurm_time=10)
    return res

def learner():
    set_seed(1)
    dls = DataLoaders.from_dsets(Digits(0,640), Digits(640,800), bs=16, num_workers=0)
    return Learner(dls, get_model(), loss_func=CrossEntropyLossFlat(), metrics=accuracy, cbs=Note())

def same(acc):
    "The same cell on ranks of this node and of the engine"
    local,learn,rate = learner(),learner(),1e-2
    def fit(o, n):
        with o.distrib_ctx(), o.no_bar(): o.fit_one_cycle(n, rate)
    Accelerator(nprocs=4, compute_setup='cpu').distribute(fit)(local, 2)
    def train(n): fit(learn, n)
    acc.distribute(train)(2)
    gap = max((a-b).abs().max().item() for a,b in zip(learn.model.state_dict().values(), local.model.state_dict().values()))
    print(f'gap {gap:.1e}, rows {len(learn.recorder.values)}, accuracy {float(accuracy(*learn.get_preds())):.3f}')
    try: acc.distribute(fails, all_ranks=True)()
    except RankError as e: print(*str(e).splitlines()[::len(str(e).splitlines())-1])

def fails():
    if this_world().rank==3: raise ValueError('lost')
    time.sleep(60)

def stays(out):
    Path(out, f'{this_world().rank}.pid').write_text(f'{os.getpid()} {os.getppid()}')
    time.sleep(100)

def waits(out):
    "As `stays`, until there is a file `go`"
    print('begun', flush=True)
    Path(out, f'{this_world().rank}.pid').write_text(f'{os.getpid()} {os.getppid()}')
    while not Path(out, 'go').exists(): time.sleep(.1)
    return this_world().rank

class ByJob(Faulty):
    "SLURM does to the job what is in `orders`, one after the other"
    orders = ('scancel','--signal','USR2'),('scontrol','requeue')
    def _signal_job(self):
        n = len(list(self.out.glob('*-slurm-*')))-1
        subprocess.run([*self.orders[n],os.environ['SLURM_JOB_ID']]) # which the signal may kill too
        end = time.monotonic()+60
        while not self.learn.checkpoint.now.signals.asked and time.monotonic()<end: time.sleep(.01)

def resumes(out): write(out, train(f'{out}/states', 5, [ByJob(out)]))

def main(out, how, kind='slurm'):
    acc = Accelerator(nprocs=4 if how=='same' else 2, compute_setup='cpu', engine=engine(kind, f'{out}/jobs'))
    if how=='same': same(acc)
    else: acc.distribute(dict(stays=stays, resumes=resumes)[how])(out)

if __name__=='__main__': main(*sys.argv[1:])
