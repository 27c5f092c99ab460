"The time of a step in shards, of fastdist and its peers side by side: `python benchmarks/shards.py --help`"
import gc,random,torch
from contextlib import nullcontext
from importlib import import_module
from functools import partial
from statistics import median
from time import perf_counter
from fastcore.all import call_parse
from torch import distributed as dist,nn
from torch.nn import functional as F
from jobs import open_jobs,save,show_table

width,depth,bs,seq,words = 400,10,2,32,1000

class Attention(nn.Module):
    "Causal, with 8 heads"
    def __init__(self, d):
        super().__init__()
        self.q,self.k,self.v,self.o = [nn.Linear(d, d) for _ in range(4)]

    def forward(self, x):
        q,k,v = [f(x).unflatten(-1, (8,-1)).transpose(1, 2) for f in (self.q,self.k,self.v)]
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

class Block(nn.Module):
    "Of a transformer, with 16 parameters"
    def __init__(self, d):
        super().__init__()
        self.ln1,self.attn,self.ln2 = nn.LayerNorm(d),Attention(d),nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, 4*d), nn.GELU(), nn.Linear(4*d, d))

    def forward(self, x):
        x = x+self.attn(self.ln1(x))
        return x+self.mlp(self.ln2(x))

def transformer(d=width, n=depth): return nn.Sequential(nn.Embedding(words, d), *[Block(d) for _ in range(n)], nn.LayerNorm(d), nn.Linear(d, words))
def loss_func(out, y): return F.cross_entropy(out.flatten(0, 1), y.flatten())

def batches(n, size):
    "`n` batches a rank, as pairs of tokens and the tokens after them"
    g = torch.Generator().manual_seed(0)
    return [(x[:-1],x[1:]) for x in torch.randint(0, words, (n*bs*size,seq+1), generator=g)]

class Plain:
    "A loop by hand in one process, and base of the others: an answer is the median seconds of a step, and the sum of the weights"
    def __init__(self, rank, size):
        self.rank,self.size = rank,size
        if size>1: self.join()

    def join(self): dist.init_process_group('gloo')
    def __call__(self, steps):
        gc.collect()
        torch.manual_seed(0)
        model,marks = transformer(),[]
        model.register_forward_pre_hook(lambda m,_: marks.append(perf_counter()))
        self.fit(model, steps)
        times = [b-a for a,b in zip(marks[2:], marks[3:])]
        return median(times),self.total(model)

    def total(self, model): return sum(p.detach().abs().sum().item() for p in model.parameters())
    def loader(self, steps): return torch.utils.data.DataLoader(batches(steps, self.size)[self.rank::self.size], bs)
    def prepare(self, model): return model,torch.optim.Adam(model.parameters(), 1e-4)
    def fit(self, model, steps):
        model,opt = self.prepare(model)
        for x,y in self.loader(steps):
            self.backward(loss_func(model(x), y))
            opt.step()
            opt.zero_grad()

    def backward(self, loss): loss.backward()

class Hand(Plain):
    "FSDP2 by hand: each block is a unit"
    def prepare(self, model):
        from torch.distributed.fsdp import fully_shard
        for m in model:
            if isinstance(m, Block): fully_shard(m)
        fully_shard(model)
        return super().prepare(model)

    def total(self, model): return sum(p.detach().abs().sum().full_tensor().item() for p in model.parameters())

class Accelerate(Plain):
    "Accelerate with FSDP2"
    def join(self):
        from accelerate import Accelerator,FullyShardedDataParallelPlugin
        self.acc = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy='transformer_based_wrap', transformer_cls_names_to_wrap=['Block']))

    def backward(self, loss): self.acc.backward(loss)
    def prepare(self, model):
        res = self.acc.prepare(*super().prepare(model))
        kind = type(res[0]).__name__
        if not kind.startswith('FSDP'): raise NotImplementedError(f'on CPU ranks its model is a {kind}')
        return res

class Lightning(Plain):
    "Lightning with its strategy for FSDP2, or what it says on CPU ranks"
    def join(self): pass
    def fit(self, model, steps):
        from lightning import Trainer
        from lightning.pytorch.strategies import FSDPStrategy
        try: Trainer(accelerator='cpu', devices=self.size, strategy=FSDPStrategy(), logger=False)
        except Exception as e: raise NotImplementedError(' '.join(str(e).split())) from None

