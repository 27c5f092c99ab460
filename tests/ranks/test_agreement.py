"How ranks agree, what it costs, and how long they wait"
import dis,inspect,os,signal,sys,threading,time,traceback,pytest,warnings
from collections import Counter
from datetime import timedelta
from itertools import chain
from unittest import mock
from accelerate.utils import InitProcessGroupKwargs
from fastai.basics import *
from fastai.callback.all import *
from fastdist import *
from fastdist.launch.group import group_owner
from fastdist.comm.job import Job,current_job
from fastcore.test import test_eq,test_close,expect_fail
from collectives import counting
from learners import digits
from procs import await_that

def fit(learn, epochs=1, cbs=None, **kw):
    with learn.no_logging(), learn.no_bar(), learn.distrib_ctx(**kw): learn.fit(epochs, 0.05, cbs=cbs)
    return learn

class Count(Callback):
    def __init__(self): self.steps = 0
    def after_step(self): self.steps += 1

class Decider(Callback):
    decides = True
    def after_step(self): self.learn.looked = self.iter

class Opinion(Callback):
    "Has enough on `rank` in batch `at` of the first epoch"
    decides = True
    def __init__(self, rank, at, what, event):
        self.rank,self.at,self.what = rank,at,what
        setattr(self, event, self.look)
    def look(self):
        if self.training and (self.epoch,self.iter,this_world().rank)==(0,self.at,self.rank): raise self.what

class FailsOnOne(Callback):
    "Fails on one rank, where the others have made the step or have not"
    def __init__(self, event, rank): setattr(self, event, partial(self.look, rank))
    def look(self, rank):
        if self.training and self.iter==1 and this_world().rank==rank: raise ValueError('oops')

@pytest.mark.parametrize('size', (2,3,pytest.param(4, marks=pytest.mark.whole)))
@pytest.mark.parametrize('event', ('before_batch','after_pred','after_backward','after_step','after_batch'))
@pytest.mark.by_default('before_batch', 'after_backward', 'after_step')
def test_ranks_go_on_alike_after_an_error(event, size):
    "They are a step apart then, also in their optimizers and batch norms"
    def run(rank):
        set_seed(1)
        learn = digits(n=110, bs=8, opt_func=Adam)
        learn.model = nn.Sequential(Flatten(), nn.Linear(64,8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8,10))
        with learn.no_logging(),learn.no_bar(),learn.distrib_ctx():
            learn.fit(1, .01)
            with expect_fail(Exception, 'oops'): learn.fit(1, .01, cbs=FailsOnOne(event, size-1))
            learn.remove_cbs(L(learn.cbs).filter(lambda o: isinstance(o, FailsOnOne)))
            learn.fit(1, .01) # compares
        return [o.tolist() for o in learn.model.state_dict().values()]
    first,*others = on_ranks(run, size, timeout=60)
    assert all(o==first for o in others)

@pytest.mark.whole
@pytest.mark.parametrize('join', (False,True), ids=('own','of the process'))
@pytest.mark.parametrize('size', (2,3))
@pytest.mark.by_default('2-own')
def test_ranks_go_on_alike_in_another_context(size, join):
    "Whether the process group is the context's, or was made before it"
    def run(rank):
        learn = digits(n=110, bs=8, opt_func=Adam)
        with learn.no_logging(),learn.no_bar():
            with learn.distrib_ctx():
                learn.fit(1, .01)
                with expect_fail(Exception, 'oops'): learn.fit(1, .01, cbs=FailsOnOne('after_backward', size-1))
            learn.remove_cbs(L(learn.cbs).filter(lambda o: isinstance(o, FailsOnOne)))
            with learn.distrib_ctx(): learn.fit(1, .01)
        return [o.tolist() for o in learn.model.parameters()],[v.tolist() for p in learn.model.parameters() for v in map(learn.opt.state[p].get, ('grad_avg','sqr_avg'))]
    first,*others = on_ranks(run, size, timeout=60, join=join)
    assert all(o==first for o in others)

@pytest.mark.replicas
def test_a_rank_that_is_not_trusted_says_so_where_no_fit_follows():
    def run(rank):
        learn = digits(n=110, bs=8)
        with warnings.catch_warnings(record=True) as ws, expect_fail(Exception, 'oops'), learn.no_logging(), learn.no_bar():
            warnings.simplefilter('always')
            with learn.distrib_ctx():
                try: learn.fit(1, .01, cbs=FailsOnOne('after_step', 1))
                finally: group_owner().overtaken = rank==0
        return [str(o.message) for o in ws if 'from a part of a gradient' in str(o.message)]
    (said,),own = on_ranks(run, timeout=60)
    assert 'the GPU of rank 0 went on' in said and not own

class Begun(Callback):
    "The weights with which a fit begins"
    def before_batch(self):
        if self.training and not self.train_iter: self.values = [o.tolist() for o in self.model.parameters()]

