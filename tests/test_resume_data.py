"A pass goes on at a later batch, and in one process a share is the loader itself: batches and random numbers, bit for bit"
import itertools,random,warnings,pytest
from torch.multiprocessing import Value
from torch.utils.data import BatchSampler,DistributedSampler,IterableDataset,RandomSampler,Sampler,SubsetRandomSampler,WeightedRandomSampler
from torch.utils.data import DataLoader as TorchLoader
from fastai.vision.all import *
from fastai.tabular.all import *
from fastai.text.data import LMDataLoader,SortedDL
from fastai.callback.data import PartialDL,WeightedDL
from fastdist import *
from fastdist.comm.rng import _get_global,_set_global
from fastdist.data.loader import EvalDL,StepDL
from fastdist.data.order import order_state,set_order_state
from fastcore.test import test_eq

N = 23

def noise(): return random.random(),np.random.rand(),torch.rand(1).item()

class Noisy:
    "Samples that know their number, are augmented, and count how often they are read"
    def __init__(self, n=N, noisy=True): self.n,self.noisy,self.read = n,noisy,Value('i')
    def __len__(self): return self.n
    def __getitem__(self, i):
        with self.read.get_lock(): self.read.value += 1
        return torch.tensor([i, *(noise() if self.noisy else (0,))], dtype=torch.float64),int(i)

def seed(s=0):
    for f in (random.seed,np.random.seed,torch.manual_seed): f(s)

def augment(x): return x+random.random()+torch.rand(())

def fastais(cls=TfmdDL, **kw):
    return lambda drop=False, nw=0, noisy=True, bs=4, n=N: cls(Noisy(n, noisy), bs=bs, drop_last=drop, num_workers=nw, after_batch=augment if noisy else None, **kw)

def torchs(mk=lambda ds: dict(shuffle=True), **kw):
    return lambda drop=False, nw=0, noisy=True, bs=4, n=N: TorchLoader(ds:=Noisy(n, noisy), **(dict(batch_size=bs, drop_last=drop) | mk(ds)), num_workers=nw, **kw)

def gen(s=5): return torch.Generator().manual_seed(s)

class AsItGoes(Sampler):
    "Draws each sample when it is asked for, from the state that augmentation draws from"
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __iter__(self): return (int(torch.randint(self.n, ()))*(random.random()>.2) for _ in range(self.n))

class AtOnce(AsItGoes):
    "Draws all when iteration begins"
    def __iter__(self): return iter([random.randrange(self.n) for _ in range(self.n)])

def own_batches(ds): return dict(batch_sampler=[[0],[1,2,3],[4,5],[6],[7,8,9,10],[11,12]], **nothing)
nothing = dict(batch_size=1, drop_last=False)
def dist_of(): return (num_distrib() or 1,rank_distrib())
def sampled(mk): return lambda ds: dict(sampler=mk(ds))

def kind_of_text(cls, **kw):
    docs = [torch.arange(i*10, i*10+n) for i,n in enumerate([3,9,1,7,5,2,8,4,6,3,2,5,9])]
    return lambda drop=False, nw=0, noisy=True, bs=2, n=None: cls(docs if cls is LMDataLoader else [(t[:1],) for t in docs], bs=bs, drop_last=drop, num_workers=nw, shuffle=True, **kw)

def tabular(drop=False, nw=0, noisy=True, bs=4, n=N):
    to = TabularPandas(pd.DataFrame(dict(size=range(n), kind=(list('xyz')*n)[:n], y=([0,1]*n)[:n])), [Categorify], ['kind'], ['size'], 'y', CategoryBlock())
    return TabDataLoader(to, bs=bs, shuffle=True, drop_last=drop, num_workers=nw)

imgs = [PILImage.create(np.random.RandomState(i).randint(0, 255, (16,16,3), dtype=np.uint8)) for i in range(N)]
def images(drop=False, nw=0, noisy=True, bs=4, n=N):
    tfms = dict(item_tfms=RandomCrop(12), batch_tfms=aug_transforms()) if noisy else {}
    dblock = DataBlock((ImageBlock,CategoryBlock), get_x=lambda i: imgs[i], get_y=lambda i: 'ab'[i%2], splitter=IndexSplitter([0]), **tfms)
    return dblock.dataloaders(range(n), bs=bs, num_workers=nw, drop_last=drop).train

