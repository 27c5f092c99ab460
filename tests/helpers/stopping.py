"""Train until a signal asks to stop: `stopping.py FOLDER [HOW]`, started by any launcher or with `distribute`; what has stopped once is done when it is started again

`ASK=SIGTERM:1,0` sends the signal to ranks 1 and 0 after three batches, `ASK=SIGTERM:head` to the process that has started them."""
import os,signal,sys
from fastai.basics import *
from fastdist import *
from fastdist.comm.job import *
from fastdist.base.errors import *
from fastdist.state.checkpoint import *

class Stop(Callback):
    "Stops all ranks after one step; what a checkpoint will do"
    order = 90
    def __init__(self, out): self.out = Path(out)
    def before_fit(self):
        self.job,self.stops = current_job(),StopSignals().__enter__()
        self.requests = self.job and self.learn.distributed_trainer.layout.requests
        if self.job: self.requests.begin()
    def after_batch(self):
        if not self.training: return
        if self.train_iter==2: (self.out/f'{this_world().rank}.{os.getpid()}').touch()
        if self.train_iter==3 and self.epoch==0: ask()
        if self.job and self.stops.asked: self.requests.own = 'stop'
        if not (self.requests.decided() if self.job else self.stops.asked): return
        signum = self.stops.agree(self.job)
        (self.out/f'state{this_world().rank}').write_text(str(self.train_iter))
        self.stops.__exit__(*sys.exc_info())
        raise Preempted(signum)

def ask():
    sig,_,ranks = os.environ.get('ASK', '').partition(':')
    if str(this_world().rank) in ranks: os.kill(os.getpid(), getattr(signal, sig))
    if ranks=='head' and this_world().rank==1: os.kill(int(os.environ['PARENT']), getattr(signal, sig))

def train(out, stops=True, n=10**5):
    if list(Path(out).glob('state*')): return print('it is done')
    set_seed(1)
    xs = torch.randn(4000, 6)
    ds = list(zip(xs, xs.sum(1, keepdim=True)))
    dls = DataLoaders.from_dsets(ds, ds, bs=4, device='cpu', num_workers=2)
    learn = Learner(dls, nn.Linear(6,1), loss_func=MSELossFlat(), opt_func=SGD, lr=0.001, cbs=[Stop(out)] if stops else [Told(out)])
    with learn.distrib_ctx(), learn.no_bar(), learn.no_logging(): learn.fit(n)

class Told(Stop):
    "Stops nothing"
    def before_fit(self): pass
    def after_batch(self):
        if self.training and self.train_iter==3: ask()

if __name__=='__main__':
    out,how,os.environ['PARENT'] = sys.argv[1],sys.argv[2:],str(os.getpid())
    if 'head' in how: Accelerator(nprocs=2, compute_setup='cpu').distribute(train, start='fork' if 'fork' in how else 'spawn')(out, 'quiet' not in how)
    elif 'notebook' in how:
        from accelerate import notebook_launcher
        notebook_launcher(train, (out,), num_processes=2, use_port=how[-1])
    else: train(out)