@pytest.mark.whole
@pytest.mark.replicas
@pytest.mark.parametrize('overtaken,source', [((0,),1), ((0,1),2), ((0,1,2),0)])
@pytest.mark.by_default('overtaken2')
def test_ranks_go_on_from_one_that_is_trusted(overtaken, source):
    "Where others may have made a step from an exchange that was broken, as on GPUs over NCCL; where all may have, there is a warning"
    def run(rank):
        learn,begun = digits(n=110, bs=8, opt_func=Adam),Begun()
        with learn.no_logging(),learn.no_bar(),learn.distrib_ctx(),warnings.catch_warnings(record=True) as ws:
            warnings.simplefilter('always')
            with expect_fail(Exception, 'oops'): learn.fit(1, .01, cbs=FailsOnOne('after_step', 2))
            learn.remove_cbs(L(learn.cbs).filter(lambda o: isinstance(o, FailsOnOne)))
            with torch.no_grad(): learn.model[-1].bias += rank # what ranks have now differs
            if rank in overtaken: group_owner().overtaken = True
            mine = [o.tolist() for o in learn.model.parameters()]
            learn.fit(1, .01, cbs=begun)
        return mine,begun.values,any('from a part of a gradient' in str(o.message) for o in ws)
    res = on_ranks(run, 3, timeout=60)
    assert all(o[1]==res[source][0] for o in res)
    test_eq([o[2] for o in res], [len(overtaken)==3,False,False])

cancels = CancelStepException,CancelBackwardException,CancelBatchException,CancelTrainException,CancelEpochException,CancelFitException
spots = [(CancelStepException,'before_step'), (CancelBackwardException,'before_backward')] + [(c, e) for c in cancels[2:] for e in ('before_batch','after_loss','after_backward')]

def decided(rank, what, event, culprit, bs=8):
    set_seed(1)
    learn,count = digits(n=110, bs=bs, opt_func=SGD),Count()
    fit(learn, 2, [count, Opinion(culprit, 2, what, event)])
    return count.steps,len(learn.recorder.losses),[o.tolist() for o in learn.model.parameters()]

once = [(CancelStepException,'before_step'), (CancelBackwardException,'before_backward'), *zip(cancels[2:], ('before_batch','after_loss','after_backward','after_loss'))]

@pytest.mark.parametrize('what,event', [pytest.param(*o, marks=() if o in once else pytest.mark.whole) for o in spots])
@pytest.mark.by_default('CancelStep', 'CancelBatch', 'CancelFit')
def test_a_callbacks_decision_is_everybodys_at_the_same_step(what, event):
    alone = decided(0, what, event, 0, 24)
    for res in chain(*on_ranks(lambda rank: [decided(rank, what, event, culprit) for culprit in (0,2)], 3, join=False)):
        test_eq(res[:2], alone[:2])
        for a,b in zip(res[2], alone[2]): test_close(torch.tensor(a), torch.tensor(b), 1e-5)

class Undeclared(Opinion): decides = False

@pytest.mark.whole
@pytest.mark.parametrize('size', (2,3))
@pytest.mark.parametrize('cb', (Undeclared,Opinion))
def test_a_declared_and_an_undeclared_decision_are_the_same(cb, size):
    "Of two ranks that cancel the same batch, the one that ends more wins"
    def run(rank):
        set_seed(1)
        learn,count = digits(n=110, bs=8, opt_func=SGD),Count()
        what = CancelFitException if rank==size-1 else CancelBatchException
        fit(learn, 2, [count, cb(rank, 2, what, 'after_loss')])
        return count.steps,len(learn.recorder.losses),[o.tolist() for o in learn.model.parameters()]
    alone = decided(0, CancelFitException, 'after_loss', 0, 8*size)
    for res in on_ranks(run, size, join=False):
        test_eq(res[:2], alone[:2])
        for a,b in zip(res[2], alone[2]): test_close(torch.tensor(a), torch.tensor(b), 1e-5)

def collectives(rank, n, cb):
    learn = digits(n=n)
    with counting() as ran: fit(learn, cbs=cb())
    return len(learn.recorder.losses),ran['c10d::allreduce_']

def per_step(cb):
    (a,x),(b,y) = [on_ranks(lambda rank: collectives(rank, n, cb), join=False)[0] for n in (160,320)]
    return (y-x)/(b-a)

def votes(rank, cb):
    learn,n = digits(n=320),Counter()
    def counted(self, name, *args, agree=Job.agree, **kw):
        n[name.startswith('a vote after')] += 1
        return agree(self, name, *args, **kw)
    with mock.patch.object(Job, 'agree', counted): fit(learn, cbs=cb())
    return n[True],len(learn.recorder.losses)

