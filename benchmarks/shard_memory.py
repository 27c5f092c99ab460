"What four CPU ranks with a limit on their memory train: `python benchmarks/shard_memory.py --help`"
import resource,torch
from importlib import import_module
from pathlib import Path
from time import perf_counter
from fastcore.all import call_parse
from jobs import show_table
import shards

def status(key):
    "What the kernel says of this process, in MB"
    return next(int(o.split()[1]) for o in Path('/proc/self/status').read_text().splitlines() if o.startswith(key))/1e3

def peak():
    "Largest resident size since the last `reset_peak`, in MB"
    return status('VmHWM')

def reset_peak(): Path('/proc/self/clear_refs').write_text('5')

def limit(mb):
    "Let this process have `mb` more than it has"
    resource.setrlimit(resource.RLIMIT_DATA, (int((mb+status('VmData'))*1e6),)*2)

def size(ts): return sum(t.numel()*t.element_size() for t in ts)/1e6
def local(t): return getattr(t, '_local_tensor', t)

def with_ddp(rank, d, n, mb):
    "What plain DDP says after two steps with Adam"
    limit(mb)
    try:
        model = shards.transformer(d, n)
        ddp,opt = torch.nn.parallel.DistributedDataParallel(model),torch.optim.Adam(model.parameters())
        for i in range(2):
            x = torch.randint(0, shards.words, (1,9))
            shards.loss_func(ddp(x[:,:-1]), x[:,1:]).backward()
            opt.step()
        return f'trains, peak {peak():.0f} MB'
    except RuntimeError as e: return str(e).splitlines()[0][-110:]

def in_shards(rank, d, n, mb):
    "Megabytes of parameters, gradients and state of this rank after two steps, and peaks"
    limit(mb)
    import_module('fastai.callback.all')
    from fastai.basics import Adam,DataLoaders,Learner,noop
    data = [(x[:-1],x[1:]) for x in torch.randint(0, shards.words, (2*4,9))]
    base,model = peak(),shards.transformer(d, n)
    learn = Learner(DataLoaders.from_dsets(data, [], bs=1, num_workers=0, device='cpu'), model, loss_func=shards.loss_func, opt_func=Adam)
    learn._do_epoch_validate = noop
    with learn.distrib_ctx(shard=True, keep_sharded=True), learn.no_bar(), learn.no_logging():
        made = peak()
        reset_peak()
        t = perf_counter()
        learn.fit(1, 1e-4)
        ps = [local(p) for p in model.parameters()]
        gs = [local(p.grad) for p in model.parameters() if p.grad is not None]
        state = [local(v) for s in learn.opt.state.values() for v in s.values() if torch.is_tensor(v)]
        return dict(parameters=size(ps), gradients=size(gs), state=size(state), before=base, entering=made, training=peak(), seconds=perf_counter()-t)

@call_parse
def main(
    d:int=1600, # Width of the transformer
    n:int=13, # Its blocks
    mb:float=2500, # Of its own that each process may have beyond what it has after imports
    ranks:int=4 # Number of processes
):
    "Train a transformer with Adam in `ranks` processes, with DDP and in shards, with the same limit"
    import_module('fastdist.shard.layout')
    from fastdist import on_ranks
    with torch.device('meta'): model = shards.transformer(d, n)
    whole,unit = size(model.parameters()),size(model[1].parameters())
    print(f'{whole/4:.0f} million parameters: {whole:.0f} MB, with gradients and Adam {4*whole:.0f}, divided by {ranks} {4*whole/ranks:.0f}; a unit has {unit:.0f}')
    for o in dict.fromkeys(on_ranks(lambda rank: with_ddp(rank, d, n, mb), ranks, timeout=200)): print(f'DDP with {mb:.0f} MB a process: {o}')
    rows = on_ranks(lambda rank: in_shards(rank, d, n, mb), ranks, timeout=400, join=False)
    show_table(f'In shards with {mb:.0f} MB a process: MB on each rank', ['rank',*rows[0]], [[str(i),*o.values()] for i,o in enumerate(rows)])
