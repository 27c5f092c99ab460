"In a fit on ranks `learn.dls` shows shares: lengths are those of one process, settings and loaders that a callback changes stay, and the user's loaders are back after it"
import warnings,pytest
from contextlib import nullcontext,suppress
from torch.utils.data import DataLoader as TorchLoader
from fastai.basics import *
from fastai.callback.all import *
from fastdist import *
from fastcore.test import test_eq,test_close,test_is

def rows(n=39):
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(2))
    return list(zip(x, x.sum(1, keepdim=True)))

def fastais(bs): return DataLoaders.from_dsets(rows()[:31], rows()[31:], bs=bs, drop_last=False, num_workers=0, device='cpu')
def torchs(bs): return DataLoaders(TorchLoader(rows()[:31], bs, shuffle=True), TorchLoader(rows()[31:], bs))

def fitted(bs, ctx, cb, mk=fastais, n_epoch=3, **kw):
    "The Learner after a fit with the callback that `cb` makes"
    set_seed(1)
    dls = mk(bs)
    learn = Learner(dls, nn.Linear(3,1), loss_func=MSELossFlat(), opt_func=partial(OptimWrapper, opt=torch.optim.SGD), cbs=cb())
    mine = list(dls.loaders)
    with learn.distrib_ctx(**kw) if ctx else nullcontext(), learn.no_logging(), learn.no_bar(): learn.fit(n_epoch, .05)
    return learn,mine

class Cycle(Callback):
    "A schedule of torch's over all steps, an average whose horizon is an epoch, and a loader that is kept"
    def before_fit(self):
        self.kept,self.ema,self.lens = self.dls.train,0.,[len(self.dls.train),len(self.dls.train_ds)]
        self.s = torch.optim.lr_scheduler.OneCycleLR(self.opt.opt, max_lr=.2, total_steps=self.n_epoch*len(self.dls.train))
    def before_train(self):
        assert self.dls.train is self.kept
        self.lens += [len(self.dl), len(self.learn.dls.train), self.dls.train is self.dl]
    def after_step(self):
        self.ema += (self.loss.item()-self.ema)/len(self.dls.train)
        if self.s.last_epoch<self.s.total_steps-1: self.s.step()
    def after_fit(self): self.lens.append(len(self.dls.train))

