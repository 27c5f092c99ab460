"Where the time of a fit goes: which rank is late, in what, and what it costs to know"
import json,os,pytest,time
from collections import Counter
from unittest import mock
from fastcore.test import test_eq
from fastai.basics import *
from fastai.callback.all import *
from fastai import learner as learner_module
from torch import distributed as dist
from fastdist import *
from fastdist.comm.job import current_job
from fastdist.tools.timeline import shown_parts
from collectives import counting
from learners import digits

least_nap = nap = .04 # longer than what busy cores take from a rank by chance

@pytest.fixture(autouse=True)
def load():
    "The more processes run, the more chance takes"
    global nap
    nap = least_nap*max(1, os.getloadavg()[0]/os.cpu_count()/2)

class Samples:
    "Digits that take their time on one rank"
    def __init__(self, n, secs=0): self.n,self.secs = n,secs
    def __len__(self): return self.n
    def __getitem__(self, i):
        if self.secs and i%8==0: time.sleep(self.secs)
        return torch.full((64,), i/self.n),i%10

class Naps(Callback):
    "Sleeps at an event of training, in those steps for which `when` holds"
    run_valid = False
    def __init__(self, event, secs=None, when=lambda i: True): setattr(self, event, lambda: time.sleep(secs or nap) if when(self.iter) else None)

def in_order(secs):
    "A Learner whose every batch of 8 has one sample that takes `secs`"
    dls = DataLoaders.from_dsets(Samples(192, secs), Samples(16), bs=8, num_workers=0, device='cpu', shuffle=False)
    return Learner(dls, nn.Linear(64,10), loss_func=CrossEntropyLossFlat())

def naps(*_): time.sleep(nap)

def late_learner(where, mine):
    "A Learner that is late in `where`, on the rank for which `mine` is set, and its callbacks"
    learn = in_order(nap*mine) if where=='data' else digits(360, bs=8)
    if where=='forward' and mine: learn.model[0].register_forward_hook(naps)
    if where=='backward' and mine: learn.model[0].register_full_backward_hook(naps)
    return learn,[Naps('after_batch')] if where=='callbacks' and mine else []

def quiet(learn, n=1, ctx=None, **kw):
    with learn.distrib_ctx(**(ctx or {})), learn.no_bar(), learn.no_logging(): learn.fit(n, **kw)
    return learn.timeline

def says(rank, where, late, **ctx):
    learn,cbs = late_learner(where, rank==late)
    t = quiet(learn, cbs=[Timeline(),*cbs], ctx=ctx)
    return str(t),t.table()

# A rank that is late

def check(res, where, late):
    said,table = res[0]
    test_eq({o[0] for o in res}, {said})
    assert said.startswith(f'rank {late} is late by ') and f' ms a step, in {where}; the others wait ' in said, said
    by = float(said.split()[5])
    assert .5*nap*1e3<by<3*nap*1e3, said
    test_eq(table.waiting.idxmin(), late)
    test_eq(table.late.idxmax(), late)

@pytest.mark.parametrize('where', ('data','forward','backward','callbacks'))
@pytest.mark.by_default('data', 'backward')
def test_the_late_rank_is_named(where): check(on_ranks(lambda rank: says(rank, where, 1), 2, join=False), where, 1)

@pytest.mark.whole
@pytest.mark.parametrize('size,late', ((3,0),(4,2)))
@pytest.mark.by_default('3-0')
def test_on_more_ranks(size, late): check(on_ranks(lambda rank: says(rank, 'forward', late), size, join=False), 'forward', late)

@pytest.mark.whole
@pytest.mark.parametrize('where', ('data','backward'))
@pytest.mark.by_default('backward')
def test_in_shards(where): check(on_ranks(lambda rank: says(rank, where, 0, shard=True), 2, join=False), where, 0)

class HostEvent:
    "An event of a device, which has come to it when somebody has waited for it or for a later one"
    waits,past = 0,0
    def record(self): self.t = time.perf_counter_ns()
    def synchronize(self): HostEvent.waits,HostEvent.past = self.waits+1,max(self.past, self.t)
    def elapsed_time(self, o):
        if max(self.t, o.t)>self.past: raise RuntimeError('the device has not come to this event')
        return (o.t-self.t)/1e6

