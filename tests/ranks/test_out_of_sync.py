"Ranks that run different code, wait in different places or cancel on their own hear of it at once, wherever they stand"
import os,re,subprocess,time,pytest
from torch import distributed as dist
from fastai.basics import *
from fastai.callback.all import *
from fastdist import *
from fastdist.comm.collectives import exchange,gather_objs
from fastdist.comm.job import Job
from fastcore.test import test_eq,test_close
from learners import digits

def quiet(learn): return ContextManagers([learn.no_logging(), learn.no_bar()])

def heard(f, *args, **kw):
    "How `f` ended on this rank, and what was said"
    try: f(*args, **kw)
    except Exception as e: return type(e).__name__,str(e)
    return 'went on',''

def in_ctx(f, rank, **kw):
    learn = digits(n=180, opt_func=SGD, **kw)
    with quiet(learn), learn.distrib_ctx(): return heard(f, learn, rank)

def on(n, f, **kw): return on_ranks(lambda rank: in_ctx(f, rank, **kw), n, join=False)

def predicts(learn, rank):
    if rank==0: learn.predict(torch.zeros(64))
    learn.fit(1)

class Nested(Callback):
    def __init__(self, rank): self.on = rank==0
    def after_batch(self):
        if self.on and self.training and self.iter==2: self.learn.get_preds()

def predicts_in_a_fit(learn, rank): learn.fit(1, cbs=Nested(rank))

def fits_twice(learn, rank):
    learn.fit(1)
    if rank: learn.fit(1)
    else: learn.validate()

@pytest.mark.parametrize('size', [2,3])
@pytest.mark.parametrize('f,said', [(predicts,"Ranks have different tasks: ['an evaluation', 'a fit'"), (predicts_in_a_fit,'rank 0 in'), (fits_twice,"different tasks: ['an evaluation', 'a fit'")])
def test_ranks_that_stand_in_different_places(size, f, said):
    for how,text in on(size, f): assert how in ('ValueError','RankError') and said in text and 'HINT' in text and 'test_out_of_sync.py' in text

def gather_late(learn, rank):
    if rank: time.sleep(3)
    learn.validate()

def test_a_rank_that_is_late_is_waited_for(): test_eq([o[0] for o in on(2, gather_late)], ['went on']*2)

def fits(learn, n):
    with quiet(learn), learn.distrib_ctx(): learn.fit(n)

def other(what):
    def f(rank):
        learn = digits(n=180-10*(rank and what=='number of training samples'), bs=16-8*rank if what=='training batch size' else 16, opt_func=SGD if rank or what!='optimizer function' else Adam)
        if rank and what=='loss functions': learn.loss_func = MSELossFlat()
        if rank and what=='metrics': learn.metrics = L(AvgMetric(error_rate))
        if rank and what=='parameters': learn.model = nn.Sequential(nn.Linear(64,10))
        return heard(fits, learn, 1+(rank and what=='numbers of epochs')) # in shards the context says it
    return f

@pytest.mark.parametrize('what', ['training batch size','numbers of epochs','loss functions','metrics','number of training samples','parameters','optimizer function'])
@pytest.mark.by_default('batch', 'epochs', 'parameters', 'optimizer')
def test_what_ranks_must_have_alike(what):
    for how,text in on_ranks(other(what), join=False): assert how=='ValueError' and what in text and text.startswith('Ranks have different')

# Cancels that no code shows

class Enough(CancelFitException): "Cancels by a class of the script"

class Holds(Callback):
    "Raises what it was given"
    def __init__(self, what, event, ranks, at=2): self.what,self.event,self.ranks,self.at = what,event,ranks,at
    def __call__(self, event_name):
        if event_name==self.event and self.training and (self.epoch,self.iter)==(0,self.at) and this_world().rank in self.ranks: raise self.what

def held(rank, what, event, ranks, bs):
    set_seed(1)
    learn = digits(n=180, bs=bs, opt_func=SGD)
    with quiet(learn), learn.distrib_ctx(): res = heard(learn.fit, 2, 0.05, cbs=Holds(what('on purpose'), event, ranks))
    return *res,len(learn.recorder.losses),[o.tolist() for o in learn.model.parameters()]