@pytest.mark.parametrize('size,steps', [(3,5), *(pytest.param(*o, marks=pytest.mark.whole) for o in ((2,8),(4,4)))])
def test_only_who_may_cancel_costs_a_vote(size, steps):
    "After each step, and after the fit, whose end every callback hears of"
    for cb,n in ((Count,0), (Decider,steps+1)): test_eq(on_ranks(lambda rank: votes(rank, cb), size, join=False), [(n,steps)]*size)

@pytest.mark.whole
def test_a_vote_is_no_collective(): test_eq(per_step(Decider), per_step(Count))

class MayCancel(Callback):
    "Cancels nothing, at an event at which it could"
    def after_loss(self):
        if self.loss>1e9: raise CancelBatchException

@pytest.mark.whole
def test_who_may_cancel_before_the_exchange_costs_nothing():
    test_eq(per_step(MayCancel), per_step(Count))
    test_eq(on_ranks(lambda rank: votes(rank, MayCancel), 3, join=False), [(0,5)]*3)

class Fails(Callback):
    "Fails on rank 1 when the others have voted"
    decides = True
    def __init__(self, how): self.how = how
    def after_batch(self):
        if this_world().rank!=1 or (self.epoch,self.iter)!=(0,2): return
        time.sleep(1)
        if self.how=='kill': os.kill(os.getpid(), signal.SIGKILL)
        if self.how=='stuck': time.sleep(60)
        raise dict(error=ZeroDivisionError, interrupt=KeyboardInterrupt)[self.how]('on purpose')

def in_vote(e):
    "Was it raised where this rank voted?"
    return 'agree' in [o.name for x in (e,e.__context__) if x for o in traceback.extract_tb(x.__traceback__)]

def failing(rank, how, path):
    learn = digits(opt_func=SGD)
    if how=='kill': signal.signal(signal.SIGTERM, signal.SIG_IGN) # the head's, which ends all ranks when one is gone
    with learn.no_logging(), learn.no_bar(), learn.distrib_ctx(patience=3):
        try: learn.fit(1, cbs=Fails(how))
        except BaseException as e: (path/str(rank)).write_text(f'{type(e).__name__} {getattr(e, "rank", None)} {in_vote(e)}')
        if how=='kill': return
        learn.fit(1, cbs=Decider())
        return learn.looked,type(learn.model) is nn.Sequential

@pytest.mark.replicas # it looks at the class of the model inside
@pytest.mark.parametrize('how,mine', dict(error='ZeroDivisionError None', interrupt='KeyboardInterrupt None', stuck='RankError 1').items())
@pytest.mark.by_default('error', 'stuck')
def test_the_others_leave_a_vote_that_one_does_not_come_to(how, mine, tmp_path):
    test_eq(on_ranks(lambda rank: failing(rank, how, tmp_path), 3, join=False), [(5,True)]*3)
    test_eq([(tmp_path/str(r)).read_text() for r in range(3)], ['RankError 1 True', f'{mine} False', 'RankError 1 True'])

def test_the_others_leave_a_vote_when_one_is_killed(tmp_path):
    with expect_fail(RankError, 'SIGKILL'): on_ranks(lambda rank: failing(rank, 'kill', tmp_path), 3, join=False)
    test_eq([(tmp_path/str(r)).read_text() for r in (0,2)], ['RankError 1 True']*2)

class Sleepy(Callback):
    def before_batch(self):
        if this_world().rank and self.iter==1: time.sleep(8)

def waited(rank, **kw):
    try: fit(digits(), cbs=Sleepy(), **kw)
    except RuntimeError as e: return str(e)

@pytest.mark.parametrize('patience', [None,60])
@pytest.mark.by_default('None')
def test_the_groups_timeout_takes_effect(patience):
    handler = InitProcessGroupKwargs(timeout=timedelta(seconds=2))
    for text in on_ranks(lambda rank: waited(rank, patience=patience, kwargs_handlers=[handler]), join=False):
        assert ('Sleepy.before_batch' if patience is None else 'Timed out') in text

def unequal(rank): fit(digits(), cbs=[Decider()] if rank else None)

def test_deciders_on_one_rank_alone_are_an_error():
    with expect_fail(RankError, "different callbacks that may cancel: [[], ['Decider']]"): on_ranks(unequal, join=False)

def leaves_early(rank):
    learn = digits()
    with learn.no_logging(), learn.no_bar(), learn.distrib_ctx():
        if rank: return
        try: learn.fit(1)
        except RankError as e: return str(e)

@pytest.mark.replicas # in shards it is found where the model is put together
def test_a_rank_that_left_is_named(): assert on_ranks(leaves_early, join=False)[0].startswith('rank 1 failed:\nit left')

