"Batches that are fetched and collated at once are those of the loader itself: to the bit, in their types, and with the same draws"
import pytest,random
from collections import namedtuple
from copy import deepcopy
from functools import partial,wraps
from hypothesis import given,strategies as st
from fastcore.test import test_eq
from fastai.basics import *
from fastai.callback.data import PartialDL,WeightedDL
from fastai.data import load
from fastai.data.load import SkipItemException
from fastai.text.data import LMDataLoader,SortedDL
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Subset,TensorDataset
from torch.utils.data._utils import collate
from fastdist.data.fetch import on_device,rows
from fastdist.data.loader import StepDL
from fastdist.data.sharding import slices
import learners

def plain(o):
    "`o` as values that `==` compares: types, dtypes, shapes, strides, attributes and numbers"
    if isinstance(o, Tensor):
        how = type(o),o.dtype,o.device,o.shape,o.stride(),o.requires_grad,sorted(vars(o))
        return how,o.detach().as_subclass(Tensor).to_dense().resolve_conj().numpy().tobytes()
    if isinstance(o, dict): return type(o),{k:plain(v) for k,v in o.items()}
    if isinstance(o, (tuple,list)): return type(o),[plain(v) for v in o]
    return (type(o),o.items.to_csv()) if hasattr(o, 'items') else (type(o),o)

def seen(dl, then=noop, epochs=2):
    "What passes over `dl` give until an error, that error, and what is drawn afterwards; `then` is called with `dl` after its first batch"
    res = []
    try:
        for _ in range(epochs):
            for i,b in enumerate(dl):
                res.append(plain(b))
                if not i: then(getattr(dl, 'dl', dl) if isinstance(dl, StepDL) else dl)
    except Exception as e: res.append((type(e),str(e)))
    return res,random.random(),np.random.rand(),torch.rand(1).item()

def seed(n=0):
    random.seed(n)
    np.random.seed(n)
    torch.manual_seed(n)

def same(mk, then=noop):
    "Check that shares of one process give what the loader that `mk` returns gives"
    def run(share):
        seed()
        return seen(share(mk()), then)
    alone = run(noop)
    test_eq(run(lambda dl: StepDL(dl, 0, 1)), alone)
    return alone[0]

def same_on_two(dl):
    "Check that ranks of two give what `dl` makes of their samples"
    def batches(idxs):
        for k in range(0, len(idxs), dl.bs): yield dl.do_batch([dl.do_item(i) for i in idxs[k:k+dl.bs].tolist()])
    def run(batches):
        seed()
        return seen(batches, epochs=1)[0]
    for r in range(2): test_eq(run(StepDL(dl, r, 2)), run(batches(slices(dl.n, 2*dl.bs, r, 2, dl.drop_last))))

Point = namedtuple('Point', 'x y')
leaves = dict(row=lambda i: torch.randn(3), number=lambda i: tensor(i), strided=lambda i: torch.randn(3, 2).t(),
    grad=lambda i: torch.ones(2, requires_grad=True), half=lambda i: torch.ones(2).half(), image=lambda i: TensorImage(torch.randn(1, 2, 2)),
    category=lambda i: TensorCategory(i), meta=lambda i: TensorImage(torch.ones(1, 1, 1), note=i), int=int, float=float, bool=bool, str=str,
    none=lambda i: None, array=lambda i: np.arange(i, i+3), flags=lambda i: np.arange(3)>i, scalar=lambda i: np.float32(i), double=lambda i: np.float64(i),
    words=lambda i: np.array(['a']), ragged=lambda i: torch.ones(i%3+1), ragged_array=lambda i: np.ones(i%3+1), mixed=lambda i: (1,2.5,True)[i%3],
    types=lambda i: torch.ones(2) if i%2 else TensorImage(torch.ones(2)), dtypes=lambda i: torch.ones(2, dtype=(torch.int32,torch.float32)[i%2]),
    sparse=lambda i: torch.eye(2).to_sparse(), object=lambda i: Path('a'), empty=lambda i: ())
kinds = dict(tuple=tuple, list=list, dict=lambda o: dict(enumerate(o)), point=lambda o: Point(o[0], o[-1]), L=L)

def make(spec, i):
    if isinstance(spec, str): return leaves[spec](i)
    kind,parts = spec
    return kinds[kind]([make(o, i) for o in parts])

specs = st.recursive(st.sampled_from(list(leaves)), lambda o: st.tuples(st.sampled_from(list(kinds)), st.lists(o, min_size=1, max_size=3)), max_leaves=5)
settings = st.fixed_dictionaries(dict(bs=st.integers(1, 5), shuffle=st.booleans(), drop_last=st.booleans()))

