"What people do to their data during a fit, on ranks as in one process with as many samples in a batch"
import os,pickle,random,sys,warnings,pytest
from tempfile import TemporaryDirectory
from contextlib import nullcontext
from torch import distributed as dist
from torch.utils.data import IterableDataset,TensorDataset,WeightedRandomSampler,BatchSampler,SubsetRandomSampler
from torch.utils.data import DataLoader as TorchLoader
from fastai.basics import *
from fastai.data.load import SkipItemException
from fastai.callback.data import WeightedDL,PartialDL
from fastdist import *
from fastdist.launch.fork import forked_workers
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

def own(ds=Rows, cls=DataLoader, **kw): return lambda bs: cls(ds(), bs=bs, **kw)
def torchs(ds=Rows, **kw): return lambda bs: TorchLoader(ds(), batch_size=bs, **{k:v() if k in ('sampler','generator') else v for k,v in kw.items()})

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

@pytest.mark.parametrize('f,size', [(f, 2+i%2) for i,f in enumerate(changes)])
@pytest.mark.by_default('data', 'workers', 'new_dls')
def test_changed_between_epochs(f, size): same_as_alone(size, cbs=at(f))

@pytest.mark.whole
@pytest.mark.parametrize('event', ('before_train',*(pytest.param(o, marks=pytest.mark.whole) for o in ('after_epoch','after_train','before_validate')),'after_batch'))
def test_changed_at_any_event(event): same_as_alone(2, cbs=at(bs, event))

def weights(size, learn): train(learn).wgts = np.arange(75)/np.arange(75).sum()
def part(size, learn): train(learn).partial_n = 30

@pytest.mark.whole
@pytest.mark.parametrize('f,mk', [(weights, own(cls=WeightedDL, shuffle=True, num_workers=0)), (part, own(cls=PartialDL, partial_n=50, num_workers=0)),
    (bs, own(cls=TfmdDL, shuffle=True, drop_last=True))])
@pytest.mark.by_default('weights', 'part')
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

def test_a_loader_with_a_state_of_its_own(): test_eq(same_as_alone(3, mk=own(cls=Growing, shuffle=True))[2], [2,4,5])

