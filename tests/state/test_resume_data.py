"A pass goes on at a later batch, and in one process a share is the loader itself: batches and random numbers, bit for bit"
import itertools,random,warnings,pytest
from torch.multiprocessing import Value
from torch.utils.data import BatchSampler,DistributedSampler,IterableDataset,RandomSampler,Sampler,SubsetRandomSampler,WeightedRandomSampler
from torch.utils.data import DataLoader as TorchLoader
from fastai.vision.all import *
from fastai.tabular.all import *
from fastai.text.data import LMDataLoader,SortedDL,pad_input
from fastai.callback.data import PartialDL,WeightedDL
from fastdist import *
from fastdist.comm.rng import global_random,set_global_random
from fastdist.data.loader import StepDL,order_state,set_order_state
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

def fastais(cls=TfmdDL, ds=Noisy, **kw):
    def mk(drop=False, nw=0, noisy=True, bs=4): return cls(ds(N, noisy), bs=bs, drop_last=drop, num_workers=nw, after_batch=augment if noisy else None, **kw)
    return mk

def torchs(f=lambda ds: dict(shuffle=True), ds=Noisy):
    def mk(drop=False, nw=0, noisy=True, bs=4): return TorchLoader(o:=ds(N, noisy), **dict(batch_size=bs, drop_last=drop)|f(o), num_workers=nw)
    return mk

def sampled(f, **kw): return torchs(lambda ds: dict(sampler=f(ds), **kw))
def gen(): return torch.Generator().manual_seed(5)

class AsItGoes(Sampler):
    "Draws each sample when it is asked for, from the state that augmentation draws from"
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __iter__(self): return (int(torch.randint(self.n, ()))*(random.random()>.2) for _ in range(self.n))

class AtOnce(AsItGoes):
    "Draws all when iteration begins"
    def __iter__(self): return iter([random.randrange(self.n) for _ in range(self.n)])

nothing = dict(batch_size=1, drop_last=False) # torch's defaults, where a batch sampler decides
docs = [torch.arange(i*10, i*10+n) for i,n in enumerate([3,9,1,7,5,2,8,4,6,3,2,5,9])]
def texts(drop=False, nw=0, noisy=True, bs=2): return LMDataLoader(docs, bs=bs, seq_len=3, shuffle=True, drop_last=drop, num_workers=nw)
def by_length(drop=False, nw=0, noisy=True, bs=2): return SortedDL([(o,) for o in docs], bs=bs, sort_func=lambda o: len(o[0]), shuffle=True, drop_last=drop,
    num_workers=nw, before_batch=partial(pad_input, pad_fields=[0]))

def table(drop=False, nw=0, noisy=True, bs=4):
    df = pd.DataFrame(dict(size=range(N), kind=(list('xyz')*N)[:N], y=([0,1]*N)[:N]))
    return TabDataLoader(TabularPandas(df, [Categorify], ['kind'], ['size'], 'y', CategoryBlock()), bs=bs, shuffle=True, drop_last=drop, num_workers=nw)

imgs = [PILImage.create(np.random.RandomState(i).randint(0, 255, (16,16,3), dtype=np.uint8)) for i in range(N)]
def images(drop=False, nw=0, noisy=True, bs=4):
    dblock = DataBlock((ImageBlock,CategoryBlock), get_x=lambda i: imgs[i], get_y=lambda i: 'ab'[i%2], splitter=IndexSplitter([0]), item_tfms=RandomCrop(12),
        batch_tfms=aug_transforms())
    return dblock.dataloaders(range(N), bs=bs, num_workers=nw, drop_last=drop).train

indexed = dict(fastai=fastais(shuffle=True), in_order=fastais(), random_order=fastais(get_idxs=lambda: random.sample(range(N), N)),
    weighted=fastais(WeightedDL, wgts=range(N), shuffle=True), partial=fastais(PartialDL, partial_n=18), texts=texts, by_length=by_length,
    table=table, images=images, torch=torchs(), torch_gen=torchs(lambda ds: dict(shuffle=True, generator=gen())),
    more=sampled(lambda ds: RandomSampler(ds, num_samples=50, generator=gen())), replaced=sampled(lambda ds: RandomSampler(ds, True, 70, gen())),
    torch_weighted=sampled(lambda ds: WeightedRandomSampler(range(1,N+1), 30)), subset=sampled(lambda ds: SubsetRandomSampler(range(3,17), gen())),
    at_once=sampled(lambda ds: AtOnce(N)), shared_out=sampled(lambda ds: DistributedSampler(ds, num_distrib() or 1, rank_distrib())),
    own_batches=torchs(lambda ds: dict(batch_sampler=[[0],[1,2,3],[4,5],[6],[7,8,9,10],[11,12]])|nothing),
    batched=torchs(lambda ds: dict(batch_sampler=BatchSampler(RandomSampler(ds), 5, False))|nothing),
    single=sampled(RandomSampler, batch_size=None, drop_last=False), single_at_once=sampled(lambda ds: AtOnce(N), batch_size=None, drop_last=False))