spots = [(CancelBatchException,'before_batch'), (CancelBatchException,'after_loss'), (CancelEpochException,'after_batch'), (CancelFitException,'before_batch')]

@pytest.mark.whole
@pytest.mark.parametrize('size', [2,3])
@pytest.mark.parametrize('what,event', spots)
@pytest.mark.by_default('after_loss', 'after_batch')
def test_a_cancel_that_all_ranks_raise_is_as_in_one_process(size, what, event):
    alone = held(0, what, event, [0], 8*size)
    for res in on_ranks(lambda rank: held(rank, what, event, range(size), 8), size, join=False):
        test_eq(res[:3], alone[:3])
        for a,b in zip(res[3], alone[3]): test_close(torch.tensor(a), torch.tensor(b), 1e-5)

@pytest.mark.parametrize('size', [2,3])
@pytest.mark.parametrize('what,event', [(CancelBatchException,'after_loss'), (CancelEpochException,'after_pred'), (Enough,'before_backward'), (CancelTrainException,'after_loss')])
def test_a_cancel_of_one_rank_before_the_exchange_is_that_of_all(size, what, event):
    "It travels with the gradients of the batch, whose step nobody makes"
    alone = held(0, what, event, [0], 8*size)
    for res in on_ranks(lambda rank: held(rank, what, event, [size-1], 8), size, join=False):
        test_eq(res[:3], alone[:3])
        for a,b in zip(res[3], alone[3]): test_close(torch.tensor(a), torch.tensor(b), 1e-5)

@pytest.mark.parametrize('size', [2,3])
@pytest.mark.parametrize('what,event', [*[o for o in spots if o[1]!='after_loss'], (CancelBackwardException,'before_backward')])
@pytest.mark.by_default('CancelBatch')
def test_a_hidden_cancel_of_one_rank_is_named(size, what, event):
    for how,text,*_ in on_ranks(lambda rank: held(rank, what, event, [size-1], 8), size, join=False):
        assert how=='RankError' and f'rank {size-1} failed' in text and f'{what.__name__} raised in Holds.{event}' in text

class InModel(nn.Module):
    "Cancels in the forward pass"
    def __init__(self, model, ranks):
        super().__init__()
        self.model,self.ranks,self.n = model,ranks,0
    def forward(self, x):
        self.n += self.training
        if self.training and self.n==3 and this_world().rank in self.ranks: raise CancelBatchException()
        return self.model(x)

def cancels_in_model(rank, ranks):
    learn = digits(n=180, opt_func=SGD)
    learn.model = InModel(learn.model, ranks)
    with quiet(learn), learn.distrib_ctx(): return heard(learn.fit, 1)

def test_a_cancel_in_the_forward_pass():
    test_eq([o[0] for o in on_ranks(lambda rank: cancels_in_model(rank, [0,1]), join=False)], ['went on']*2)
    for how,text in on_ranks(lambda rank: cancels_in_model(rank, [1]), join=False):
        assert how=='RankError' and 'CancelBatchException raised in' in text and 'forward' in text

class InValidation(Callback):
    "Cancels in a validation whose other ranks exchange nothing for long"
    def __init__(self, what, ranks): self.what,self.ranks = what,ranks
    def after_pred(self):
        if not self.training:
            time.sleep(.3)
            if self.iter==1 and this_world().rank in self.ranks: self.fail()
    def fail(self): raise self.what

def test_a_cancel_in_a_validation():
    f = lambda ranks: lambda learn, rank: learn.validate(cbs=InValidation(CancelValidException(), ranks))
    test_eq([o[0] for o in on(2, f([0,1]), bs=1)], ['went on']*2)
    for how,text in on(2, f([1]), bs=1): assert how=='RankError' and 'rank 1 failed' in text and 'InValidation.after_pred' in text

# Waiting for rank 0

class Full(Callback):
    "A logger of rank 0 that finds the disk full"
    rank0_only = True
    def after_epoch(self): raise OSError(28, 'No space left on device')