def outside_a_fit(rank):
    try:
        with digits().distrib_ctx():
            if rank: raise KeyError('between two fits')
            time.sleep(1000)
    except Exception as e: return type(e).__name__,'between two fits' in str(e)

def test_an_error_between_two_fits_interrupts_the_others():
    test_eq(on_ranks(outside_a_fit, join=False), [('RankError',True), ('KeyError',True)])

def two_contexts(rank):
    a,b = digits(),digits()
    with a.no_logging(), a.no_bar(), b.no_logging(), b.no_bar(), a.distrib_ctx():
        with b.distrib_ctx():
            try: b.fit(1, cbs=Callback(after_batch=lambda self: 1/(self.iter+rank-3)))
            except Exception as e: seen = type(e).__name__
        a.fit(1)
    return seen,len(a.recorder.losses)

def test_nested_contexts_share_the_line(): test_eq(on_ranks(two_contexts, join=False), [('RankError',9), ('ZeroDivisionError',9)])

source = 'def read(): raise OSError("a broken file")'

class Interrupted:
    "Loader of a module, while whose source is read for a traceback a signal comes"
    def get_source(self, name):
        signal.raise_signal(signal.SIGUSR1)
        return source

def fails_twice(rank, n):
    "The last rank fails, and a signal's handler raises while that is described, as torch's does for a data worker that has died"
    def died(*args):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        raise RuntimeError('a data worker is killed')
    signal.signal(signal.SIGUSR1, died)
    code = dict(__name__='unread', __loader__=Interrupted())
    exec(compile(source, 'unread.py', 'exec'), code)
    learn = digits()
    with learn.no_logging(), learn.no_bar():
        try:
            with learn.distrib_ctx(): learn.fit(1, cbs=Callback(after_batch=lambda self: code['read']() if rank==n-1 and self.iter==2 else None))
        except Exception as e: return type(e).__name__,str(e)

@pytest.mark.parametrize('n', [2,3])
@pytest.mark.by_default('3')
def test_an_error_in_an_error_is_told(n):
    *others,(mine,_) = on_ranks(partial(fails_twice, n=n), n, join=False)
    test_eq(mine, 'RuntimeError')
    for how,text in others: assert how=='RankError' and text.startswith(f'rank {n-1} failed:') and 'a data worker is killed' in text, text

def test_an_error_that_was_there_before_keeps_nothing_back():
    "A second fit may stand in the `except` clause of the first"
    def f(rank):
        with Job(this_world()).open() as job:
            if rank: return job.fail(ValueError('a broken file'))
            try: {}['mine']
            except KeyError:
                job.interrupt.enable()
                with expect_fail(RankError, 'a broken file'): time.sleep(8)
    on_ranks(f, join=False)

class SlowLock:
    "Takes two seconds to be taken"
    def __init__(self):
        lock = threading.Lock()
        self.acquire,self.release,self.locked = lock.acquire,lock.release,lock.locked
    def __enter__(self):
        self.acquire()
        time.sleep(2)
    def __exit__(self, *_): self.release()

def test_an_error_of_another_rank_leaves_no_condition_taken():
    "It comes while this rank enters one, and is raised inside"
    def f(rank):
        with Job(this_world()).open() as job:
            if rank: return job.fail(ValueError('a broken file'))
            lock = SlowLock()
            job.interrupt.enable()
            with expect_fail(RankError, 'a broken file'), threading.Condition(lock): time.sleep(20)
            assert not lock.locked()
    on_ranks(f, join=False)

def paused(rank):
    "Two fits, with nothing in between for longer than `patience`"
    learn = digits()
    with learn.no_logging(), learn.no_bar(), learn.distrib_ctx(patience=2):
        learn.fit(1, cbs=Checkpoint('ckpt'))
        job = current_job()
        await_that(lambda: time.monotonic()-job.progress.moved>2*job.patience)
        learn.fit(1, cbs=Checkpoint('ckpt'))
    return len(learn.recorder.values)

@pytest.mark.whole
@pytest.mark.parametrize('size', [pytest.param(2, marks=pytest.mark.whole),3])
def test_nobody_is_stuck_between_two_fits_with_checkpoints(size): test_eq(on_ranks(paused, size, join=False), [1]*size)

def begun_with(cls):
    "Names that the constructor of `cls` assigns"
    init = vars(cls).get('__init__')
    return {o.argval for o in dis.get_instructions(init) if o.opname=='STORE_ATTR'} if inspect.isfunction(init) else set()

def test_no_two_classes_of_one_object_begin_with_the_same_attribute():
    ours = {c for m in list(sys.modules.values()) if m.__name__.startswith('fastdist.') for c in vars(m).values() if inspect.isclass(c) and c.__module__.startswith('fastdist.')}
    test_eq([(c.__name__,b.__name__,k) for c in ours for b in c.__mro__[1:] if b in ours for k in begun_with(c) & begun_with(b)], [])
