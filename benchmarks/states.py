"What states cost a training, in one process and on 2 ranks: each step between them, and each state: `python benchmarks/states.py --help`"
import random,torch
from contextlib import contextmanager,nullcontext
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter,thread_time
from unittest.mock import patch
from fastcore.all import call_parse,noop
from torch import nn
from fast import Fastai
from jobs import open_jobs,save,show_table
from work import samples,works

env = dict(MALLOC_MMAP_THRESHOLD_='1000000000', MALLOC_TRIM_THRESHOLD_='2000000000') # as in `steps.py`
steps,block = dict(mlp=300, cnn=40),10 # of an epoch, an even number of blocks; fastdist plans anew where callbacks change, so the first of each block does not count
epochs,interval = 4,30e3 # the first epoch warms up; milliseconds between two states

def clocks(): return torch.tensor([perf_counter(),thread_time()], dtype=torch.float64)*1e3

@contextmanager
def timing(cls, name, into):
    "Inside, calls of method `name` of `cls` leave what they took in `into`"
    do = getattr(cls, name)
    def timed(*args, **kwargs):
        start = clocks()
        try: return do(*args, **kwargs)
        finally: into.append((clocks()-start).tolist())
    with patch.object(cls, name, timed): yield

class Saving(Fastai):
    "A Learner with a `Checkpoint`; on ranks by fastdist, with batch norm on each rank alone"
    def __init__(self, rank, size):
        super().__init__(rank, size)
        import fastdist.state.checkpoint as checkpoint
        self.checkpoint = checkpoint

    @contextmanager
    def context(self, learn):
        self.learn = learn
        with learn.added_cbs(self.checkpoint.Checkpoint(**self.kw)), learn.distrib_ctx(sync_bn=False) if self.size>1 else nullcontext(): yield

    def steps(self, model, w, n, path, odd):
        "Median milliseconds by two clocks of blocks of steps with and without a `Checkpoint` that writes nothing, in turn in one fit"
        self.kw,marks,sets = dict(path=path, minutes=60),[],[]
        def mark(*_):
            if not sets: sets.extend([self.learn.cbs, self.learn.cbs.filter(lambda o: not isinstance(o, self.checkpoint.Checkpoint))])
            self.learn.cbs = sets[0 if len(marks)%n==n-1 else (len(marks)//block+odd)%2]
            marks.append(clocks())
        model.register_forward_pre_hook(mark)
        self.fit(model, w, n, 0, epochs)
        took = torch.stack(marks).view(epochs, n//block, block, 2)[1:].diff(dim=2)[:,:,2:].median(dim=2).values.reshape(-1, 2, 2)
        return (took.flip(1) if odd else took).tolist()

    def states(self, model, w, n, path):
        "Milliseconds by two clocks of each state, in the main thread and in that which writes"
        self.kw,main,writer = dict(path=path, minutes=None, every=n, keep=1),[],[]
        with timing(self.checkpoint.CheckpointWriter, 'save', main), timing(self.checkpoint.States, 'write', writer): self.fit(model, w, n, 0, epochs)
        return dict(main=main[1:-1], writer=writer[1:-1])

    def large(self, model, w, path, what):
        "Milliseconds of each state in the main thread and in that which writes, and MB of memory that it took, of a fit of `what`"
        main,writer,took = [],[],[]
        learn = larges[what]()
        learn.add_cb(self.checkpoint.Checkpoint(path, every=1, minutes=None))
        with timing(self.checkpoint.CheckpointWriter, 'save', main), watching(self.checkpoint.CheckpointWriter, took), timing(self.checkpoint.States, 'write', writer):
            with learn.no_bar(), learn.no_logging(): learn.fit(1)
        return dict(main=main[:-1], writer=writer[:-1], memory=took[:-1])

def memory(what): return int(next(o for o in Path('/proc/self/status').read_text().splitlines() if o.startswith(what)).split()[1])/1024

@contextmanager
def watching(cls, took):
    "Inside, each state is waited for, and leaves in `took` the MB that the process had beside what it had before"
    do = cls.save
    def save(self, *args, **kwargs):
        Path('/proc/self/clear_refs').write_text('5') # the peak begins anew
        before = memory('VmRSS')
        do(self, *args, **kwargs)
        self.writer.wait()
        took.append(memory('VmHWM')-before)
    with patch.object(cls, 'save', save): yield

def learner(model, data, bs, *cbs):
    from fastai.basics import Adam,CrossEntropyLossFlat,DataLoaders,Learner
    learn = Learner(DataLoaders.from_dsets(data, data[:1], bs=bs, num_workers=0, device='cpu'), model, loss_func=CrossEntropyLossFlat(), opt_func=Adam, cbs=cbs)
    learn._do_epoch_validate = noop
    return learn

def wide():
    "100 MB of weights, and twice as much that Adam keeps"
    return learner(nn.Sequential(*[nn.Linear(1250, 1250) for _ in range(16)], nn.Linear(1250, 10)), samples((1250,), 20), 4)

def long(n=200_000):
    "A recorder after `n` steps"
    from fastai.basics import Callback,TensorBase
    class Long(Callback):
        order = 100
        def before_train(self):
            self.learn.recorder.losses += [TensorBase(o) for o in torch.rand(n).unbind()]
            self.learn.recorder.lrs += [0.1]*n
    w = works['mlp']
    return learner(w.model(), samples(w.shape, 5*w.bs), w.bs, Long())

larges = dict(wide=wide, long=long)

def run_rounds(jobs, rounds):
    "For each number of ranks, workload and measurement what rank 0 measured in each round; each round in an order of its own"
    runs = {(n,work,k):[] for work in steps for n in jobs for k in ('steps','states')}
    for i in range(rounds):
        todo = list(runs)
        random.Random(i).shuffle(todo)
        for n,work,k in todo: runs[n,work,k].append(measured(jobs[n], k, work, *[i%2][:k=='steps']))
        print(f'round {i+1} of {rounds}', flush=True)
    return runs

def measured(job, what, work, *args):
    with TemporaryDirectory() as d: return job.ask(what, work, steps[work], d, *args)[0]

def of_step(pairs, what):
    "One row: a step without `Checkpoint`, what one between states adds to it, by wall clock and by the clock of the main thread"
    res = dict(what=what)
    for clock,t in zip(('wall','cpu'), torch.tensor(pairs).unbind(2)):
        added = 1e3*(t[:,0]-t[:,1]).median().item()
        res |= {clock:t[:,1].median().item(), f'{clock} µs':added, f'{clock} %':added/10/t[:,1].median().item()}
    return res

def of_state(states, what):
    "One row: milliseconds of a state in the main thread, and in that which writes, and both as a share of the interval"
    at = lambda k, i: median([o[i] for o in states[k]] or [0])
    res = dict(what=what, main_wall=at('main', 0), main_cpu=at('main', 1), writer_wall=at('writer', 0), writer_cpu=at('writer', 1))
    return res | dict(share=100*(res['main_cpu']+res['writer_cpu'])/interval, memory=max(states['memory']) if 'memory' in states else None)

def joined(states): return {k:[x for o in states for x in o[k]] for k in ('main','writer')}

def show(title, rows): show_table(title, ['', *list(rows[0])[1:]], [list(o.values()) for o in rows])

@call_parse
def main(
    rounds:int=11, # Times that each variant runs each workload
    out:str=None # JSON file for the rows
):
    "Time steps between states, and states, in 1 process and on 2 CPU ranks, side by side with a Learner without `Checkpoint`"
    with open_jobs({n:('states.Saving',n) for n in (1,2)}, env) as jobs:
        for o in jobs.values(): o.answers()
        runs = run_rounds(jobs, rounds)
    name = lambda n, work: f'{work}, {n} process{"es" if n>1 else ""}'
    keys = [(n,work) for work in steps for n in (1,2)]
    between = [of_step(sum(runs[(*o,'steps')], []), name(*o)) for o in keys]
    states = [of_state(joined(runs[(*o,'states')]), name(*o)) for o in keys]
    with open_jobs({1:('states.Saving',1)}) as jobs, TemporaryDirectory() as d: # with memory as it is by default
        jobs[1].answers()
        states += [of_state(jobs[1].ask('large', 'mlp', f'{d}/{k}', k)[0], k) for k in larges]
    show('A step between states: milliseconds without Checkpoint, and what it adds; by wall clock, and processor time of the main thread', between)
    show(f'A state: milliseconds in the main thread and in that which writes, per cent of {interval/1e3:.0f} s, MB while it is written', states)
    save(between+states, out)
