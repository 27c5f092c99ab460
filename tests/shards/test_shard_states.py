"A training in shards that is ended anywhere goes on where it was, in shards or not, on any number of ranks"
import pytest,shutil,warnings
from collections import Counter
from contextlib import suppress
from functools import cache
from tempfile import TemporaryDirectory
from unittest import mock
from fastcore.test import test_eq
from fastai.basics import *
from fastai.callback.training import GradientAccumulation,GradientClip
from fastdist import *
from fastdist.comm.job import Job
from fastdist.state import dcp
from fastdist.state.checkpoint import StateWriter
from fastdist.state.dcp import map_tensors,stored_tensors
from collectives import counting
from compare import whole_tables
from survive import *
from test_survive import differences,runs

kw = dict(saves=False, every=2)

@cache
def whole(size, drop=True, **how):
    "What the undisturbed run leaves"
    with TemporaryDirectory() as d: return runs(Path(d), size, drop, **kw|how)

# As many ranks in shards: to the bit, with dropout

ends = [Blow('kill the last', 'middle', 0, 1, 2, 4), Blow('SIGTERM to one', 'last step', 1, 2, 3, 13), Blow('kill all', 'between fits', 0, 1, 0, 0),
    Blow('power cut', 'while writing', 1, 0, 1, 7), Blow('kill the last', 'while writing', 1, 0, 1, 0)]

@pytest.mark.parametrize('i', [pytest.param(i, id=str(o), marks=() if i==3 else pytest.mark.whole) for i,o in enumerate(ends)])
def test_it_ends_as_the_undisturbed_run(tmp_path, i):
    size = 2+i%2
    assert runs(tmp_path, size, True, shard=True, blow=ends[i], **kw) is None
    res = runs(tmp_path, size, True, shard=True, **kw)
    for a,b in zip(whole(size, shard=True), res): test_eq(differences(a, b, True), [])

# Other ranks, other layouts

def near(a, b, *parts): return differences({k:a[k] for k in parts}, {k:b[k] for k in parts}, False)

@pytest.mark.parametrize('first,second', (((2,True),(3,True)), ((3,True),(1,False)), ((2,False),(3,True))))
@pytest.mark.by_default('first1')
def test_it_goes_on_in_another_layout(tmp_path, first, second):
    (n,shard),(m,then) = first,second
    assert runs(tmp_path, n, False, shard=shard, blow=Blow('kill all', 'middle', 1, 1, 1, 4), **kw) is None
    res = runs(tmp_path, m, False, shard=then, **kw)
    for a,b in zip(whole(1, False)*m, res): test_eq(near(a, b, 'snap','rec','log'), [])

# What a state in shards holds

class Until(Callback):
    "Ends the training before step `n` of the fit, as an error of the user does"
    order = 90
    def __init__(self, n): self.n,self.seen = n,0
    def before_batch(self):
        self.seen += self.training
        if self.seen>self.n>0: raise InterruptedError('cut off')

def tied():
    model = nn.Sequential(nn.Linear(8,8), nn.ReLU(), nn.Linear(8,8), nn.Dropout(.2), nn.Linear(8,3))
    model[2].weight = model[0].weight
    return model

def sure(): return nn.Sequential(nn.Linear(8,5), nn.ReLU(), nn.Linear(5,3))
def plain(): return nn.Sequential(nn.Linear(8,5), nn.ReLU(), nn.Dropout(.2), nn.Linear(5,3))

def local(t): return getattr(t, '_local_tensor', t)

