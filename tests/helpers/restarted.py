"""Train as `examples/resume.py` does, and be disturbed: `restarted.py FOLDER [HOW]`

`FAULTS=0:kill:30,1:SIGTERM:50` does what is named to ranks 0 and 1 after so many batches, each once: `kill`, `agent` (this rank and the torchrun that has started it), `raise`, a signal, `interrupt`, or `slurm`, which has SLURM signal the job as `--signal` does; `all:kill:30` to each rank. `AT_FIRST=2` begins with so many ranks: fewer wait until their launcher ends them."""
import json,os,signal,subprocess,sys,time
sys.path.append(os.path.join(os.path.dirname(__file__), '../../examples'))
from resume import *

class Faulty(Callback):
    order = 90
    def __init__(self, out): self.out,self.n = Path(out),0
    def after_batch(self):
        if not self.training: return
        self.n += 1
        for fault in filter(None, os.environ.get('FAULTS', '').split(',')): self._do(fault, *fault.split(':'))

    def _do(self, fault, rank, what, at):
        me = this_world().rank
        mark = self.out/f'{fault}.{me}'.replace(':', '-')
        if rank not in (str(me),'all') or self.n!=int(at) or mark.exists(): return
        mark.touch()
        if what=='raise': raise ValueError('a bad batch')
        if what=='interrupt': raise KeyboardInterrupt
        if what=='slurm': return self._signal_job()
        if what=='agent':
            signal.signal(signal.SIGINT, signal.SIG_IGN) # which torch has a rank get when its agent dies, and which may come before the kill
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), getattr(signal, what if what.startswith('SIG') else 'SIGKILL'))

    def _signal_job(self):
        subprocess.run(['scancel','--batch','--signal','USR1',os.environ['SLURM_JOB_ID']], check=True)
        end = time.monotonic()+60
        while not self.learn.checkpoint.now.signals.asked and time.monotonic()<end: time.sleep(.01)

def main(out, *how):
    if 'head' in how: Accelerator(nprocs=2, compute_setup='cpu').distribute(disturbed, start='fork')(out)
    else: disturbed(out)

def disturbed(out):
    while this_world().size<int(os.environ.get('AT_FIRST', 1)) and not Path(f'{out}/states').exists(): signal.pause()
    write(out, train(f'{out}/states', 5, [Faulty(out)]))

def write(out, learn):
    "Keep what the test compares"
    weights = torch.cat([o.flatten() for o in learn.model.state_dict().values()]).tolist()
    if this_world().rank==0: (Path(out)/'numbers').write_text(json.dumps([[list(o) for o in learn.recorder.values], [float(o) for o in learn.recorder.losses], weights]))

if __name__=='__main__': main(*sys.argv[1:])