class Saves(Callback):
    order = Full.order-1
    def __init__(self, file): self.file = file
    def after_epoch(self): self.learn.save(self.file)

def test_rank_0_fails_while_the_others_wait_for_its_file(tmp_path):
    def f(learn, rank):
        learn.path = tmp_path
        learn.fit(1, cbs=[Full()] + ([Saves('x')] if rank else []))
    (a,*_),*others = on(3, f)
    test_eq(a, 'OSError')
    for how,text in others: assert how=='RankError' and 'No space left' in text

def test_rank_0_does_not_come():
    def f(learn, rank):
        if rank: rank0_first(str)
        else: learn.fit(1)
    (_,said),(how,text) = on(2, f)
    assert 'rank 1' in said and how=='RankError' and 'rank0_first' in text and 'a fit' not in text and 'HINT' in text

def names(rank, path):
    learn = digits(n=90)
    learn.path = path
    with quiet(learn), learn.distrib_ctx():
        res = learn.save(f'model_{rank}').name
        if rank==0: learn.save('mine')
        learn.save('all')
        learn.fit(1, cbs=SaveModelCallback(fname=f'best_{rank}'))
        return res,(path/'models/all.pth').exists()

@pytest.mark.filterwarnings('ignore')
@pytest.mark.replicas # one rank alone cannot save shards
@pytest.mark.parametrize('size', [2,3])
def test_names_that_differ_by_rank(size, tmp_path):
    test_eq(on_ranks(lambda rank: names(rank, tmp_path), size, join=False), [('model_0.pth',True)]*size)
    test_eq(sorted(o.name for o in (tmp_path/'models').ls()), ['all.pth','best_0.pth','mine.pth','model_0.pth'])

# Entering

def test_a_rank_that_never_enters_is_named():
    def f(rank):
        if rank==2: return
        return heard(Job(this_world()).open, 1)
    *res,_ = on_ranks(f, 3, join=False)
    for how,text in res: assert how in ('TimeoutError','RankError') and re.search('HINT: every rank has to come there|left while this rank, 1, waited', text), text # where rank 1 came after a second
    assert any('for rank 2 to come there' in o[1] for o in res)

def unseeded(rank):
    "Each rank holds out other samples"
    random.seed(rank)
    torch.manual_seed(rank)
    xs = torch.randn(40, 4)
    dsets = Datasets(list(range(40)), [lambda i: xs[i], lambda i: xs[i].sum()], splits=RandomSplitter()(range(40)))
    learn = Learner(dsets.dataloaders(bs=4, num_workers=0), nn.Linear(4,1), loss_func=MSELossFlat())
    with quiet(learn), learn.distrib_ctx(): return heard(learn.fit, 1)

def test_an_unseeded_split():
    for how,text in on_ranks(unseeded, 3, join=False): assert how=='ValueError' and 'training items' in text and 'Seed' in text

class AllEvents(Callback):
    "Takes all events in one method, and its time"
    def __call__(self, event_name):
        if event_name=='after_epoch': time.sleep(1.5)

class TrainsLess(Callback):
    def before_train(self):
        if self.epoch==1: raise CancelTrainException()

def as_ever(learn, rank):
    learn.add_cb(AllEvents())
    learn.fit(2, cbs=TrainsLess())
    learn.validate()
    learn('after_thing')

def test_what_plain_fastai_takes(): test_eq([o[0] for o in on(2, as_ever)], ['went on']*2)

def barriers(learn, rank):
    "Two ranks wait for the third, which is busy, in a barrier of theirs"
    for _ in range(2):
        if rank==1: time.sleep(5.5)
        for _ in range(2): torch.distributed.barrier()

@pytest.mark.whole
def test_barriers_of_the_user(): test_eq([o[0] for o in on(3, barriers)], ['went on']*3)

