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

def augment(b): return b[0]+random.random()+torch.rand(()),b[1]

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
    shared_out=torchs(sampled(lambda ds: DistributedSampler(ds, 1, 0))))
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

def streams(ds, cls=TfmdDL, **kw): return lambda drop=False, nw=0, noisy=True: cls(ds(N, noisy), bs=4, drop_last=drop, num_workers=nw, **kw)
in_sequence = dict(stream=streams(Stream, after_item=lambda o: o+random.random(), after_batch=augment), sized=streams(Sized), own=streams(Stream, Own), chunks=streams(Noisy, OwnChunks),
    torch_stream=lambda drop=False, nw=0, noisy=True: TorchLoader(Stream(N, noisy), batch_size=4, drop_last=drop, num_workers=nw),
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

def numbers(b): return b[1].tolist() if isinstance(b, (tuple,list)) and isinstance(b[1], torch.Tensor) else seen(b)

with_workers = 'fastai weighted random_order table torch torch_gen replaced torch_weighted own_batches single_at_once as_it_goes stream sized torch_stream'.split()
@pytest.mark.parametrize('name', with_workers)
def test_with_data_workers(name):
    "Fastai's and torch's data workers, as many as there are; what is drawn for batches ahead of the last is drawn once more"
    seed()
    dl = everything[name](nw=2, noisy=False)
    before = get_state(dl)
    a,s = noted(dl, dl)
    after,m = noted(dl, dl),reads(dl)
    for own in (True,False):
        n = reads(dl)
        (b,t),_ = resumed(dl, StepDL(dl, 0, 1), before, 2, s[1] if own else (s[1][0],None))
        assert b==a[2:] and bits(t)==bits(s[2:])
        if name in indexed and m: assert reads(dl)-n<=23-2*4 if 'own' not in name and name in ('fastai','torch','torch_gen') else True
    c = noted(dl, dl)
    assert c[0]==after[0] and bits(c[1])==bits(after[1])

def test_persistent_data_workers():
    "They draw no seed in their second pass, neither do those of a new process that goes on with it"
    def mk(): return TorchLoader(Noisy(noisy=False), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True)
    seed()
    dl = mk()
    list(dl)
    before = get_state(dl)
    a,s = noted(dl, dl)
    third = noted(dl, dl)
    for world in (1,2):
        new = mk()
        share = StepDL(new, 0, world)
        set_state(new, before)
        share.resume_at(2, lambda: set_state(new, s[1]), before[1]['alive'])
        b,t = noted(share, share)
        if world==1:
            assert b==a[2:] and bits([o[0] for o in t])==bits([o[0] for o in s[2:]])
            assert noted(new, new)[0]==third[0]
        else: test_eq([o[2][-1] for o in b], [])