def says_by_events(rank):
    learn,cbs = late_learner('backward', rank==1)
    t = Timeline()
    with mock.patch('fastdist.tools.timeline.events_of', lambda device: HostEvent): quiet(learn, n=2, cbs=[t,*cbs])
    said,table,waits = str(t),t.table(),HostEvent.waits
    quiet(learn, n=1, cbs=Timeline()) # on the processor
    return said,table,waits,HostEvent.waits-waits

@pytest.mark.whole
def test_times_of_a_device():
    "They are read when an epoch has ended, and no step waits for the device"
    res = on_ranks(says_by_events, 2, join=False)
    check([o[:2] for o in res], 'backward', 1)
    test_eq([o[2:] for o in res], [(2,0)]*2)

def behind_workers(rank):
    "80 steps, of which each fourth waits for what four workers fetch, as the default of `num_workers` has them on four cores"
    dls = DataLoaders.from_dsets(Samples(1280, 3*nap*(rank==1)), Samples(16), bs=8, num_workers=4, device='cpu', shuffle=False)
    t = quiet(Learner(dls, nn.Linear(64,10), loss_func=CrossEntropyLossFlat()), cbs=[Timeline()])
    return str(t)

@pytest.mark.whole
def test_the_late_rank_is_named_behind_workers():
    said,_ = on_ranks(behind_workers, 2, join=False)
    assert said.startswith('rank 1 is late by ') and ' ms a step, in data; the others wait ' in said, said

# Where no rank is late

class Large(Callback):
    "An exchange of 16 MB after each backward pass"
    run_valid = False
    def before_fit(self): self.t = torch.zeros(4_000_000)
    def after_backward(self): dist.all_reduce(self.t)

def alike(rank, cbs):
    t = quiet(digits(240, bs=8), cbs=[Timeline(),*cbs()])
    return str(t),t.table()

@pytest.mark.parametrize('cbs,where,least', ((lambda: [Naps('after_batch')],'callbacks',least_nap*1e3), (lambda: [Large()],'transfer',1.)), ids=('naps','transfer'))
@pytest.mark.by_default('naps')
def test_no_rank_is_named_where_all_are_alike(cbs, where, least):
    (said,table),_ = on_ranks(partial(alike, cbs=cbs), 2, join=False)
    assert said.startswith('no rank is late'), said
    assert (table[where]>=least).all(), table

def turns(rank):
    t = quiet(digits(320, bs=8), cbs=[Timeline(),Naps('after_batch', when=lambda i: i%2==rank)])
    return str(t),t.steps.lateness.argmax(0)

@pytest.mark.whole
def test_no_rank_is_named_where_they_take_turns():
    (said,last),_ = on_ranks(turns, 2, join=False)
    assert said.startswith('no rank is late throughout; ranks wait'), said
    test_eq((last[1:]!=last[:-1]).mean()>.7, True)

# What it exchanges

def exchanged(rank, timed, n_epoch):
    learn = digits(240, bs=8)
    with learn.distrib_ctx(), learn.no_bar(), learn.no_logging(), counting() as ran:
        begun = current_job().exchanges.n
        learn.fit(n_epoch, cbs=[Timeline()]*timed)
        n = current_job().exchanges.n-begun
    return n,ran

@pytest.mark.parametrize('n_epoch', (1,3))
@pytest.mark.by_default('3')
def test_one_exchange_an_epoch_and_none_in_a_step(n_epoch):
    (n,plain),(timed_n,timed) = [on_ranks(partial(exchanged, timed=o, n_epoch=n_epoch), join=False)[0] for o in (False,True)]
    test_eq((timed_n-n, timed-plain), (n_epoch,Counter({'c10d::allgather_':2*n_epoch})))

# All that may happen in a fit

def one_process(lean=False, **kw):
    learn = digits(**kw)
    if lean: learn.lean()
    return learn

