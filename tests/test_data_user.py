"What people do to their data during a fit, on ranks as in one process with as many samples in a batch"
import random,pytest
from contextlib import nullcontext
from torch import distributed as dist
from torch.utils.data import IterableDataset,TensorDataset,WeightedRandomSampler,BatchSampler,SubsetRandomSampler
from torch.utils.data import DataLoader as TorchLoader
from fastai.basics import *
from fastai.data.load import SkipItemException
from fastai.callback.data import WeightedDL,PartialDL
from fastdist import *
from fastcore.test import test_eq,test_close

n,g = 75,12

def rows(n=n, seed=0):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=gen)
    return x,x.sum(1, keepdim=True)

class Rows:
    "A data set of the script"
    def __init__(self, n=n, seed=0): self.x,self.y = rows(n, seed)
    def __len__(self): return len(self.x)
    def __getitem__(self, i): return self.x[i],self.y[i]

class Seen(Callback):
    "Steps of each epoch, samples by their sums, `n_iter` and the schedule's end"
    order = 60
    def before_fit(self): self.learn.seen,self.learn.steps,self.learn.n_iters,self.learn.pct = [],[],[],[]
    def before_train(self):
        self.learn.seen.append([])
        self.learn.steps.append(0)
    def before_batch(self):
        if not self.training: return
        self.learn.seen[-1] += [round(o.sum().item(), 3) for o in self.xb[0]]
        self.learn.steps[-1] += 1
    def after_train(self):
        self.learn.n_iters.append(self.n_iter)
        self.learn.pct.append(round(self.pct_train, 5))

def learner(bs, mk=None, cbs=None, **kw):
    set_seed(3)
    train = mk(bs) if mk else DataLoader(Rows(), bs=bs, shuffle=True, **kw)
    dls = DataLoaders(train, DataLoader(Rows(20, 1), bs=bs), device='cpu')
    return Learner(dls, nn.Linear(3,1), loss_func=MSELossFlat(), opt_func=SGD, lr=.05, cbs=[Seen(),*L(cbs)])

