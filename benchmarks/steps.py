"The time of a step and its collectives, of fastdist and its peers side by side: `python benchmarks/steps.py --help`"
import random
from statistics import median
from fastcore.all import call_parse,first
from jobs import open_jobs,save,show_table
from work import works

alone = dict(DDP='loops.Loop', Accelerate='loops.AccelerateLoop', Lightning='lit.Lightning', fastai='fast.Fastai')
together = dict(DDP='loops.Loop', Accelerate='loops.AccelerateLoop', Lightning='lit.Lightning') | {
    'Accelerate, gathering':'loops.AccelerateGather', 'fastai.distributed':'fast.FastaiDistributed', 'fastdist':'fast.FastdistSyncBN', 'fastdist, sync_bn=False':'fast.Fastdist',
    'fastdist, voting':'fast.FastdistVoting'}
specs = {(k,1):(v,1) for k,v in alone.items()} | {(k,2):(v,2) for k,v in together.items()}
# Memory that is freed stays with the process, or page faults decide by chance which one is fast; and a quiet profiler
env = dict(MALLOC_MMAP_THRESHOLD_='1000000000', MALLOC_TRIM_THRESHOLD_='2000000000', KINETO_LOG_LEVEL='99')
epochs = 4 # The first warms up, the last has no next one to end it

def start(jobs):
    "Wait until all of `jobs` are ready, and take out those that miss a requirement; what they miss, by peer"
    missing = {}
    for k in list(jobs):
        try: jobs[k].answers()
        except ModuleNotFoundError as e:
            missing[k[0]] = str(e)
            jobs.pop(k).end()
    return missing

def takes(peer, work):
    "Does `peer` run `work`? One without batch norm tells nothing new of `sync_bn`"
    return work=='cnn' or 'sync_bn' not in peer

def timed(job, work, exchange):
    "Timings of one fit on all ranks of `job`, each the slowest rank's"
    steps = works[work].steps
    res,sums = zip(*job.ask('time', work, steps, steps, epochs, exchange))
    if len(set(sums))>1 and exchange: raise RuntimeError(f'{job.name}: the weights differ between ranks')
    return {k:max(o[k] for o in res) for k in res[0]}

def run_rounds(jobs, rounds):
    "For each job and workload the timings of each round, those of two ranks without exchange as well; each round in an order of its own"
    runs = {(k,work,exchange):[] for work in works for k in jobs if takes(k[0], work) for exchange in (True,False)[:k[1]]}
    for i in range(rounds):
        todo = list(runs)
        random.Random(i).shuffle(todo)
        for k,work,exchange in todo: runs[k,work,exchange].append(timed(jobs[k], work, exchange))
        print(f'round {i+1} of {rounds}', flush=True)
    return runs

def collectives(job, work):
    "Number of collectives on rank 0, each the difference of two fits so that what a fit needs once drops out"
    count = lambda *args: job.ask('count', work, *args)[0]
    n = 4
    base,valid = count(n, 0, 1),count(n, n, 1)
    step,valid_step = (count(2*n, 0, 1)-base)/n,(count(n, 2*n, 1)-valid)/n
    epoch = count(n, 0, 2)-base
    both = count(n, n, 2)-valid
    return dict(train_step=step, train_epoch=epoch-n*step, valid_step=valid_step, valid_epoch=both-epoch-n*valid_step)

def measured(runs, key, work, exchange, n):
    "Milliseconds in each round, by name; nothing where `key` has not run"
    return {f'{what}_{n}':[o[what]*1e3 for o in runs[key,work,exchange]] for what in ('train','valid','epoch')} if (key,work,exchange) in runs else {}

def summary(runs, counts, peer, work):
    "One row: medians over rounds, what each round measured, and collectives"
    base = peer if peer in alone else 'Accelerate' if peer.startswith('Accelerate') else 'fastai'
    rounds = measured(runs, (base,1), work, True, 'one') | measured(runs, (peer,2), work, False, 'own') | measured(runs, (peer,2), work, True, 'two')
    res = dict(work=work, peer=peer, baseline=base, steps=works[work].steps, bs=works[work].bs, collectives=counts.get((peer,work)))
    res |= {k:median(v) for k,v in rounds.items()}
    more = lambda n: res[f'train_{n}']-res['train_one'] if f'train_{n}' in res else None
    return res | dict(own=more('own'), added=more('two'), rounds=rounds)

def ratio(a, b): return a/b if a and b else None

def compare(row, rows):
    "Add to `row` what it is relative to the DDP loop's, and to fastai's in one process"
    ddp,fastai = [first(o for o in rows if (o['work'],o['peer'])==(row['work'],k)) for k in ('DDP','fastai')]
    row |= {f'{k}_x':ratio(row.get(k), ddp[k]) for k in ('added','train_two','valid_two','epoch_two')}
    row['valid_fastai_x'] = ratio(row.get('valid_two'), fastai['valid_one']) if row['baseline']=='fastai' else None

def show_times(work, rows):
    keys = 'train_one own train_two added added_x valid_one valid_two valid_two_x valid_fastai_x epoch_two epoch_two_x'.split()
    heads = ['', 'train 1', 'own', 'train 2', 'added', '/DDP', 'valid 1', 'valid 2', '/DDP', '/fastai', 'epoch 2', '/DDP']
    w = works[work]
    title = f'{work}, milliseconds in 1 process and on 2 ranks, batches of {w.bs} a rank, epochs of {w.steps} steps and {w.steps} of validation'
    show_table(title, heads, [[o['peer']]+[o.get(k) for k in keys] for o in rows])

def show_collectives(work, rows):
    n,keys = works[work].steps,'train_step train_epoch valid_step valid_epoch'.split()
    cells = [[o['peer']]+[c[k] for k in keys]+[n*c['valid_step']+c['valid_epoch']] for o in rows for c in [o['collectives']] if c]
    heads = ['', 'training step', 'training epoch, besides', 'validation step', 'validation epoch, besides', f'validation epoch of {n} steps']
    show_table(f'{work}, collectives on 2 ranks', heads, cells)

def report(rows, missing):
    for work in works:
        mine = [o for o in rows if o['work']==work]
        show_times(work, mine)
        for peer,why in missing.items(): print(f'{peer}: left out, since {why}')
        show_collectives(work, mine)

@call_parse
def main(
    rounds:int=15, # Times that each peer runs each workload
    out:str=None # JSON file for the rows
):
    "Time fastdist and its peers in turn, in 1 process and on 2 CPU ranks"
    with open_jobs(specs, env) as jobs:
        missing = start(jobs)
        runs = run_rounds(jobs, rounds)
        counts = {(k,work):collectives(job, work) for (k,n),job in jobs.items() for work in works if n==2 and takes(k, work)}
    peers = [k for k in [*alone,*together] if k not in missing]
    rows = [summary(runs, counts, peer, work) for work in works for peer in dict.fromkeys(peers) if takes(peer, work)]
    for o in rows: compare(o, rows)
    report(rows, missing)
    save(rows, out)