def fitted(learn, n=1, cbs=None):
    with learn.no_bar(), learn.no_logging(): learn.fit(n, cbs=[Timeline(),*L(cbs)])
    return learn.timeline

class Epochs(Callback):
    "Nanoseconds of the epochs of a fit"
    order,took = -100,0
    def before_fit(self): self.begun = time.perf_counter_ns()
    def after_fit(self): self.took = time.perf_counter_ns()-self.begun

@pytest.mark.parametrize('lean', (False,True))
def test_in_one_process(lean):
    "Parts fill the whole epoch, and the Learner is as it was"
    learn = one_process(lean)
    before = set(vars(learn))
    epochs = Epochs()
    t = fitted(learn, 2, epochs)
    test_eq(set(vars(learn))-before-{'timeline','n_epoch','epoch','dl','xb','yb','pred','loss','iter','n_iter','training','train_iter','pct_train','loss_grad','smooth_loss','opt','final_record'}, set())
    test_eq((t.steps.size, t.history.n, str(t).startswith('35 steps of')), (1,36,True))
    rows = t.history.rows[0]
    for o in (rows[:18],rows[18:]): test_eq(o[1:,0], o[:-1,0]+o[:-1,2:].sum(1))
    whole = t.history.rows[...,2:].sum()+sum(o[:,1].sum() for o in t.history.heads)
    assert .7*epochs.took<whole<=epochs.took
    assert dist.all_reduce.__module__.startswith('torch') and t.plot() is not None and t.plot_steps() is not None

def stopped(n, at):
    "The timeline of a fit of two epochs that its user stops in epoch `at`"
    def stops(self):
        if (self.epoch,self.iter)==(at,2): raise KeyboardInterrupt
    learn = one_process()
    with pytest.raises(KeyboardInterrupt): fitted(learn, n, Callback(after_batch=stops))
    return learn.timeline

few = dict(no_fit=(Timeline,0), first_epoch=(lambda: stopped(2, 0),0), second_epoch=(lambda: stopped(2, 1),17),
    one_batch=(lambda: fitted(digits(20)),1), one_process=(lambda: fitted(one_process()),17))

@pytest.mark.filterwarnings('error::UserWarning')
@pytest.mark.parametrize('k', few)
def test_what_is_told_of_few_steps_in_one_process(k, tmp_path):
    make,n = few[k]
    t = make()
    test_eq((t.steps.n,t.table().shape,t.plot_steps() is None,t.plot() is None), (n,(1,10),False,False))
    assert str(t).startswith(f'{n} step{"s"*(n>1)} of ' if n else 'no step was timed'), str(t)
    json.loads(t.save(tmp_path/'t.json').read_text())

class Validates(Callback):
    "Validates in the midst of an epoch, on all ranks or on rank 0"
    run_valid = False
    def after_batch(self):
        if self.iter==3: self.learn.validate()

class OnRank0(Validates): rank0_only = True

class Ends(Callback):
    "Raises `e` at a batch"
    run_valid = False
    def __init__(self, e, event='after_batch'):
        self.e = e
        setattr(self, event, self.end)
    def end(self):
        if self.iter==4: raise self.e()

def rows_of(rank, cbs=None, n=2, learn=None):
    t = quiet(learn() if learn else digits(240, bs=8), n, cbs=[Timeline(),*L(cbs() if cbs else None)])
    s = t.steps
    return t.history.n,s.total.min(),t.table(),[h[0].tolist() for h in t.history.heads]

others = dict(nested=(lambda: [Validates()],24), cancel_epoch=(lambda: [Ends(CancelEpochException)],10),
    cancel_fit=(lambda: [Ends(CancelFitException)],5), cancel_batch=(lambda: [Ends(CancelBatchException, 'before_batch')],24),
    accumulates=(lambda: [GradientAccumulation(32)],24))