def trained(size, ctx, epochs=3, **kw):
    learn = learner(g//size, **kw)
    with learn.distrib_ctx() if ctx else nullcontext(), learn.no_logging(), learn.no_bar(): learn.fit(epochs)
    w = torch.cat([o.detach().flatten() for o in learn.model.parameters()])
    return w,learn.seen,learn.steps,learn.n_iters,learn.pct,[o.item() for o in learn.recorder.losses],learn.recorder.values

def same_as_alone(size, **kw):
    "Weights, steps, samples, lengths, schedule, losses"
    alone = trained(1, False, **{k:v(1) if k=='cbs' else v for k,v in kw.items()})
    ranks = on_ranks(lambda rank: trained(size, True, **{k:v(size) if k=='cbs' else v for k,v in kw.items()}), size, join=False)
    for o in ranks:
        test_close(alone[0], o[0], 1e-5)
        test_eq(o[2:5], alone[2:5])
        test_close(o[5], alone[5], 1e-5)
        test_close(o[6], alone[6], 1e-5)
    for e,whole in enumerate(alone[1]): test_eq(sorted({*sum((o[1][e] for o in ranks), [])}), sorted({*whole}))
    return alone

class Change(Callback):
    "Does `f` to the training loader at `event` of epoch 1"
    def __init__(self, f, event='before_epoch'):
        self.f = f
        setattr(self, event, self.act)
    def act(self):
        if self.epoch==1: self.f(self.learn)

def at(f, event='before_epoch'): return lambda size: Change(partial(f, size), event)
def train(learn): return learn.dls.train

def bs(size, learn): train(learn).bs = 24//size
def data(size, learn): train(learn).dataset,train(learn).n = Rows(50, 5),50
def fewer(size, learn): train(learn).n = 40
def shuffle(size, learn): train(learn).shuffle = False
def drop(size, learn): train(learn).drop_last = True
def workers(size, learn): train(learn).fake_l.num_workers = 2
def batch_tfm(size, learn): train(learn).after_batch = lambda b: (b[0]*2,b[1])
def item_tfm(size, learn): train(learn).after_item = lambda o: (o[0]+1,o[1])
def in_place(size, learn): train(learn).dataset.x = rows(75, 9)[0]
def new_loader(size, learn): learn.dls.loaders[0] = DataLoader(Rows(31, 4), bs=18//size, shuffle=True)
def new_dls(size, learn): learn.dls = DataLoaders(DataLoader(Rows(31, 4), bs=18//size, shuffle=True), DataLoader(Rows(9, 1), bs=6//size))

changes = bs,data,fewer,shuffle,drop,workers,batch_tfm,item_tfm,in_place,new_loader,new_dls

@pytest.mark.parametrize('size', (2,3))
@pytest.mark.parametrize('f', changes)
def test_changed_between_epochs(f, size): same_as_alone(size, cbs=at(f))

@pytest.mark.parametrize('event', ('before_train','after_epoch','after_train','before_validate','after_batch'))
def test_changed_at_any_event(event): same_as_alone(2, cbs=at(bs, event))

def weights(size, learn): train(learn).wgts = np.arange(75)/np.arange(75).sum()
def part(size, learn): train(learn).partial_n = 30

@pytest.mark.parametrize('f,mk', [(weights, lambda bs: WeightedDL(Rows(), bs=bs, shuffle=True, num_workers=0)), (part, lambda bs: PartialDL(Rows(), bs=bs, partial_n=50, num_workers=0)),
    (bs, lambda bs: TfmdDL(Rows(), bs=bs, shuffle=True, drop_last=True))])
def test_loaders_of_other_kinds_changed(f, mk): same_as_alone(3, mk=mk, cbs=at(f))

class Curriculum(Callback):
    "More and larger images with each epoch, as fast.ai teaches"
    def __init__(self, size): self.size = size
    def before_epoch(self):
        k = 20*(self.epoch+1)
        self.learn.dls.train.dataset = TensorDataset(*[o[:k] for o in rows()])
        self.learn.dls.train.n,self.learn.dls.train.bs = k,(6 if self.epoch else 12)//self.size

def test_curriculum(): test_eq(same_as_alone(2, cbs=Curriculum)[2], [2,7,10])

class Growing(DataLoader):
    "Counts its own epochs, and gives more with each of them"
    epoch = 0
    def before_iter(self): self.epoch += 1
    def get_idxs(self): return super().get_idxs()[:self.epoch*20]
    def __len__(self): return -(-min((self.epoch+1)*20, 75)//self.bs)

def test_a_loader_with_a_state_of_its_own(): test_eq(same_as_alone(3, mk=lambda bs: Growing(Rows(), bs=bs, shuffle=True))[2], [2,4,5])

def twice(size, ctx):
    learn = learner(g//size, mk=lambda bs: Growing(Rows(), bs=bs))
    with learn.no_logging(), learn.no_bar():
        for _ in range(2):
            with learn.distrib_ctx() if ctx else nullcontext(): learn.fit(1)
    return learn.steps,learn.dls.train.epoch

def test_its_state_outlives_the_context(): test_eq(on_ranks(lambda rank: twice(2, True), join=False), [twice(1, False)]*2)

class Lines(IterableDataset):
    "A stream of the script; with its length, or without"
    def __init__(self, n=n, known=True, shuffle=False): self.rows,self.known,self.shuffle = list(zip(*rows(n))),known,shuffle
    def __iter__(self):
        order = random.sample(range(len(self.rows)), len(self.rows)) if self.shuffle else range(len(self.rows))
        return (self.rows[i] for i in order)
    def __len__(self):
        if not self.known: raise TypeError('a stream')
        return len(self.rows)

def sharded(worker):
    "As torch's documentation tells to share a stream out to data workers"
    info = torch.utils.data.get_worker_info()
    info.dataset.rows = info.dataset.rows[worker::info.num_workers]

class Anyway(Learner):
    "Does not ask a loader how long it is"
    def all_batches(self):
        self.n_iter = getattr(self.dl, 'n', None) and len(self.dl) or 10
        for o in enumerate(self.dl): self.one_batch(*o)

streams = dict(torch=lambda bs: TorchLoader(Lines(), batch_size=bs), dropped=lambda bs: TorchLoader(Lines(), batch_size=bs, drop_last=True),
    workers=lambda bs: TorchLoader(Lines(), batch_size=bs, num_workers=2, worker_init_fn=sharded, persistent_workers=True), fastai=lambda bs: DataLoader(Lines(), bs=bs, num_workers=1),
    shuffled=lambda bs: DataLoader(Lines(shuffle=True), bs=bs), torch_shuffled=lambda bs: TorchLoader(Lines(shuffle=True), batch_size=bs))

@pytest.mark.parametrize('name', streams)
@pytest.mark.parametrize('size', (2,3))
def test_streams(name, size): same_as_alone(size, mk=streams[name])

def test_streams_without_a_length():
    for mk in (lambda bs: TorchLoader(Lines(known=False), batch_size=bs), lambda bs: DataLoader(Lines(known=False), bs=bs), lambda bs: DataLoader((o for o in Lines()), bs=bs, num_workers=0)):
        def f(rank):
            with pytest.raises(TypeError): trained(2, rank is not None, mk=mk)
        f(None)
        on_ranks(f, join=False)

unsized = dict(torch=lambda bs: TorchLoader(Lines(known=False), batch_size=bs), workers=lambda bs: TorchLoader(Lines(50, False), batch_size=bs, num_workers=2, worker_init_fn=sharded),
    fastai=lambda bs: DataLoader(Lines(known=False, shuffle=True), bs=bs), short=lambda bs: DataLoader(Lines(), bs=bs, n=100), long=lambda bs: DataLoader(Lines(), bs=bs, n=40))

def by_batch(size, ctx, mk):
    learn = learner(g//size, mk=mk)
    learn.__class__ = Anyway
    learn.dls.loaders[1] = mk(g//size)
    with learn.distrib_ctx() if ctx else nullcontext(), learn.no_logging(), learn.no_bar(): learn.fit(2)
    return torch.cat([o.detach().flatten() for o in learn.model.parameters()]),learn.steps,learn.recorder.values

@pytest.mark.parametrize('name', unsized)
@pytest.mark.parametrize('size', (2,3))
def test_a_learner_that_asks_for_no_length(name, size):
    w,steps,values = by_batch(1, False, unsized[name])
    for o in on_ranks(lambda rank: by_batch(size, True, unsized[name]), size, join=False):
        test_close(o[0], w, 1e-5)
        test_eq(o[1], steps)
        test_close(o[2], values, 1e-5)

class OwnPart(Lines):
    "A stream that somebody has shared out by rank already"
    def __iter__(self): return iter(self.rows[dist.get_rank()::dist.get_world_size()])

def shared_out(rank):
    with pytest.raises(ValueError, match='different streams') as e: trained(2, True, mk=lambda bs: DataLoader(OwnPart(), bs=bs))

def test_a_stream_shared_out_by_rank_is_an_error(): on_ranks(shared_out, join=False, timeout=30)