indexed = dict(fastai=fastais(shuffle=True), in_order=fastais(), weighted=fastais(WeightedDL, wgts=range(N), shuffle=True), partial=fastais(PartialDL, partial_n=18),
    random_order=fastais(get_idxs=lambda: random.sample(range(N), N)), texts=kind_of_text(LMDataLoader, seq_len=3, lens=None), sorted=kind_of_text(SortedDL, sort_func=lambda o: -o[0][0].item()),
    table=tabular, images=images, torch=torchs(), torch_gen=torchs(lambda ds: dict(shuffle=True, generator=gen())),
    replaced=torchs(lambda ds: dict(sampler=RandomSampler(ds, True, 70, gen()))), more=torchs(lambda ds: dict(sampler=RandomSampler(ds, num_samples=50, generator=gen()))),
    torch_weighted=torchs(sampled(lambda ds: WeightedRandomSampler(range(1,N+1), 30))), subset=torchs(sampled(lambda ds: SubsetRandomSampler(range(3,17), gen()))),
    at_once=torchs(sampled(lambda ds: AtOnce(N))), own_batches=torchs(lambda ds: dict(own_batches(ds))),
    batched=torchs(lambda ds: dict(batch_sampler=BatchSampler(RandomSampler(ds), 5, False), **nothing)),
    single=torchs(lambda ds: dict(batch_size=None, drop_last=False, sampler=RandomSampler(ds))),
    single_at_once=torchs(lambda ds: dict(batch_size=None, drop_last=False, sampler=AtOnce(N))),
    shared_out=torchs(sampled(lambda ds: DistributedSampler(ds, *dist_of()))))
one_by_one = dict(as_it_goes=torchs(sampled(lambda ds: AsItGoes(N))))

class Stream(IterableDataset):
    def __init__(self, n=N, noisy=True): self.n,self.noisy = n,noisy
    def __iter__(self): return ((torch.tensor([i, *(noise() if self.noisy else (0,))]),i) for i in range(self.n))
class Sized(Stream):
    def __len__(self): return self.n

class Own(TfmdDL):
    def create_batches(self, samps): return (tensor([i, *noise()]) for i,_ in enumerate(itertools.islice(samps, 7)))
class OwnChunks(TfmdDL):
    def chunkify(self, b): return chunked(b, self.bs+1, self.drop_last)

class Skipping(Noisy):
    def __getitem__(self, i):
        if i%5==0: raise SkipItemException()
        return super().__getitem__(i)

def streams(ds, cls=TfmdDL, **kw): return lambda drop=False, nw=0, noisy=True, bs=4: cls(ds(N, noisy), bs=bs, drop_last=drop, num_workers=nw, **kw)
in_sequence = dict(stream=streams(Stream, after_item=lambda o: o+random.random(), after_batch=augment), sized=streams(Sized), own=lambda drop=False, nw=0, noisy=True, bs=4: Own(Stream(N), bs=bs, num_workers=nw), chunks=streams(Noisy, OwnChunks),
    torch_stream=lambda drop=False, nw=0, noisy=True, bs=4: TorchLoader(Stream(N, noisy), batch_size=bs, drop_last=drop, num_workers=nw),
    torch_single=lambda drop=False, nw=0, noisy=True: TorchLoader(Sized(N, noisy), batch_size=None, num_workers=nw))
skipping = dict(skipping=streams(Skipping, shuffle=True), skipping_batches=lambda drop=False, nw=0, noisy=True: TfmdDL(Skipping(), bs=None, num_workers=nw))

def get_state(dl): return _get_global(),order_state(dl)
def set_state(dl, state):
    _set_global(state[0])
    if state[1]: set_order_state(dl, state[1])

def seen(o):
    "All of a batch that can differ: types, values, bits"
    if isinstance(o, (tuple,list)): return (type(o), *map(seen, o))
    if isinstance(o, torch.Tensor): return type(o),o.dtype,o.shape,o.numpy().tobytes()
    if isinstance(o, pd.DataFrame): return o.to_json()
    if hasattr(o, 'items') and isinstance(o.items, pd.DataFrame): return type(o),o.items.to_json()
    return type(o),o

def bits(s): return [o.numpy().tobytes() if isinstance(o, torch.Tensor) else bits(o) if isinstance(o, (tuple,list)) else bits(o.values()) if isinstance(o, dict) else o.tobytes() if isinstance(o, np.ndarray) else o for o in s]

def noted(it, dl):
    "Batches of a pass, and the states after each"
    res,states = [],[]
    for b in it:
        res.append(seen(b))
        states.append(get_state(dl))
    return res,states