one_by_one = dict(as_it_goes=sampled(lambda ds: AsItGoes(N)))

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

def in_order(ds): return {}
in_sequence = dict(stream=fastais(ds=Stream, after_item=lambda o: o+random.random()), sized=fastais(ds=Sized), own=fastais(Own, Stream),
    chunks=fastais(OwnChunks), torch_stream=torchs(in_order, Stream), torch_single=torchs(lambda ds: dict(batch_size=None, drop_last=False), Sized))
skipping = dict(skipping=fastais(ds=Skipping, shuffle=True))

def get_state(dl): return global_random(),order_state(dl)
def set_state(dl, state):
    set_global_random(state[0])
    if state[1]: set_order_state(dl, state[1])

def seen(o):
    "All of a batch that can differ: types, values, bits"
    if isinstance(o, (tuple,list)): return (type(o), *map(seen, o))
    if isinstance(o, torch.Tensor): return type(o),o.dtype,o.shape,o.numpy().tobytes()
    if isinstance(o, pd.DataFrame): return o.to_json()
    if hasattr(o, 'items') and isinstance(o.items, pd.DataFrame): return type(o),o.items.to_json()
    return type(o),o

def bits(o):
    "States, to be compared"
    if isinstance(o, dict): o = list(o.values())
    if isinstance(o, (tuple,list)): return [*map(bits, o)]
    return o.tobytes() if isinstance(o, np.ndarray) else o.numpy().tobytes() if isinstance(o, torch.Tensor) else o

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
    seed_now = lambda: (calls.append(share._pass.done if share._pass.past else None), set_state(dl, state))
    share.resume_at(k, seed_now)
    with warnings.catch_warnings(record=True) as ws:
        warnings.simplefilter('always')
        res = noted(share, dl)
    test_eq(len(calls), 1)
    return res,[str(w.message) for w in ws if 'sequence' in str(w.message)]

def reads(dl): return getattr(getattr(dl.dataset, 'read', None), 'value', 0)

@pytest.mark.parametrize('name', indexed)
def test_a_pass_goes_on(name):
    "After passes of the plain loader, before one of the plain loader; what is done is not read"
    for k,drop,own in ((1,False,True),(3,True,False),(4,False,False)):
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
        test_eq((reads(dl)-m, share._pass.done, len(share)), (n-done, len(a), len(dl)))
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
        test_eq((len(b), len(told), share._pass.done), (len(a)-k, int(k>0), len(a)))

def test_states_are_set_once_where_the_stream_ends_early():
    dl = in_sequence['stream']()
    (b,_),told = resumed(dl, StepDL(dl, 0, 1), get_state(dl), 50, get_state(dl))
    test_eq((b,len(told)), ([],1))

@pytest.mark.parametrize('name', 'fastai torch replaced own_batches as_it_goes torch_stream'.split())
@pytest.mark.by_default('fastai', 'torch')
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
    return torch.cat([b[-1] for b in bs]).tolist()

@pytest.mark.parametrize('world', (1,2))
def test_persistent_data_workers(world):
    "They draw no seed in their second pass, neither do those of a new process that goes on with it"
    def mk(): return TorchLoader(Noisy(noisy=False), batch_size=4//world, shuffle=True, num_workers=1, persistent_workers=True)
    seed()
    share,new = StepDL(mk(), 0, world),StepDL(mk(), 0, world)
    list(share)
    before = get_state(share)
    a,s = noted(share, share)
    after = noted(share, share)[0]
    set_state(new, before)
    new.resume_at(2, lambda: set_state(new, s[1]), before[1]['alive'])
    assert noted(new, new)[0]==a[2:]
    assert noted(new.dl if world==1 else new, new)[0]==after

def facts(o):
    d,done = o.partition,o._pass.done
    res = [o.weights, o.totals, o.n, o.n_steps(), done, d.padding(done-1)]
    return res+[o.total(k) for k in range(9)]

some = 'fastai partial random_order texts by_length table torch_gen replaced own_batches single stream torch_stream'.split()
@pytest.mark.parametrize('drop', (False,True))
@pytest.mark.parametrize('name', some)
def test_ranks_go_on(name, drop):
    "Batches of each rank, and all that is computed from them, with blocks and slices"
    for size,k,cls in ((2,2,StepDL),(3,1,StepDL),(2,1,StepDL),(3,2,DistributedDL)):
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
                if not r: state = bits(get_state(share))
            res.append(([rows([b for b,w in bs if w]) for bs in zip(*ranks)],state))
        assert res[0]==res[1]==res[2]==res[3] and (drop or len(res[0][0])>0)

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

@pytest.mark.parametrize('size', (2,3))
@pytest.mark.parametrize('name', 'fastai texts torch_gen own_batches stream torch_stream shared_out'.split())
@pytest.mark.by_default('fastai', 'stream')
def test_ranks_of_a_group_go_on(name, size):
    for o in on_ranks(lambda rank: [goes_on(rank, name, drop) for drop in (False,True)], size): assert all(n is not None for n in o)