@given(specs, settings, st.sampled_from([DataLoader,partial(TfmdDL, num_workers=0)]))
def test_samples_of_any_kind(spec, kw, cls):
    items = [make(spec, i) for i in range(7)]
    same(lambda: cls(items, **kw))
    if not any(o is None for o in items): same_on_two(cls(items, **kw|dict(shuffle=False)))

@pytest.mark.parametrize('name', leaves)
@pytest.mark.parametrize('kind', ['tuple','dict'])
def test_values_of_each_kind(name, kind): same(lambda: TfmdDL([make((kind, ['row',name]), i) for i in range(5)], bs=2, num_workers=0))

x,y = torch.randn(11, 4, generator=torch.Generator().manual_seed(0)),torch.arange(11) # data workers that import this have the same

class Own:
    def __len__(self): return 11
    def __getitem__(self, i): return x[i]+random.random(),y[i]

class Skips(Own):
    def __getitem__(self, i):
        if random.random()<.4: raise SkipItemException()
        return (x[i],torch.rand(2)) if i%4 else None

class Flipped(TensorDataset):
    def __getitem__(self, i): return super().__getitem__(i)[::-1]
class Named(TensorDataset): name = 'named'
class Doubled(list):
    def __getitem__(self, i): return 2*super().__getitem__(i)
class Half(Subset):
    def __getitem__(self, i): return self.dataset[self.indices[i]][0]/2
    def __getitems__(self, idxs): return [self[i] for i in idxs]
class Many(Own):
    def __init__(self): self.calls = []
    def __getitems__(self, idxs):
        self.calls.append(len(idxs))
        return [Own.__getitem__(self, i) for i in idxs]
class Overridden(Many):
    def __getitem__(self, i): return x[i]*3
class Fails(Own):
    def __getitems__(self, idxs): raise NotImplementedError
class Wrapper:
    def __init__(self, ds): self.ds = ds
    def __len__(self): return len(self.ds)
    def __getitem__(self, i): return self.ds[i][0]*5
    def __getattr__(self, k): return getattr(self.ds, k)
class Broken(Own):
    def __getitem__(self, i):
        if i==5: raise OSError('file 5')
        return x[i]

arrays = {f'array_{o}':np.arange(22).reshape(11, 2).astype(o) for o in '? i1 u1 u2 i4 i8 f2 f4 f8 c8 >f4 U2 O'.split()}
vectors = {f'vector_{o}':np.arange(11).astype(o) for o in '? i1 u1 u2 i4 i8 f2 f4 f8 c8 U2 O'.split()}
locked = np.ones((11,2))
locked.flags.writeable = False
sets = dict(tensors=TensorDataset(x, y), transposed=TensorDataset(torch.randn(4, 11).t(), y),
    channels_last=TensorDataset(torch.randn(11, 3, 2, 2).to(memory_format=torch.channels_last)), named=Named(x, y), flipped=Flipped(x, y),
    grad=TensorDataset(x.clone().requires_grad_(), y), typed=TensorDataset(TensorImage(x), y), views=TensorDataset(x[:,::2], x[:,0]),
    complex=TensorDataset(torch.randn(11, 2, dtype=torch.cfloat).conj(), y), subset=Subset(TensorDataset(x, y), [3,1,4,1,5,9,2,6]),
    negative=Subset(TensorDataset(x, y), [-1,0,-3]), outside=Subset(TensorDataset(x, y), [1,2,11]), of_array=Subset(TensorDataset(x, y), np.array([3,1,2])),
    half=Half(TensorDataset(x, y), [3,1]), nested=Subset(Subset(Many(), [3,1,4,5]), [2,0,1]), of_wrapper=Subset(Wrapper(Many()), [3,1]), tensor=x,
    list=list(zip(x, y)), tuple=tuple(x), range=range(11), L=L(range(11)), str='abcde', doubled=Doubled(range(5)), own=Own(), skips=Skips(), many=Many(),
    overridden=Overridden(), fails=Fails(), wrapper=Wrapper(Many()), broken=Broken(), nothing=[], short=[(1,2),(3,)], none=[None,1,None,2,3],
    datasets=Datasets(list(range(11)), [[lambda i: x[i]],[lambda i: i%3]]), lists=TfmdLists(list(range(11)), [lambda i: x[i]+random.random()]), locked=locked,
    dict={i:i for i in range(7)}, **arrays, **vectors)