everything = indexed | one_by_one | in_sequence | skipping

@pytest.mark.parametrize('drop', (False,True))
@pytest.mark.parametrize('name', everything)
def test_in_one_process_a_share_is_the_loader(name, drop):
    runs = []
    for f in (noop, lambda dl: StepDL(dl, 0, 1)):
        seed()
        dl = everything[name](drop)
        runs.append([noted(f(dl), dl) for _ in range(2)]+[noted(dl, dl)])
    for (a,s),(b,t) in zip(*runs):
        assert a==b, 'batches'
        assert bits(s)==bits(t), 'random states'
    if name!='in_order': assert len(runs[0][0][0])>1 and runs[0][0]!=runs[0][1]

def resumed(dl, share, before, k, state):
    "Batches from the `k`-th on, and the states after each"
    calls = []
    set_state(dl, before)
    seed_now = lambda: (calls.append(share._done if share._past else None), set_state(dl, state))
    share.resume_at(k, seed_now)
    with warnings.catch_warnings(record=True) as ws:
        warnings.simplefilter('always')
        res = noted(share, dl)
    test_eq(len(calls), 1)
    return res,[str(w.message) for w in ws if 'sequence' in str(w.message)]

def reads(dl): return getattr(getattr(dl.dataset, 'read', None), 'value', 0)

@pytest.mark.parametrize('own', (False,True))
@pytest.mark.parametrize('name', indexed)
def test_a_pass_goes_on(name, own):
    "After passes of the plain loader, before one of the plain loader; what is done is not read"
    for k,drop in ((1,False),(3,True),(4,False)):
        seed()
        dl = indexed[name](drop)
        list(dl)
        before,n = get_state(dl),reads(dl)
        a,s = noted(itertools.islice(dl, k), dl)
        done = reads(dl)-n
        set_state(dl, before)
        n = reads(dl)
        a,s = noted(dl, dl)
        n = reads(dl)-n
        after,m = noted(dl, dl),reads(dl)
        (b,t),told = resumed(dl, share:=StepDL(dl, 0, 1), before, k, s[k-1] if own else (s[k-1][0],None))
        assert (b,told)==(a[k:],[])
        assert bits(t)==bits(s[k:])
        test_eq((reads(dl)-m, share._done, len(share)), (n-done, len(a), len(dl)))
        c = noted(dl, dl)
        assert c[0]==after[0] and bits(c[1])==bits(after[1])

@pytest.mark.parametrize('name', in_sequence)
def test_a_stream_is_read_past(name):
    "What is done is made once more, and the states are set behind it"
    for k,drop in ((0,False),(2,True),(4,False)):
        seed()
        dl = in_sequence[name](drop)
        list(dl)
        before = get_state(dl)
        a,s = noted(dl, dl)
        (b,t),told = resumed(dl, share:=StepDL(dl, 0, 1), before, k, s[k-1] if k else before)
        if k: assert b==a[k:] and bits(t)==bits(s[k:])
        test_eq((len(b), len(told), share._done), (len(a)-k, int(k>0), len(a)))

def test_states_are_set_once_where_the_stream_ends_early():
    dl = in_sequence['stream']()
    (b,_),told = resumed(dl, StepDL(dl, 0, 1), get_state(dl), 50, get_state(dl))
    test_eq((b,len(told)), ([],1))

with_workers = 'fastai table torch replaced own_batches single_at_once as_it_goes stream torch_stream'.split()
@pytest.mark.parametrize('name', with_workers)
def test_with_data_workers(name):
    "The same samples in the same batches; what has been drawn for batches ahead of the last is not drawn twice"
    seed()
    dl = everything[name](nw=2, noisy=False)
    before = get_state(dl)
    a,s = noted(dl, dl)
    after,n = noted(dl, dl),reads(dl)
    for own in (True,False):
        (b,t),_ = resumed(dl, StepDL(dl, 0, 1), before, 2, s[1] if own else (s[1][0],None))
        assert b==a[2:] and bits(t)==bits(s[2:])
    if name in ('fastai','torch'): test_eq(reads(dl)-n, 2*(N-8))
    c = noted(dl, dl)
    assert c[0]==after[0] and bits(c[1])==bits(after[1])

def rows(bs):
    "Rows of the batches `bs` of all ranks, put together"
    bs = [b.iloc if isinstance(b, pd.DataFrame) else b[-1] if isinstance(b, (tuple,list)) else b for b in bs]
    return torch.cat([b if b.ndim else b[None] for b in bs])