class Fastai(Plain):
    "A Learner without progress bar or log"
    def fit(self, model, steps):
        import_module('fastai.callback.all')
        from fastai.basics import DataLoaders,Learner,noop
        dls = DataLoaders.from_dsets(batches(steps, self.size), [], bs=bs, num_workers=0, device='cpu')
        learn = Learner(dls, model, loss_func=loss_func, opt_func=self.opt())
        learn._do_epoch_validate = noop
        with learn.no_bar(), learn.no_logging(), self.context(learn): learn.fit(1, 1e-4)

    def opt(self):
        from fastai.optimizer import Adam
        return Adam

    def context(self, learn): return nullcontext()

class Fastdist(Fastai):
    "A Learner in shards"
    def join(self): import_module('fastdist')
    def context(self, learn): return learn.distrib_ctx(shard=True)

class FastaiTorch(Fastai):
    "A Learner with torch's Adam"
    def opt(self):
        from fastai.optimizer import OptimWrapper
        return partial(OptimWrapper, opt=torch.optim.Adam)

class FastdistTorch(Fastdist,FastaiTorch): "A Learner in shards with torch's Adam"

alone = {'FSDP2 by hand':'Plain', 'fastdist':'Fastai', 'fastdist, OptimWrapper':'FastaiTorch'}
peers = {'FSDP2 by hand':'Hand', 'Accelerate, FSDP2':'Accelerate', 'Lightning, FSDP':'Lightning', 'fastdist':'Fastdist', 'fastdist, OptimWrapper':'FastdistTorch'}
specs = {(k,n):(f'shards.{v}',n) for n,d in ((1,alone),(2,peers)) for k,v in d.items()}
# Memory that is freed stays with the process, as in steps.py
env = dict(MALLOC_MMAP_THRESHOLD_='1000000000', MALLOC_TRIM_THRESHOLD_='2000000000')

def start(jobs):
    "Wait until all of `jobs` are ready, and take out those that do not run here; why, by peer"
    missing = {}
    for k in list(jobs):
        try:
            jobs[k].answers()
            jobs[k].ask(4)
        except (ModuleNotFoundError,RuntimeError) as e:
            if 'NotImplementedError' not in str(e) and not isinstance(e, ModuleNotFoundError): raise
            missing[k[0]] = str(e).strip().splitlines()[-1].partition('NotImplementedError: ')[2] or str(e)
            jobs.pop(k).end()
    return missing

def timed(job, steps):
    "Seconds of a step on the slowest rank of `job`"
    secs,sums = zip(*job.ask(steps))
    if max(sums)-min(sums)>1e-5*max(sums): raise RuntimeError(f'{job.name}: the weights differ between ranks')
    return max(secs)

@call_parse
def main(
    rounds:int=9, # Times that each peer runs
    steps:int=12, # In each run; the first two are not counted
    out:str=None # JSON file for the rows
):
    "Time a step of a transformer of 20 million parameters in turn, in one process and in shards on 2 CPU ranks"
    runs = {}
    with open_jobs(specs, env) as jobs:
        missing = start(jobs)
        for i in range(rounds):
            todo = list(jobs)
            random.Random(i).shuffle(todo)
            for k in todo: runs.setdefault(k, []).append(timed(jobs[k], steps)*1e3)
    rows = [dict(peer=k, one=median(runs[k,1]), two=median(runs[k,2]), rounds=dict(one=runs[k,1], two=runs[k,2])) for k in alone]
    for o in rows: o |= dict(added=o['two']-o['one'], two_x=o['two']/rows[0]['two'])
    for o in rows: o['added_x'] = o['added']/rows[0]['added']
    n = sum(p.numel() for p in transformer().parameters())
    keys = 'one two two_x added added_x'.split()
    show_table(f'{n/1e6:.1f} million parameters, Adam, milliseconds of a step', ['','1 process','2 ranks','/hand','added','/hand'], [[o['peer']]+[o[k] for k in keys] for o in rows])
    for k,why in missing.items(): print(f'{k}: left out, since {why}')
    save(rows, out)