@pytest.mark.parametrize('name', sets)
def test_data_sets_of_any_kind(name):
    for kw in (dict(bs=3, shuffle=True), dict(bs=4, drop_last=True), dict(bs=1), dict(bs=None)):
        same(lambda: DataLoader(sets[name], **kw))
        same(lambda: TfmdDL(sets[name], num_workers=0, device='cpu', **kw))

@pytest.mark.parametrize('name', [o for o in sets if o not in ('skips','none')])
def test_data_sets_of_any_kind_on_two_ranks(name): same_on_two(DataLoader(sets[name], bs=2))

def test_rows_are_had_at_once():
    for name in ('tensors','named','subset','tensor','array_f4','vector_i8'): assert rows(sets[name], [0,2]) is not None, name
    for name in ('flipped','grad','typed','transposed','views','list','array_O','vector_U2','negative'): assert rows(sets[name], [0,2]) is None, name
    assert rows(sets['tensors'], [True]) is None

def test_a_batch_is_a_copy():
    dl = DataLoader(ds := TensorDataset(torch.zeros(4, 2)), bs=4)
    for (b,) in StepDL(dl, 0, 1): b += 1
    assert not ds.tensors[0].any()

class Item(TfmdDL):
    def create_item(self, s): return super().create_item(s)[0]*2
class Does(TfmdDL):
    def do_item(self, s): return super().do_item(s)[0]+random.random()
class After(TfmdDL):
    def after_item(self, o): return o[0]
class Before(TfmdDL):
    def before_batch(self, b): return b[::-1]
class Creates(TfmdDL):
    def create_batch(self, b): return len(b),super().create_batch(b)
class Batch(TfmdDL):
    def do_batch(self, b): return super().do_batch(b)[0]
class Retains(TfmdDL):
    def retain(self, res, b): return [res,type(b)]
class Chunks(TfmdDL):
    def chunkify(self, b): return ([o] for o in b)
class Batches(TfmdDL):
    def create_batches(self, samps): return (torch.ones(1)*s for s in samps)
class AfterBatch(TfmdDL):
    def after_batch(self, b): return b[0].mean()+torch.rand(1)

owns = [Item,Does,After,Before,Creates,Batch,Retains,Chunks,Batches,AfterBatch]
given_as = dict(create_item=lambda s: x[s]*3, after_item=lambda o: (o[0]*2,), before_batch=lambda b: b[:2],
    create_batch=lambda b: torch.stack([o[0] for o in b]), do_batch=len, retain=lambda res, b: res[0], after_batch=lambda b: b[1], shuffle_fn=lambda o: o[::-1],
    get_idxs=lambda: [2,0,5], before_iter=lambda *_: random.random(), after_iter=lambda *_: torch.rand(1))

@pytest.mark.by_default('many', 'skips')
@pytest.mark.parametrize('ds', ['tensors','list','many','skips'])
def test_methods_of_the_user(ds):
    for cls in owns: same(lambda: cls(sets[ds], bs=3, shuffle=True, num_workers=0, do_setup=False))
    for k,f in given_as.items(): same(lambda: DataLoader(sets[ds], bs=3, shuffle=True, **{k:f}))
    for k in ('after_item','before_batch','after_batch'): same(lambda: TfmdDL(sets[ds], bs=3, num_workers=0, **{k:given_as[k]}))

@pytest.mark.parametrize('name', 'create_item do_item create_batch do_batch before_batch retain after_item'.split())
def test_methods_patched_into_fastai(name, monkeypatch):
    old,calls = getattr(DataLoader, name),[]
    @wraps(old)
    def f(self, *args):
        calls.append(name)
        return old(self, *args)
    monkeypatch.setattr(DataLoader, name, f)
    n = len(same(lambda: DataLoader(sets['tensors'], bs=4)))
    test_eq(len(calls), 2*n*(11/3 if name in ('create_item','do_item','after_item') else 1))

def test_collation_patched(monkeypatch):
    monkeypatch.setattr(load, 'fa_collate', lambda b: torch.stack([o[0] for o in b])*2)
    assert same(lambda: DataLoader(sets['tensors'], bs=4))[0][0][0] is Tensor
    monkeypatch.undo()
    monkeypatch.setitem(collate.default_collate_fn_map, Tensor, lambda b, collate_fn_map: torch.stack(b)+1)
    same(lambda: DataLoader(sets['list'], bs=4))
    same(lambda: DataLoader(sets['tensors'], bs=4))