def share_of(dl, r, size): return StepDL(dl, r, size)

@pytest.mark.parametrize('world', (1,2))
def test_persistent_data_workers(world):
    "They draw no seed in their second pass, neither do those of a new process that goes on with it"
    def mk(): return [TorchLoader(Noisy(noisy=False), batch_size=4//world, shuffle=True, num_workers=1, persistent_workers=True) for _ in range(world)]
    dl, = mk()[:1]
    seed()
    shares = [StepDL(dl, r, world) for r in range(world)]
    list(shares[0])
    before = get_state(shares[0])
    assert before[1]['alive']
    a,s = noted(shares[0], dl)
    after = noted(shares[0], dl)
    share = StepDL(new:=mk()[0], 0, world)
    set_state(new, before)
    share.resume_at(2, lambda: set_state(new, s[1]), before[1]['alive'])
    assert noted(share, new)[0]==a[2:]
    assert noted(new if world==1 else share, new)[0]==after[0]

def facts(share): return str([share.weights,share.totals,share.n,share.n_steps(),share._done,share._rows(),[share.total(k) for k in range(9)]]
    +[o.tolist() for r in range(share.world_size) for o in [share.positions(r)]]+[share.gathered_order().tolist()])

some = 'fastai weighted partial random_order texts sorted table torch_gen replaced torch_weighted subset own_batches single stream torch_stream'.split()
@pytest.mark.parametrize('drop', (False,True))
@pytest.mark.parametrize('name', some)
def test_ranks_go_on(name, drop):
    "Batches of each rank, and all that is computed from them, with blocks and slices"
    for size,k,cls in itertools.product((2,3), (1,2), (StepDL,EvalDL,DistributedDL)):
        if name in in_sequence and cls is DistributedDL: continue
        for r in range(size):
            seed()
            dl = everything[name](drop, bs=2)
            share = cls(dl, r, size)
            before,n = get_state(dl),reads(dl)
            list(itertools.islice(share, k))
            done = reads(dl)-n
            set_state(dl, before)
            n = reads(dl)
            a,s = noted(share, dl)
            n,m,was = reads(dl)-n,reads(dl),facts(share)
            if len(a)<=k: continue
            (b,t),told = resumed(dl, share, before, k, s[k-1])
            assert b==a[k:] and bits(t)==bits(s[k:]), (size,r,k,cls)
            test_eq((facts(share), reads(dl)-m, len(told)), (was, n-done, int(name in in_sequence and r==0)))

@pytest.mark.parametrize('name', 'fastai weighted partial random_order torch torch_gen replaced torch_weighted subset'.split())
def test_another_number_of_ranks_goes_on(name):
    "The rest of an epoch has the same global batches"
    for k,drop in itertools.product((0,1), (False,True)):
        res = []
        for size in (1,2,3,4):
            ranks = []
            for r in range(size):
                seed()
                share = StepDL(indexed[name](drop, noisy=False, bs=12//size), r, size)
                share.resume_at(k)
                ranks.append([(b,share.weights.get(k+i, 1.)) for i,b in enumerate(share)])
            res.append([rows([b for b,w in bs if w]).tolist() for bs in zip(*ranks)])
        assert res[0]==res[1]==res[2]==res[3] and (drop or sum(map(len, res[0]))>0)

def goes_on(rank, name, drop):
    seed(rank)
    dl = everything[name](drop, bs=2)
    share = StepDL(dl)
    def start():
        share.in_step = True
        return share
    list(start())
    before = get_state(dl)
    a,s = noted(start(), dl)
    after = noted(start(), dl)
    for k in (1,2):
        (b,t),told = resumed(dl, start(), before, k, s[k-1])
        assert b==a[k:] and bits(t)==bits(s[k:]), k
        test_eq(len(told), int(name in in_sequence and not rank))
    c = noted(start(), dl)
    assert c[0]==after[0] and bits(c[1])==bits(after[1])
    return len(b)

@pytest.mark.parametrize('size', (1,2,3))
@pytest.mark.parametrize('name', 'fastai weighted texts torch_gen replaced own_batches stream torch_stream own shared_out'.split())
def test_ranks_of_a_group_go_on(name, size):
    for o in on_ranks(lambda rank: [goes_on(rank, name, drop) for drop in (False,True)], size): assert all(n is not None for n in o)