def fitted(path, n, mk=plain, opt=Adam, cbs=(), size=2, **how):
    "Fit two epochs of five batches on this rank in shards, unless it ends before step `n`; return weights, losses and the optimizer's state"
    set_seed(3)
    dls = DataLoaders.from_dsets(Samples(30), Samples(7, 1), bs=6//size, num_workers=0, device='cpu')
    cbs = [Checkpoint(path, every=1, minutes=None), Until(n), *[o() for o in cbs]]
    learn = Learner(dls, mk(), loss_func=CrossEntropyLossFlat(), metrics=accuracy, opt_func=opt, lr=.05, cbs=cbs)
    with suppress(InterruptedError), learn.no_bar(), learn.no_logging(), learn.distrib_ctx(**dict(shard=True)|how): learn.fit(2)
    learn.checkpoint.writer.wait()
    return learn.model.state_dict(),list(learn.recorder.losses),map_tensors(LearnerState.take(learn, 'opt')['opt'], local)

class InEpochs(Callback):
    "Has states made between epochs only, where a window of batches may be open"
    def before_fit(self): self.learn.recorder.train_metrics = True

window = dict(cbs=[partial(GradientAccumulation, 18),InEpochs])
kinds = dict(ranger=dict(opt=ranger), larc=dict(opt=Larc), wrapped=dict(opt=partial(OptimWrapper, opt=torch.optim.AdamW)), tied=dict(mk=tied),
    window=dict(cbs=[partial(GradientAccumulation, 18)]), clipped=dict(cbs=[partial(GradientClip, .1)]), batches=dict(gradient_accumulation_steps=2),
    open_window=window, of_replicas=window|dict(shard=False))
if not whole_tables: kinds = {k:kinds[k] for k in ('tied','open_window','of_replicas')}

@pytest.mark.whole
def test_all_kinds(tmp_path):
    "To the bit, with dropout, several optimizers, tied weights, and a window of accumulation that is open where the training goes on"
    def run(rank, kind):
        whole,_,last = [fitted(tmp_path/f'{kind} {k}', n, **kinds[kind]) for k,n in (('whole',0),('cut',8),('cut',0))]
        return differences(dict(enumerate(whole)), dict(enumerate(last)), True)
    test_eq(on_ranks(lambda rank: {k:run(rank, k) for k in kinds}, join=False, timeout=100), [{k:[] for k in kinds}]*2)

@pytest.mark.whole
def test_an_open_window_goes_on_elsewhere(tmp_path):
    "Gradients that ranks have each for itself become their mean"
    how = window|dict(mk=sure)
    whole = on_ranks(lambda rank: [fitted(tmp_path/k, n, **how)[:2] for k,n in (('whole',0),('cut',8))], join=False)[0][0]
    for size,shard in ((3,True),*[(2,False)]*whole_tables,(1,False)):
        shutil.copytree(tmp_path/'cut', here := tmp_path/f'{size}{shard}')
        for o in on_ranks(lambda rank: fitted(here, 0, size=size, shard=shard, **how)[:2], size, join=False):
            test_eq(differences(dict(enumerate(whole)), dict(enumerate(o)), False), [])

# What it costs, and what the disk does

class Waits(Callback):
    "Waits for each state, so that none is put off"
    order = 2*Checkpoint.order
    def after_batch(self):
        self.learn.checkpoint.writer.wait()

def costs(rank, path, n, **kw):
    "Collectives and votes that a `Checkpoint` adds to a fit of `n` batches"
    def one(*cbs):
        set_seed(3)
        learn = Learner(DataLoaders.from_dsets(Samples(6*n), Samples(7, 1), bs=3, num_workers=0, device='cpu'), sure(), loss_func=CrossEntropyLossFlat())
        learn._do_epoch_validate = noop
        votes,agree = Counter(),Job.agree
        def counted(self, name, *args, **kw):
            votes[name] += 1
            return agree(self, name, *args, **kw)
        with learn.distrib_ctx(shard=True), learn.no_bar(), learn.no_logging(), mock.patch.object(Job, 'agree', counted), counting() as ran: learn.fit(1, cbs=cbs)
        return ran+votes
    res = one(Checkpoint(path, **kw), Waits())
    res.subtract(one())
    return +res

@pytest.mark.whole
def test_quiet_steps_exchange_nothing_and_a_state_little(tmp_path):
    few,many,states = [on_ranks(lambda rank: costs(rank, tmp_path/f'{n}{every}', n, every=every), join=False)[0] for n,every in ((4,50),(16,50),(16,5))]
    test_eq(few, many)
    test_eq(sum((states-many).values()), 3*4)

def test_ranks_hold_and_write_their_rows(tmp_path):
    "Nothing is gathered for a snapshot or a state, and no file has more than its rank's rows"
    def run(rank):
        dls = DataLoaders.from_dsets(Samples(30), Samples(7, 1), bs=5, num_workers=0, device='cpu')
        learn = Learner(dls, nn.Linear(8,3), loss_func=CrossEntropyLossFlat(), cbs=Checkpoint(tmp_path))
        with learn.distrib_ctx(shard=True), learn.no_bar(), learn.no_logging():
            learn.fit(1)
            with counting() as ran: snap = LearnerState.take(learn)
            return sum(ran.values()),snap['model']['weight'].to_local().shape,[len(local(o['grad_avg'])) for o in snap['opt']['state']]
    test_eq(on_ranks(run, 2, join=False), [(0,(2,8),[2,2]),(0,(1,8),[1,1])])
    state = States(tmp_path).newest()
    own = 'shard-00002-model-00001-of-00001.safetensors'
    held = [*(('model.',''),), *(('opt.state.',f'.{k}') for k in ('grad_avg','sqr_avg'))]
    want = {f'{o}weight{k}':'float32 [1, 8] from [2, 0] of [3, 8]' for o,k in held} | {f'{o}bias{k}':'float32 [1] from [2] of [3]' for o,k in held}
    test_eq(state.record['files'][own]['holds'], want)
    test_eq({k:o for k,o in stored_tensors(state.path).items() if k in want}, {k:(torch.Size([3,8] if 'weight' in k else [3]),torch.float32) for k in want})
    with open(state.path/own, 'r+b') as f: f.write(b'torn')
    with pytest.warns(UserWarning, match=f'{own} was changed after it was written'): assert States(tmp_path).newest() is None

class AwaitsStates(Callback):
    "Begins a step when the state before is written, so that there is one for each step on a slow disk, too"
    def before_batch(self):
        self.learn.checkpoint.writer.wait()

@pytest.mark.whole
def test_a_disk_that_one_rank_cannot_write_to(tmp_path):
    "The training goes on, the state before stays, and the next is written"
    def run(rank):
        write,calls = dcp.write_shards,[]
        def hindered(folder, *args):
            calls.append(1)
            if rank and len(calls)==2: (folder/'shard-00002-model-00001-of-00001.safetensors').mkdir()
            return write(folder, *args)
        dcp.write_shards = hindered
        with warnings.catch_warnings(record=True) as ws:
            warnings.simplefilter('always') # or one that an earlier test has shown is not recorded
            fitted(tmp_path/'states', 0, cbs=[AwaitsStates])
        return [str(w.message) for w in ws if 'A state could not be written' in str(w.message)],len(calls)
    (said,n),(own,m) = on_ranks(run, join=False)
    assert n==m>2 and len(said)==len(own)==1 and 'rank 1 could not write its part' in said[0], (said,own,n,m)
    test_eq(sorted(o.name[:6] for o in (tmp_path/'states').iterdir()), ['.lock',*(f'{i:06d}' for i in (n-2,n-1))])

@pytest.mark.whole
def test_a_folder_that_not_all_ranks_see(tmp_path):
    def run(rank):
        if rank: StateWriter.sees = lambda self, folder: False
        with warnings.catch_warnings(record=True) as ws: fitted(tmp_path, 0)
        return [str(w.message) for w in ws if 'A state could not be written' in str(w.message)]
    (said,),own = on_ranks(run, join=False)
    assert 'rank 1 does not see it' in said and 'ranks on several nodes need a folder that all of them see' in said and not own
    test_eq(States(tmp_path).newest(), None)