def grow(dl): dl.dataset.append((x[0]*9,y[0]))
def swap(dl): dl.dataset = list(zip(x*2, y))
def columns(dl): dl.dataset.tensors = dl.dataset.tensors[1:]
def place(dl): dl.dataset[10] = (x[0]*7,y[3])
def inside(dl): dl.dataset[7] = None
def write(dl): (dl.dataset.tensors[0] if isinstance(dl.dataset, TensorDataset) else dl.dataset[9][0])[:] = 4
def transform(dl): dl.after_item = Pipeline([lambda o: o[0]])
def into(dl): dl.before_batch.add([Transform(lambda b: b[:1])])
def replace(dl): dl.create_batch = lambda b: len(b)

@pytest.mark.parametrize('f,ds', [*((f,'list') for f in (grow,swap,place,inside,write,transform,into,replace)),
    *((f,'tensors') for f in (swap,columns,write,transform,into,replace))])
def test_changes_within_an_epoch(f, ds): same(lambda: TfmdDL(deepcopy(sets[ds]), bs=3, num_workers=0), f)

texts = [torch.arange(i*10, i*10+n) for i,n in enumerate([3,9,1,7,5,2,8,4,6,3,2])]
loaders = dict(weighted=lambda: WeightedDL(list(zip(x, y)), bs=3, wgts=range(1, 12), shuffle=True, num_workers=0),
    partial=lambda: PartialDL(sets['tensors'], bs=3, partial_n=7, num_workers=0),
    language=lambda: LMDataLoader([(o,) for o in texts], bs=3, seq_len=4, shuffle=True, num_workers=0), n=lambda: DataLoader(list(x), bs=3, n=8),
    endless=lambda: DataLoader(iter(range(9)), bs=2, indexed=False),
    sorted=lambda: SortedDL([(o,) for o in texts], bs=3, shuffle=True, num_workers=0, before_batch=lambda b: [(o[:1],) for o, in b]),
    device=lambda: TfmdDL(sets['list'], bs=3, num_workers=0, device='cpu'), pinned=lambda: DataLoader(sets['list'], bs=3, pin_memory=True),
    timeout=lambda: DataLoader(sets['list'], bs=3, timeout=1), workers=lambda: DataLoader(sets['list'], bs=3, num_workers=2, shuffle=True),
    in_workers=lambda: DataLoader(sets['tensors'], bs=3, num_workers=2), many_in_workers=lambda: DataLoader(Many(), bs=3, num_workers=2),
    torch=lambda: TorchLoader(sets['tensors'], batch_size=3, shuffle=True), torch_list=lambda: TorchLoader(sets['list'], batch_size=3, drop_last=True),
    torch_many=lambda: TorchLoader(Many(), batch_size=3, shuffle=True, generator=torch.Generator()), torch_alone=lambda: TorchLoader(list(x), batch_size=None),
    torch_workers=lambda: TorchLoader(sets['list'], batch_size=3, shuffle=True, num_workers=2))

@pytest.mark.filterwarnings('ignore:.*pin_memory')
@pytest.mark.parametrize('name', loaders)
def test_loaders_of_any_kind(name): same(loaders[name])

@pytest.mark.parametrize('name', 'vision tabular collab language_model text_classifier'.split())
@pytest.mark.by_default('language_model')
def test_loaders_of_applications(name):
    def run(i, share):
        seed()
        dl = share(getattr(learners, name)().dls[i])
        seed()
        return seen(dl)
    for i in range(2): test_eq(run(i, lambda dl: StepDL(dl, 0, 1)), run(i, noop))

def test_torchs_iterator_is_used_for_profilers_only(monkeypatch):
    its = load._SingleProcessDataLoaderIter
    nexts,old = [],its.__next__
    monkeypatch.setattr(its, '__next__', lambda self: nexts.append(1) or old(self))
    share = StepDL(DataLoader(sets['tensors'], bs=4), 0, 2)
    test_eq((len(list(share)), nexts), (2,[]))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as p: list(share)
    assert any('DataLoader' in o.key for o in p.key_averages())

def test_on_device_as_fastai():
    cpu = torch.device('cpu')
    for b in ((x,y), [x,y], (x,1), x, (TensorImage(x),), dict(a=x), (x,[y]), Point(x, y), 'a', None, ()):
        try: expected = plain(to_device(b, cpu))
        except Exception as e: expected = type(e)
        try: got = plain(on_device(b, cpu))
        except Exception as e: got = type(e)
        test_eq(got, expected)
    assert on_device(b := [x], cpu) is not b
    test_eq(on_device((x,), torch.device('meta'))[0].device.type, 'meta')