def twice(size, ctx):
    learn = learner(g//size, mk=own(cls=Growing))
    with learn.no_logging(), learn.no_bar():
        for _ in range(2):
            with learn.distrib_ctx() if ctx else nullcontext(): learn.fit(1)
    return learn.steps,learn.dls.train.epoch

@pytest.mark.whole
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

mixed,secret = partial(Lines, shuffle=True),partial(Lines, known=False)
streams = dict(torch=torchs(Lines), dropped=torchs(Lines, drop_last=True), fastai=own(Lines, num_workers=1), shuffled=own(mixed), torch_shuffled=torchs(mixed),
    workers=torchs(Lines, num_workers=2, worker_init_fn=sharded, persistent_workers=True))

@pytest.mark.parametrize('name,size', [(k, 2+i%2) for i,k in enumerate(streams)])
@pytest.mark.by_default('torch-2', 'shuffled-3', 'workers-3')
def test_streams(name, size): same_as_alone(size, mk=streams[name])

@pytest.mark.whole
def test_streams_without_a_length():
    for mk in (torchs(secret), own(secret), own(lambda: (o for o in Lines()))):
        def f(rank):
            with pytest.raises(TypeError): trained(2, rank is not None, mk=mk)
        f(None)
        on_ranks(f, join=False)

unsized = dict(torch=torchs(secret), workers=torchs(partial(Lines, 50, False), num_workers=2, worker_init_fn=sharded),
    fastai=own(partial(Lines, known=False, shuffle=True)), short=own(Lines, n=100), long=own(Lines, n=40))

def by_batch(size, ctx, mk):
    learn = learner(g//size, mk=mk)
    learn.__class__ = Anyway
    learn.dls.loaders[1] = mk(g//size)
    with learn.distrib_ctx() if ctx else nullcontext(), learn.no_logging(), learn.no_bar(): learn.fit(2)
    return torch.cat([o.detach().flatten() for o in learn.model.parameters()]),learn.steps,learn.recorder.values

@pytest.mark.whole
@pytest.mark.parametrize('name,size', [(k, 2+i%2) for i,k in enumerate(unsized)])
@pytest.mark.by_default('torch-2', 'short-3')
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
    with pytest.raises(ValueError, match='different streams') as e: trained(2, True, mk=own(OwnPart))

def test_a_stream_shared_out_by_rank_is_an_error(): on_ranks(shared_out, join=False, timeout=100)

class OwnCollate(DataLoader):
    def create_batch(self, b): return tuple(torch.stack(o)*2 for o in zip(*b))

class Counting(torch.utils.data.Sampler):
    "Another order each epoch, by a state of its own"
    epoch = 0
    def __iter__(self):
        self.epoch += 1
        return iter(torch.randperm(n, generator=torch.Generator().manual_seed(self.epoch)).tolist())
    def __len__(self): return n

def gen(): return torch.Generator().manual_seed(1)
def weighted(): return WeightedRandomSampler(torch.arange(n).float()+1, 50)

kinds = dict(default=own(cls=TfmdDL, shuffle=True, drop_last=True), persistent=own(shuffle=True, num_workers=1, persistent_workers=True),
    pinned=own(shuffle=True, num_workers=1, pin_memory=True), own_batch=own(cls=OwnCollate, shuffle=True),
    lambdas=own(shuffle=True, num_workers=1, after_item=lambda o: (o[0]+1,o[1]), create_batch=lambda b: [torch.stack(o) for o in zip(*b)]),
    torch_persistent=torchs(shuffle=True, num_workers=2, persistent_workers=True), torch_weighted=torchs(sampler=weighted),
    generator=torchs(shuffle=True, generator=gen), subset=torchs(sampler=lambda: SubsetRandomSampler(range(0, n, 2))), counting=torchs(sampler=Counting),
    batch_sampler=lambda bs: TorchLoader(Rows(), batch_sampler=BatchSampler(SubsetRandomSampler(range(n)), bs, True)))

@pytest.mark.parametrize('name', kinds)
@forked_workers() # in one process too: from Python 3.14 on its data workers would not know what only this process has
@pytest.mark.by_default('default', 'torch_weighted', 'batch_sampler')
def test_kinds_of_loaders(name): same_as_alone(3 if name in ('default','torch_weighted','batch_sampler') else 2, mk=kinds[name])

def larger(size, learn): train(learn).batch_sampler.batch_size = 24//size
def weights_of(size, learn): train(learn).sampler.weights = torch.ones(n)
def collate(size, learn): train(learn).collate_fn = lambda b: tuple(torch.stack(o)*3 for o in zip(*b))

@pytest.mark.whole
@pytest.mark.parametrize('f', (larger,weights_of,collate))
@pytest.mark.by_default('larger', 'collate')
def test_torch_loaders_changed(f): same_as_alone(2, cbs=at(f), mk=torchs(sampler=weighted))

class Broken(Rows):
    "Some files cannot be read"
    def __getitem__(self, i):
        if i%10==3: raise SkipItemException()
        return super().__getitem__(i)

class SkipsLater(DataLoader):
    "Skips by a transform of its items"
    def after_item(self, o):
        if o[0].sum()<0: raise SkipItemException()
        return o

def skipping(rank):
    for mk in (own(Broken),own(cls=SkipsLater)):
        with pytest.raises(Exception, match='skipped'): trained(2, True, mk=mk)

def test_skipped_samples_are_an_error(): on_ranks(skipping, join=False, timeout=100)
def test_skipped_samples_of_a_stream_are_replaced(): same_as_alone(2, mk=own(partial(Lines, known=False), cls=SkipsLater, n=66))

class OwnIter(TfmdDL):
    def __iter__(self): return ((a*2,b) for a,b in super().__iter__())
class LeavesOut(TorchLoader):
    "Makes other batches of those of torch's"
    def __iter__(self): return ((a[:-1]*2,b[:-1]) for a,b in super().__iter__() if len(a)>4)
class OwnSample(DataLoader):
    def sample(self): return iter([*range(40),*range(10)])
class OwnChunks(DataLoader):
    def chunkify(self, b): return chunked(sorted(b, key=lambda o: o[0].sum().item()), self.bs, self.drop_last)
class OwnBatches(DataLoader):
    def create_batches(self, samps): return map(self.do_batch, chunked(map(self.do_item, sorted(samps)), self.bs))
class ByFirst(DataLoader):
    "Makes a batch by its first index, as loaders over arrays do"
    def do_item(self, i): return i
    def create_batch(self, b): return self.dataset.x[b[0]:b[0]+self.bs],self.dataset.y[b[0]:b[0]+self.bs]

ways = dict(fastai=own(cls=OwnIter, shuffle=True), torch=lambda bs: LeavesOut(Rows(), bs, shuffle=True), sample=own(cls=OwnSample), chunks=own(cls=OwnChunks),
    batches=own(cls=OwnBatches), by_first=own(cls=ByFirst))

@pytest.mark.parametrize('name,size', [(k, 2+i%2) for i,k in enumerate(ways)])
@pytest.mark.by_default('torch-3', 'sample-2', 'chunks-3')
def test_ways_of_the_user_through_a_loader(name, size): same_as_alone(size, mk=ways[name])

class Around:
    "No loader, and iterates over one"
    def __init__(self, dl): self.dl,self.dataset = dl,dl.dataset
    def __len__(self): return len(self.dl)
    def __iter__(self): return iter(self.dl)

def around(rank):
    with pytest.raises(Exception, match='must be a DataLoader of torch or fastai, got Around'): trained(2, True, mk=lambda bs: Around(own()(bs)))
    with pytest.raises(Exception, match='batch size that ranks can set'):
        trained(2, True, mk=lambda bs: LeavesOut(Rows(), batch_sampler=[[0,1,2],[3,4,5]]))

def test_loaders_that_ranks_cannot_share_are_named(): on_ranks(around, join=False, timeout=100)

def graph_preds(size, ctx):
    "Predictions of all rows of items that have several, in batches of all their rows"
    items = [torch.arange(float(i%4+1))[:,None]+10*i for i in range(17)]
    def collate(b): return torch.cat(b),torch.cat(b)
    dls = DataLoaders(*(DataLoader(items, bs=6//size, create_batch=collate) for _ in range(2)), device='cpu')
    set_seed(1)
    learn = Learner(dls, nn.Linear(1,1), loss_func=MSELossFlat())
    with learn.distrib_ctx() if ctx else nullcontext(), learn.no_logging(), learn.no_bar(): return learn.get_preds(reorder=False)[0]

@pytest.mark.parametrize('size', (2,3))
def test_predictions_of_items_with_several_rows_are_in_order(size):
    for o in on_ranks(lambda rank: graph_preds(size, True), size, join=False): test_close(o, graph_preds(1, False), 1e-5)

def pids(size):
    "The processes that fetched the batches of each epoch"
    learn,seen = learner(g//size, mk=torchs(Where, num_workers=1, persistent_workers=True)),[]
    class Note(Callback):
        def before_batch(self):
            if self.training: seen.append((self.epoch,int(self.yb[0][0,1])))
    learn.loss_func = lambda p,y: ((p-y[:,:1])**2).mean()
    learn.add_cb(Note())
    learn.dls.loaders[1] = []
    with learn.distrib_ctx(), learn.no_logging(), learn.no_bar(): learn.fit(3)
    return len({p for _,p in seen})

class Where(Rows):
    def __getitem__(self, i): return self.x[i],torch.tensor([self.y[i].item(),os.getpid()])

@pytest.mark.whole
def test_workers_persist_where_nothing_changes(): test_eq(on_ranks(lambda rank: pids(2), join=False), [1,1])

class Packed(Callback):
    "What a data worker gets that is a new Python"
    def before_batch(self): self.learn.packed = pickle.dumps(self.dl)

def packed(rank):
    learn = learner(6, own(cls=TfmdDL, num_workers=0), cbs=Packed())
    with learn.distrib_ctx(split_batches=True), learn.no_logging(), learn.no_bar(): learn.fit(1)
    return len(learn.packed)

def test_a_share_goes_to_workers_without_the_learner(): assert max(on_ranks(packed, join=False))<10000

# Folders of a node

class Texts:
    "Numbers in the files of a folder"
    def __init__(self, folder): self.files = sorted(Path(folder).rglob('*.txt'))
    def __len__(self): return len(self.files)
    def __getitem__(self, i): return tensor([float(self.files[i].read_text())])*torch.ones(3),tensor([1.])

def in_folder(rank, names=lambda rank, i: f'{i:02}.txt', text=lambda rank, i: f'{i/10}', workers=0):
    "Train on files that lie in a temporary folder of this rank alone"
    with TemporaryDirectory(prefix=f'node{rank}') as d:
        for i in range(30):
            file = Path(d)/names(rank, i)
            file.parent.mkdir(exist_ok=True)
            file.write_text(text(rank, i))
        learn = learner(4, own(partial(Texts, d), shuffle=True, num_workers=workers))
        with learn.distrib_ctx(), learn.no_logging(), learn.no_bar(): learn.fit(2)
        return [o.tolist() for o in learn.model.parameters()]

@pytest.mark.parametrize('names', [lambda rank, i: f'{i:02}.txt', lambda rank, i: f'{"ab"[i%2]}/{i:02}.txt'], ids=['flat','classes'])
def test_data_in_a_folder_of_the_node(names):
    a,b,c = on_ranks(partial(in_folder, names=names), 3, join=False, timeout=100)
    test_eq((b,c), (a,a))

@pytest.mark.parametrize('kw', [dict(names=lambda rank, i: f'{i+rank:02}.txt'), dict(text=lambda rank, i: f'{i/10:.{3+rank}f}')], ids=['names','sizes'])
def test_other_files_in_a_folder_of_the_node_are_named(kw):
    def f(rank):
        try: in_folder(rank, **kw)
        except ValueError as e: return 'training items' in str(e)
    test_eq(on_ranks(f, 2, join=False, timeout=100), [True]*2)

@pytest.mark.parametrize('workers', [0,2])
@pytest.mark.by_default('0')
def test_other_values_in_files_of_the_same_names_and_sizes_are_named(workers):
    "Nothing is read for the comparison of names and sizes; values are compared at the end of the first epoch"
    def f(rank):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter('always')
            in_folder(rank, text=lambda rank, i: f'{rank}.{i:03}', workers=workers)
            return sum('Ranks differ in input 0 of training sample' in str(o.message) for o in said)
    test_eq(on_ranks(f, 3, join=False, timeout=100), [1,0,0])

before_import = '''
from fastai.basics import *
from copy import copy
dl = TfmdDL(list(range(5)), bs=2, num_workers=0)
copy(dl)
from fastdist import *
print([list(map(len, copy(DistributedDL(dl, i, 2)))) for i in range(2)])
'''
@pytest.mark.whole
def test_a_loader_that_was_copied_before_fastdist_was_imported(warm):
    "`copy` notes on the class which attributes it has"
    out,_ = warm(sys.executable, '-c', before_import)
    test_eq(out.splitlines()[-1:], ['[[2, 1], [2, 1]]'])