@pytest.mark.whole
@pytest.mark.parametrize('k', [*others, pytest.param('rank0', marks=pytest.mark.replicas)])
@pytest.mark.by_default('nested', 'accumulates')
def test_what_callbacks_do(k):
    cbs,n = others.get(k, (lambda: [OnRank0()],24))
    for steps,least,table,heads in on_ranks(partial(rows_of, cbs=cbs), join=False):
        test_eq(steps, n)
        assert least>0 and (table[['forward','backward']]>0).all(None) and (table>=0).all(None)
        assert all(o[1]>=0 for o in heads)

@pytest.mark.whole
def test_a_ragged_last_batch():
    mk = lambda: digits(250, bs=8, dls_kw=dict(drop_last=False))
    for steps,least,*_ in on_ranks(partial(rows_of, learn=mk), 3, join=False): test_eq((steps,least>0), (18,True))

def again(rank):
    "A fit that fails, a search, and two fits, each with what is on torch and the Learner taken off"
    learn = digits(240, bs=8, cbs=Timeline())
    own,res = [dist.all_reduce,to_device],[]
    def fails(self):
        if rank==1 and self.iter==2: raise ValueError('mine')
    with learn.distrib_ctx(), learn.no_bar(), learn.no_logging():
        with pytest.raises((ValueError,RankError)): learn.fit(1, cbs=Callback(after_batch=fails))
        test_eq([dist.all_reduce,learner_module.to_device], own)
        res.append(learn.timeline.history.n)
        learn.lr_find(num_it=5, show_plot=False)
        for n in (1,2):
            learn.fit(n)
            res.append(learn.timeline.history.n)
        test_eq([dist.all_reduce,learner_module.to_device], own)
        test_eq([k for k in vars(current_job().exchanges) if k in ('begin','end')], [])
    return res

@pytest.mark.whole
def test_errors_and_further_fits(): test_eq(on_ranks(again, join=False), [[0,12,24]]*2)

def resumed(rank, path):
    def stops(self):
        if self.epoch==1 and self.iter==2: raise KeyboardInterrupt
    learn = digits(240, bs=8)
    with learn.distrib_ctx(), learn.no_bar(), learn.no_logging():
        with pytest.raises((KeyboardInterrupt,RankError)): learn.fit(2, cbs=[Timeline(),Checkpoint(path, every=1),Callback(after_batch=stops)])
    learn = digits(240, bs=8)
    t = quiet(learn, 2, cbs=[Timeline(),Checkpoint(path, every=1)])
    return t.history.n,t.steps.total.min()>0

@pytest.mark.whole
def test_a_resumed_fit(tmp_path):
    "It has the steps that were made since"
    for n,fine in on_ranks(partial(resumed, path=tmp_path/'states'), join=False): assert 0<n<=24 and fine

# Memory, and the file

def short(rank):
    t = quiet(digits(240, bs=8), 3, cbs=Timeline(steps=7))
    return t.history.n,t.history.rows.shape,t.history.first,t.history.steps.n

@pytest.mark.whole
def test_an_epoch_of_more_steps_than_are_kept():
    for n,rows,first,steps in on_ranks(short, join=False): test_eq((n,rows[:2],first,steps), (36,(2,7),29,7))

def traced(rank):
    t = quiet(digits(240, bs=8), cbs=[Timeline(),*[Naps('before_batch')]*(rank==2)])
    return json.loads(t.save(f'trace{rank}.json').read_text())['traceEvents']

def test_the_trace_has_all_ranks_above_each_other():
    es = on_ranks(traced, 3, join=False)
    test_eq([sorted({e['pid'] for e in o}) for o in es], [[0,1,2]]*3)
    spans = [e for e in es[0] if e['ph']=='X']
    assert all(e['ts']>=0 and e['dur']>0 and e['name'] in shown_parts for e in spans)
    ends = [{e['args']['step']:e['ts']+e['dur'] for e in spans if e['pid']==r and e['name']=='transfer'} for r in range(3)]
    assert len(ends[0])>5
    apart = [max(o[i] for o in ends)-min(o[i] for o in ends) for i in ends[0]]
    assert np.median(apart)<np.median(np.diff(sorted(ends[0].values()))), apart # less than a step