@pytest.mark.parametrize('size', [2,3])
@pytest.mark.parametrize('mk', [fastais,torchs])
def test_a_schedule_over_all_steps(size, mk):
    def f(rank, n=1):
        cb = Cycle()
        learn,mine = fitted(12//n, rank is not None, lambda: cb, mk)
        test_eq([type(o) for o in learn.dls.loaders], [type(o) for o in mine])
        for a,b in zip(learn.dls.loaders, mine): test_is(a, b)
        return learn.model.weight.detach(),cb.lens,cb.ema,cb.s.get_last_lr()
    one = f(None)
    for o in on_ranks(lambda rank: f(rank, size), size, join=False):
        test_close(o[0], one[0], 1e-5)
        test_eq(o[1], one[1])
        test_close(o[2], one[2], 1e-5)
        test_eq(o[3], one[3])

class Late(Callback):
    "Replaces the loader in `before_epoch`; the callback behind it reads how long it is"
    def before_epoch(self):
        if self.epoch==1: self.learn.dls.train = self.dls.train.new(dataset=rows()[:24], drop_last=False)
        if self.epoch==2: self.learn.dls = DataLoaders(*self.dls.loaders)

class Reads(Callback):
    order = 5
    def before_fit(self): self.lens,self.learn.dls.note = [],'kept'
    def before_epoch(self): self.lens.append(len(self.dls.train))

def test_replaced_loaders():
    def f(rank, n=1):
        learn,mine = fitted(12//n, rank is not None, lambda: [Late(),Reads()])
        assert not any(isinstance(o, DistributedDL) for o in learn.dls.loaders), learn.dls.loaders
        return learn.model.weight.detach(),learn.reads.lens
    one = f(None)
    test_eq(one[1], [3,2,2])
    for o in on_ranks(lambda rank: f(rank, 2), join=False):
        test_close(o[0], one[0], 1e-5)
        test_eq(o[1], one[1])

class Ends(Callback):
    def __init__(self, how): self.how = how
    def after_batch(self):
        if self.how=='error': raise ValueError('on all ranks')
        if self.how=='cancel': raise CancelFitException()

@pytest.mark.parametrize('how', ['error','cancel'])
def test_loaders_are_back_however_a_fit_ends(how):
    def f(rank):
        dls = fastais(4)
        learn,mine = Learner(dls, nn.Linear(3,1), loss_func=MSELossFlat(), cbs=Ends(how)),list(dls.loaders)
        with learn.no_logging(), learn.no_bar(), suppress(Exception), learn.distrib_ctx(): learn.fit(1)
        for a,b in zip(learn.dls.loaders, mine): test_is(a, b)
    on_ranks(f, join=False, timeout=60)

class Looks(Callback):
    "What callbacks do with loaders in a fit; an evaluation calls these events too"
    busy = False
    def before_epoch(self):
        if self.busy: return
        self.busy = True
        self.first = len(self.learn.get_preds(dl=self.dls.train)[0])
        self.busy = False
    def after_batch(self):
        if self.training and self.iter==0: self.dls.one_batch(),self.dls.valid.one_batch()
    def after_epoch(self):
        if self.busy: return
        self.busy = True
        new = self.dls.test_dl(rows(5))
        self.seen = [len(self.learn.get_preds(dl=new)[0]), len(self.learn.get_preds(dl=self.dls.valid)[0]), list(self.learn.validate(dl=self.dls.valid)),
            self.dls.n_inp, type(new) is TfmdDL]
        self.learn.save('m')
        self.busy = False

@pytest.mark.parametrize('size', [2,3])
def test_what_callbacks_do_with_loaders(size):
    def f(rank, n=1):
        learn,_ = fitted(12//n, rank is not None, Looks, n_epoch=1)
        return learn.looks.first,learn.looks.seen,learn.model.weight.detach()
    one = f(None)
    for first,seen,w in on_ranks(lambda rank: f(rank, size), size, join=False):
        test_eq((first,seen[:2],seen[3:]), (one[0],one[1][:2],one[1][3:]))
        test_close(seen[2], one[1][2], 1e-5)
        test_close(w, one[2], 1e-5)

class ByHand(Callback):
    def after_epoch(self): self.n = sum(len(x) for x,_ in self.dls.valid)

class Alone(ByHand): rank0_only = True

def test_a_pass_by_hand():
    "Goes over this rank's share and says so once; for rank 0 alone over all"
    def f(rank, cb):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter('always')
            learn,_ = fitted(3, True, cb)
        return getattr(learn._grab_cbs(ByHand)[0], 'n', None),sum('goes over a loader of learn.dls' in str(o.message) for o in said)
    test_eq(on_ranks(lambda rank: f(rank, ByHand), join=False, timeout=60), [(4,1),(4,0)])
    test_eq(on_ranks(lambda rank: f(rank, Alone), join=False, timeout=60), [(8,0),(None,0)])

def test_a_batch_that_is_split():
    "`bs` is that of the script, of which a rank has a part; it can be set as it is read"
    class Twice(Callback):
        def before_fit(self): self.seen = [self.dls.bs]
        def before_epoch(self): self.dls.train.bs *= 2
        def before_batch(self): self.seen.append(len(self.xb[0]))
    def f(rank):
        learn,mine = fitted(6, True, Twice, n_epoch=1, split_batches=True)
        return learn.twice.seen[:2],mine[0].bs
    test_eq(on_ranks(f, join=False), [([6,6],12)]*2)
