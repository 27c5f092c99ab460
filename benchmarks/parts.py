"Where the time of a step goes, by part: `python benchmarks/parts.py --help`"
from statistics import fmean,median
from fastcore.all import call_parse
from jobs import open_jobs,save,show_table
from stamps import rest
from steps import env,start
from work import all_works

peers = {'by hand, DDP':('stamped.StampedLoop',2), 'fastai, 1 process':('stamped.StampedFastai',1), 'fastai, lean':('stamped.StampedLean',1),
    'fastdist':('stamped.StampedFastdist',2)}
exchanged = '  of it exchange and wait'
first_rows = ['batch','to the device','splitting','forward','around the forward pass','loss','around the loss','backward',exchanged,
    'optimizer step','zero_grad']
last_rows = [rest,'whole','whole, without stamps']
beside = {'stamps',exchanged,*last_rows[1:]}
epochs = 4 # The first warms up

def measure(job, work):
    "One round of `job` on rank 0: steps by phase with and without exchange, each a dict of parts, and microseconds of a step without stamps"
    fit = lambda what, exchange=True: job.ask(what, work, *[all_works[work].steps]*2, epochs, exchange)[0]
    before,*steps = fit('time'),fit('parts'),*([fit('parts', False)] if job.size>1 else [])
    plain = [o for o,_ in (before,fit('time'))]
    return steps,[fmean(o[k]*1e6 for o in plain) for k in ('train','valid')]

def middle(steps):
    "Mean of each part over the half of `steps` whose time is in the middle, so that parts add up to a step"
    whole = lambda o: sum(o.values())-o['stamps']
    steps = sorted(steps, key=whole)[len(steps)//4:len(steps)-len(steps)//4]
    res = {k:fmean(o.get(k, 0.) for o in steps) for k in {}.fromkeys(k for o in steps for k in o)}
    return res | dict(whole=whole(res))

def summary(rounds, i):
    "Microseconds by part of phase `i` in a peer's round of median length"
    found,*alone = [sorted((middle(o[i]) for o in fits), key=lambda o: o['whole'])[len(fits)//2] for fits in zip(*[steps for steps,_ in rounds])]
    if alone and 'backward' in found: found[exchanged] = found['backward']-alone[0]['backward']
    return found | {last_rows[-1]:median(plain[i] for _,plain in rounds)}

def order(found):
    "The parts in `found`, in the order of the table"
    names = {k for o in found for k in o}
    own = names-{*first_rows,*last_rows,'stamps'}
    return [o for o in first_rows if o in names]+sorted(own, key=lambda o: (o.startswith('metric'), o.startswith('dispatch'), o))+last_rows

def show(work, phase, found):
    "Print a table, and whether to trust it"
    cell = lambda o, k: f'{o[k]:,.1f}' if abs(o.get(k, 0.))>=.05 else None
    rows = [[k,*[cell(o, k) for o in found.values()]] for k in order(found.values())]
    show_table(f'{work}, {phase}, microseconds of a step on rank 0, batches of {all_works[work].bs}', ['',*found], [o for o in rows if any(o[1:])])
    for k,o in found.items(): print(f'{k}: parts are {sum(v for k,v in o.items() if k not in beside)/o["whole"]:.1%} of the whole; '
        f'with stamps, which cost {o["stamps"]:.1f}, a step takes {(o["whole"]+o["stamps"])/o[last_rows[-1]]:.1%} of its time')

@call_parse
def main(
    rounds:int=5, # Times that each peer runs each workload
    work:str=None, # One of the workloads, instead of all
    out:str=None # JSON file for the rows
):
    "Time the parts of a step of training and of validation: of a loop by hand, of fastai, and of fastdist"
    runs = {}
    with open_jobs({(k,n):(v,n) for k,(v,n) in peers.items()}, env) as jobs:
        missing = start(jobs)
        for i in range(rounds):
            for w in [work] if work else all_works:
                for (k,_),job in jobs.items(): runs.setdefault((w,k), []).append(measure(job, w))
            print(f'round {i+1} of {rounds}', flush=True)
    res = {(w,phase,k):summary(o, i) for (w,k),o in runs.items() for i,phase in enumerate(('training','validation'))}
    for w,phase in dict.fromkeys(k[:2] for k in res): show(w, phase, {k[2]:o for k,o in res.items() if k[:2]==(w,phase)})
    for peer,why in missing.items(): print(f'{peer}: left out, since {why}')
    save([dict(work=w, phase=p, peer=k, microseconds=o) for (w,p,k),o in res.items()], out)