def stopped(learn, rank):
    "All ranks are stopped for six seconds, as when a laptop's lid is closed, while rank 0 waits for rank 1 in the next exchange"
    pids = ' '.join(map(str, gather_objs(os.getpid())))
    with exchange('the first'):
        if rank:
            subprocess.Popen(['sh', '-c', f'sleep .5; kill -STOP {pids}; sleep 6; kill -CONT {pids}'])
            for _ in range(25): time.sleep(.1)
    with exchange('the second'): pass

def test_ranks_that_were_stopped_have_not_waited(): test_eq([o[:2] for o in on(2, stopped)], [('went on','')]*2)

class OwnGroup(Callback):
    "Counts in a group of its own; the last rank fails in the first fit, while the others wait for it there"
    def before_fit(self): self.group,self.first = dist.new_group(),not hasattr(self, 'group')
    def after_batch(self):
        w = this_world()
        if self.first and self.iter==2 and w.rank==w.size-1: raise KeyError('lost')
        dist.all_reduce(torch.ones(1), group=self.group)

def fits_again(learn, rank):
    cb = OwnGroup()
    first = heard(learn.fit, 1, cbs=cb)
    learn.fit(1, cbs=cb)
    raise ValueError(first)

@pytest.mark.parametrize('size', [2,3])
def test_a_rank_that_waits_in_a_group_of_the_users_is_let_out(size):
    *others,last = on(size, fits_again)
    for how,text in others: assert how=='ValueError' and text.startswith("('RankError', ") and 'KeyError' in text and text.endswith(')'), text
    assert last[0]=='ValueError' and last[1].startswith("('KeyError', "), last

# Plain numbers that differ by rank

def rate(rank): return dict(model=nn.Sequential(nn.Linear(4,1), nn.Dropout(.1+.1*rank)))
def activation(rank): return dict(model=nn.Sequential(nn.Linear(4,1), [nn.ReLU,nn.GELU,nn.SiLU][rank]()))
def slope(rank): return dict(model=nn.Sequential(nn.Linear(4,1), nn.LeakyReLU(.01*(rank+1))))
def smoothing(rank): return dict(loss_func=partial(smoothed, eps=.1*rank))
def around(rank):
    eps = .1*rank
    return dict(loss_func=lambda p,y: smoothed(p, y, eps))
def smoothed(p, y, eps): return (p-y*(1-eps)).square().mean()

class Shift(ItemTransform):
    def __init__(self, by): self.by = by
    def encodes(self, o): return o[0]+self.by*torch.randn(4),o[1]
class Gathers(nn.Module):
    "A loss that was told its rank and device"
    def __init__(self, rank, device):
        super().__init__()
        self.rank,self.device = rank,device
    def forward(self, p, y): return F.mse_loss(p, y)
def told(rank): return dict(loss_func=Gathers(rank, f'cuda:{rank}'))

def fit_with(rank, mk, shift=0.):
    set_seed(1)
    dls = DataLoaders.from_dsets(*[[(torch.ones(4),torch.ones(1))]*12]*2, bs=2, num_workers=0, after_item=Shift(shift*rank))
    return heard(fits, Learner(dls, **dict(model=nn.Linear(4,1), loss_func=MSELossFlat())|mk(rank)), 1)

@pytest.mark.parametrize('size', (2,3))
@pytest.mark.parametrize('mk,said', [(rate,'p of module 1 of the model (Dropout)'), (activation,'class of module 1 of the model'), (slope,'negative_slope of module 1'),
    (smoothing,'eps of the loss function'), (around,'eps of the loss function')])
def test_a_plain_number_that_differs_is_named(mk, said, size):
    for how,text in on_ranks(lambda rank: fit_with(rank, mk), size, join=False): assert how=='ValueError' and said in text and 'study' in text and 'sorted(' not in text, text

def test_a_number_of_a_transform_is_named():
    for how,text in on_ranks(lambda rank: fit_with(rank, lambda r: {}, .1), 2, join=False): assert how=='ValueError' and 'by of training transform' in text, text

def test_a_rank_that_a_loss_was_told_is_no_difference(): test_eq([o[0] for o in on_ranks(lambda rank: fit_with(rank, told), 3, join=False)], ['went on']*3)
