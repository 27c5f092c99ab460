"With a seed any number of ranks, with any number of data workers, draws what one process draws"
import fastai.vision.augment,pandas as pd,pytest,time
from contextlib import suppress
from functools import partial
from accelerate import notebook_launcher
from accelerate.utils import DistributedDataParallelKwargs,FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader as TorchLoader,IterableDataset
from fastai.callback.mixup import CutMix,MixUp
from fastai.callback.rnn import rnn_cbs
from fastai.collab import *
from fastai.tabular.all import *
from fastai.text.all import *
from fastai.text.models.awdlstm import *
from fastai.vision.all import *
from fastai.vision.gan import *
from fastdist import *
from fastdist.base.errors import *
from fastdist.comm.rng import RandomStream
from fastdist.parallel.seeding import learned
from fastdist.tools.trace import ShortTrace,TraceEnd
from compare import cases,sizes,usual
from procs import free_port
from seeded import *

g = torch.Generator().manual_seed(1)
n_all,bs = 28,12 # two whole batches and a ragged one
images,classes,texts = torch.randn(n_all, 3, 16, 16, generator=g),torch.randint(3, (n_all,), generator=g),torch.randn(n_all, 9, 8, generator=g)
# images of 16 pixels, of which torch computes all by its vectors: the logits and exponentials of a rest differ from them in the last bit, with a seed and without
pictures = [PILImage.create((torch.rand(24, 24, 3, generator=g)*255).byte().numpy()) for _ in range(24)]

def made(n, ds, valid, model, cbs=None, cls=DataLoader, loss=CrossEntropyLossFlat, bs=bs, **kw):
    torch.manual_seed(0)
    size = dict(batch_size=bs//n) if cls is TorchLoader else dict(bs=bs//n)
    return Learner(DataLoaders(cls(ds, **size, **kw), cls(valid, **size)), model(), loss_func=loss(), cbs=cbs and cbs())

def net(model, x=images, **kw):
    ds = list(zip(x, classes))
    return lambda n: made(n, ds, ds[:10], model, **(dict(shuffle=True)|kw))

def vision(item=(), batch=(), workers=0, model=None):
    def mk(n):
        ds = Datasets(range(24), [[lambda i: pictures[i]], [lambda i: i%3,Categorize(vocab=[0,1,2])]], splits=[range(18),range(18,24)])
        tfms = dict(after_item=[*(item or [Resize(16)]),ToTensor()], after_batch=[IntToFloatTensor(),*batch])
        torch.manual_seed(0)
        own = model() if model else nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 3))
        return Learner(ds.dataloaders(bs=bs//n, num_workers=workers, device='cpu', drop_last=False, **tfms), own, loss_func=CrossEntropyLossFlat(), metrics=accuracy)
    return mk

def flat(*ls): return lambda: nn.Sequential(nn.Flatten(), nn.Linear(768, 12), *[l() for l in ls], nn.Linear(12, 3))
def conv(*ls): return lambda: nn.Sequential(nn.Conv2d(3, 6, 3, 2), *[l() for l in ls], nn.Flatten(), nn.Linear(294, 3))

@pytest.mark.parametrize('workers,n', ((3,2),*(pytest.param(*o, marks=pytest.mark.whole) for o in ((0,3),(3,4)))))
def test_augmented_batches_on_any_number_of_ranks(workers, n):
    same_on(dict(all=vision([RandomResizedCrop(16)], aug_transforms(size=16), workers)), (n,))

sized = dict(CropPad=22, RandomCrop=18, OldRandomCrop=18, Resize=20, RandomResizedCrop=18, RatioResize=22)
items = dict(FlipItem=FlipItem, DihedralItem=DihedralItem) | {k:partial(getattr(fastai.vision.augment, k), v) for k,v in sized.items()}
of_batch = {o.__name__:partial(o, p=.7) for o in (Flip,Dihedral,Rotate,Zoom,Warp,Brightness,Contrast,Saturation,Hue)}
of_batch |= dict(DeterministicFlip=DeterministicFlip, DeterministicDihedral=DeterministicDihedral, RandomResizedCropGPU=partial(RandomResizedCropGPU, 16))
of_batch |= dict(RandomErasing=partial(RandomErasing, p=.9, max_count=2))
bases = {'RandTransform','AffineCoordTfm','SpaceTfm','LightingTfm','HSVTfm'}

@pytest.mark.whole
def test_every_random_transform_of_fastai():
    found = {k for k,v in vars(fastai.vision.augment).items() if isinstance(v, type) and issubclass(v, Transform) and v.__module__=='fastai.vision.augment'}
    test_eq(found, {*items,*of_batch}|bases)
    mks = {k:vision([o(),Resize(16)]) for k,o in items.items()} | {k:vision(batch=[o()]) for k,o in of_batch.items()}
    same_on(usual(mks, 'FlipItem', 'RandomResizedCrop', 'Dihedral', 'Warp', 'Hue', 'RandomErasing'), (2,), lambda learn: learn.fit(1, .01))

class Recurrent(Module):
    def __init__(self, cls, batch_first): self.rnn,self.first,self.out = cls(8, 8, 2, dropout=.4, batch_first=batch_first),batch_first,nn.Linear(8, 3)
    def forward(self, x): return self.out(self.rnn(x if self.first else x.transpose(0, 1))[0].mean(1 if self.first else 0))

class Attends(Module):
    def __init__(self, batch_first): self.att,self.first,self.out = nn.MultiheadAttention(8, 2, dropout=.3, batch_first=batch_first),batch_first,nn.Linear(8, 3)
    def forward(self, x):
        x = x if self.first else x.transpose(0, 1)
        return self.out(self.att(x, x, x)[0].mean(1 if self.first else 0))

class Deep(Module):
    "Stochastic depth, for each sample"
    def __init__(self): self.conv = nn.Conv2d(6, 6, 1)
    def forward(self, x): return x+self.conv(x)*(torch.rand(len(x), 1, 1, 1)<.7)/.7 if self.training else x+self.conv(x)

class Connect(Module):
    "Drops out weights, which are as many as samples"
    def __init__(self): self.w,self.out = nn.Parameter(torch.randn(12, 12)*.1),nn.Linear(12, 3)
    def forward(self, x): return self.out(F.dropout(F.linear(x, F.dropout(self.w, .5, self.training)), .3, self.training))

class Loud(Module):
    "Counts, prints, and drops out weights, whose sum makes much of rounding: in doubles"
    calls = 0
    def __init__(self): self.lin,self.out = nn.Linear(768, 12).double(),nn.Linear(12, 3).double()
    def forward(self, x):
        Loud.calls += 1
        print(end='')
        return self.out(F.dropout(self.lin(x.double().flatten(1)), .4, self.training)+F.dropout(self.lin.weight, .5, self.training).sum())

class Timed(Module):
    "Reads the clock"
    def __init__(self): self.spent = 0.
    def forward(self, x):
        self.spent -= time.perf_counter()
        res = x*1.
        self.spent += time.perf_counter()
        return res

class Once(nn.Dropout):
    "Cannot be copied, so that its shapes tell"
    def __reduce_ex__(self, protocol): raise TypeError('one of a kind')

class Moving(Callback):
    "Keeps a moving average of the model's weights, which each forward pass of training changes in place"
    def before_fit(self):
        self.model[0].register_parameter('mean', nn.Parameter(self.model[0].weight.detach().clone(), requires_grad=False))
        self.model[0].register_forward_pre_hook(self.move)
    @staticmethod
    def move(m, _):
        if m.training: m.mean.data.lerp_(m.weight.data, .1)

encoder = lambda: nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, .2, batch_first=True), nn.Flatten(), nn.Linear(72, 3))
models = {k.__name__:net(conv(k)) for k in (nn.Dropout,nn.Dropout2d,nn.AlphaDropout,nn.FeatureAlphaDropout,Deep)}
models |= dict(once=net(lambda: nn.Sequential(nn.Conv1d(9, 6, 3), nn.Dropout1d(.3), nn.Flatten(), nn.Linear(36, 3)), texts),
    thrice=net(lambda: nn.Sequential(nn.Conv3d(1, 4, (1,3,3), 2), nn.Dropout3d(), nn.Flatten(), nn.Linear(392, 3)), images[:,None]),
    **{f'connect_{o}':net(Connect, texts[:,0].repeat(1, 2)[:,:12], bs=o) for o in (12,24)})
kinds = dict(lstm=partial(Recurrent, nn.LSTM), gru=partial(Recurrent, nn.GRU), attention=Attends)
sequences = {f'{k}_{o}':net(partial(v, o), texts) for k,v in kinds.items() for o in (True,False)} | dict(encoder=net(encoder, texts))

@sizes
@cases(**usual(models, 'Dropout', 'Deep', 'connect_12'))
def test_dropout_of_every_kind(cases, size): same_on(cases, (size,))

@pytest.mark.whole
@pytest.mark.replicas # its trial in shards is no copy
def test_models_that_print_count_and_change_their_weights():
    norm = lambda: nn.Sequential(nn.Conv2d(3, 6, 3, 2, bias=False), nn.BatchNorm2d(6), Timed(), nn.Flatten(), nn.Linear(294, 3))
    plain = lambda: nn.Sequential(nn.Conv2d(3, 6, 3, 2), nn.Flatten(), nn.Linear(294, 3))
    same_on(usual(dict(loud=net(Loud), norm=net(norm), moving=net(plain, cbs=lambda: Moving()), once=net(flat(Once))), 'loud', 'moving'), (3,))

class Hidden(Transform):
    "Has generators that lie deep: in a list of a `partial`, and around a function"
    split_idx = 0
    def __init__(self):
        rng,inner = np.random.default_rng(),random.Random()
        self.fs = [[partial(lambda x, r: x+r.random(), r=rng)], (lambda x: x*inner.random(),)]
    def encodes(self, o:TensorBase): return self.fs[1][0](self.fs[0][0](o))

_rng,_python = np.random.default_rng(),random.Random()
class Global(Transform):
    "Draws from generators that are global names of the script"
    split_idx = 0
    def encodes(self, o:TensorBase): return o+_rng.random()

class GlobalNoise(Callback):
    def before_batch(self): self.learn.xb = (self.x*_python.random(),)

@pytest.mark.whole
@pytest.mark.parametrize('workers', (pytest.param(0, marks=pytest.mark.whole),2))
def test_generators_that_lie_deep_or_are_global(workers):
    def mk(n, tfm=Hidden, **kw):
        xs = TensorBase(torch.linspace(0, 1, 320).view(40, 8))
        ds = Datasets(range(40), [[lambda i: xs[i], tfm()], [lambda i: i%2]], splits=(list(range(30)), list(range(30, 40))))
        torch.manual_seed(0)
        return Learner(ds.dataloaders(bs=bs//n, num_workers=workers, device='cpu'), nn.Linear(8, 2), loss_func=CrossEntropyLossFlat(), **kw)
    same_on(usual(dict(deep=mk, globals=partial(mk, tfm=Global), callback=lambda n: mk(n, Global, cbs=GlobalNoise())), 'deep', 'callback'), (3 if workers else 2,))

@pytest.mark.whole
def test_dropout_of_sequences(): same_on(usual(sequences, 'lstm_True', 'attention_False', 'encoder'), (2,))

class Noise(Callback):
    def before_batch(self):
        if self.training: self.learn.xb = (self.x+.1*torch.randn_like(self.x)*random.random(),)
    def after_pred(self): self.learn.pred = self.pred+.01*torch.randn(len(self.pred), 3)

class OwnNoise(Callback):
    def __init__(self): self.g,self.rng = torch.Generator(),np.random.default_rng()
    def before_batch(self): self.learn.xb = (self.x+torch.rand(self.x.shape, generator=self.g)*self.rng.random(),)

own_noise = dict(mixup=partial(MixUp, .4), cutmix=CutMix, noise=Noise, own=OwnNoise)
@sizes
@cases(**usual({k:net(flat(nn.Dropout), cbs=o) for k,o in own_noise.items()}, 'mixup', 'own'))
def test_noise_and_mixing_of_callbacks(cases, size): same_on(cases, (size,), batches=False)

class Labels:
    "Samples with noise, some with another class, by four generators"
    def __init__(self): self.g,self.rng = np.random.default_rng(),random.Random()
    def __len__(self): return n_all
    def __getitem__(self, i):
        x = images[i]+.1*self.g.normal()+.1*self.rng.random()+np.random.rand()*torch.rand(())
        return x,classes[i] if random.random()<.7 else torch.randint(3, ())

class Stream(IterableDataset):
    def __iter__(self): return ((images[i]+torch.randn(())*random.random(),classes[i]) for i in range(n_all))
    def __len__(self): return n_all

def noisy(ds, **kw): return lambda n: made(n, ds(), ds(), flat(nn.Dropout), **kw)
data = dict(plain=noisy(Labels, shuffle=True), torchs=noisy(Labels, cls=TorchLoader, shuffle=True))
workers = dict(plain=noisy(Labels, shuffle=True, num_workers=2), torchs=noisy(Labels, cls=TorchLoader, shuffle=True, num_workers=2, persistent_workers=True))

@pytest.mark.whole
def test_noise_of_data_sets():
    a,b = same_on(data, (3,)),same_on(workers, (2,))
    for k in a: assert alike(a[k]['batches'], b[k]['batches']), k

@pytest.mark.parametrize('cls', (DataLoader,TorchLoader))
def test_a_stream_is_refused(cls): assert 'Stream goes through its batches by its own __iter__' in refused(noisy(Stream, cls=cls))

def language_model(n):
    torch.manual_seed(0)
    ds = [torch.arange(i, i+60)%50 for i in range(20)]
    dls = DataLoaders(*[LMDataLoader(ds, bs=bs//n, seq_len=7, shuffle=o) for o in (True,False)])
    cfg = awd_lstm_lm_config|dict(emb_sz=12, n_hid=16, n_layers=2)
    return Learner(dls, get_language_model(AWD_LSTM, 50, cfg), loss_func=CrossEntropyLossFlat(), opt_func=SGD, cbs=rnn_cbs(2., 1.))

def text(n, longest=60):
    torch.manual_seed(0)
    r = random.Random(0)
    ds = [(LMTensorText(torch.randint(2, 50, (r.randint(20, longest),), generator=torch.Generator().manual_seed(i))),TensorCategory(i%3)) for i in range(29)]
    dls = DataLoaders(*[SortedDL(ds, bs=bs//n, shuffle=o, before_batch=pad_input_chunk, sort_func=lambda x: len(x[0])) for o in (True,False)])
    cfg = awd_lstm_clas_config|dict(emb_sz=12, n_hid=16, n_layers=2)
    dls.vocab = list(range(50))
    how = dict(loss_func=CrossEntropyLossFlat(), opt_func=SGD, metrics=accuracy)
    return text_classifier_learner(dls, AWD_LSTM, config=cfg, pretrained=False, drop_mult=.7, n_out=3, max_len=150, **how)

@pytest.mark.whole
def test_texts_of_many_chunks_are_refused_on_ranks():
    mk = partial(text, longest=300)
    on_each(dict(it=mk), 1)
    assert 'You set a seed, and a text is read in several chunks' in refused(mk)

def frame(n=60):
    r = np.random.RandomState(0)
    return pd.DataFrame(dict(u=r.randint(0, 9, n), i=r.randint(0, 9, n), r=r.rand(n), a=r.choice(list('xyz'), n), b=r.rand(n), y=r.choice(['p','q'], n)))

def tabular(n):
    dls = TabularDataLoaders.from_df(frame(), procs=[Categorify,Normalize], cat_names=['a'], cont_names=['r','b'], y_names='y', valid_idx=range(48,60), bs=bs//n, device='cpu')
    torch.manual_seed(0)
    return tabular_learner(dls, layers=[20,10], config=tabular_config(ps=[.2,.3], embed_p=.3), metrics=accuracy, opt_func=SGD)

def collab(n):
    dls = CollabDataLoaders.from_df(frame(), bs=bs//n, device='cpu', seed=3)
    torch.manual_seed(0)
    return collab_learner(dls, use_nn=True, layers=[10], y_range=(0,1), config=tabular_config(embed_p=.2, ps=[.3]), opt_func=SGD)

applications = dict(lm=language_model, text=text, tabular=tabular, collab=collab)
@sizes
@cases(**usual(applications, 'lm', 'text', 'tabular'))
def test_text_tabular_and_collab(cases, size): same_on(cases, (size,), batches=False, fit=lambda learn: learn.fit(1, .02))

def times(x, w): return x*torch.as_tensor(w).float().view(-1, *[1]*(x.ndim-1))
def changed(f, **kw):
    class Changes(Callback):
        def before_batch(self):
            if self.training: self.learn.xb = (f(self.x),)
    return net(flat(nn.Dropout), cbs=Changes, **kw)

class Collates(DataLoader):
    def create_batch(self, b):
        x,y = super().create_batch(b)
        return x*np.random.rand()*torch.rand(len(x), 1, 1, 1),y

def collate(b):
    x,y = torch.utils.data.default_collate(b)
    return x*random.random()*torch.rand(len(x), 1, 1, 1),y

class OfRank0(Callback):
    def before_batch(self): self.learn.rank==0 and (torch.rand(len(self.x), 3),np.random.rand(5),random.random())
def rank0(n):
    learn = net(flat(nn.Dropout), cbs=OfRank0)(n)
    learn.rank = rank_distrib()
    return learn

class Talks(Callback):
    "Exchanges something, so that no copy of it can be tried"
    def before_batch(self):
        self.learn.xb = (self.x+torch.rand(len(self.x), 3, 16, 16)*.1,)
        if num_distrib()>1: torch.distributed.all_reduce(torch.ones(1))

whole = dict(one=changed(lambda x: x*np.random.normal()),
    collate=changed(noop, cls=Collates), torchs=changed(noop, cls=TorchLoader, collate_fn=collate), rank0=rank0,
    talks=net(flat(nn.Dropout), cbs=Talks), flat=changed(lambda x: x*torch.rand(x.numel()).view(x.shape)),
    inner=changed(lambda x: x*torch.rand(3, len(x)*16, 16).view(3, -1, 16, 16).transpose(0, 1)))
@pytest.mark.whole
@sizes
@cases(**usual(whole, 'one', 'collate', 'rank0', 'inner'))
def test_what_is_drawn_once_for_a_batch(cases, size): same_on(cases, (size,))

class Numpy(Module):
    def __init__(self): self.lin,self.out = nn.Linear(768, 12),nn.Linear(12, 3)
    def forward(self, x): return self.out(times(self.lin(x.flatten(1)), np.random.rand(len(x)))*np.random.rand())

class Untried(Numpy):
    def __reduce_ex__(self, protocol): raise TypeError('one of a kind')

class TalksByNumpy(Callback):
    def before_batch(self):
        self.learn.xb = (times(self.x, np.random.rand(len(self.x))),)
        torch.distributed.all_reduce(torch.ones(1))

class Loudness(Transform):
    def encodes(self, x:TensorImage): return times(x, np.random.rand(len(x)))

class CollatesByNumpy(DataLoader):
    def create_batch(self, b):
        x,y = super().create_batch(b)
        return times(x, np.random.rand(len(x))),y

def collate_by_python(b):
    x,y = torch.utils.data.default_collate(b)
    return times(x, [random.random() for _ in b]),y

each = 'makes of a sample what depends on how many samples its batch has'
by_numpy = dict(beta=(changed(lambda x: times(x, np.random.beta(.4, .4, size=len(x)))),f'the callback Changes {each}'), model=(net(Numpy),f'the model {each}'),
    transform=(vision(batch=[Loudness()]),f'a batch transform {each}'),
    collate=(changed(noop, cls=CollatesByNumpy),f'the loader CollatesByNumpy {each}'),
    torchs=(changed(noop, cls=TorchLoader, collate_fn=collate_by_python),f'the collate function {each}'), untried=(net(Untried),'the model draws by Python or NumPy, and cannot be tried'),
    talks=(net(flat(), cbs=TalksByNumpy),'the callback TalksByNumpy draws by Python or NumPy, and cannot be tried'))

@pytest.mark.parametrize('mk,said', by_numpy.values(), ids=by_numpy)
@pytest.mark.by_default('model', 'transform', 'untried')
def test_what_numpy_and_python_draw_for_each_sample_is_refused(mk, said): assert f'You set a seed, and {said}' in refused(mk)

def tripled(x, i): return torch.where(torch.isin(torch.arange(len(x)), torch.tensor(i)).view(-1, *[1]*(x.ndim-1)), 3*x, x)
class OwnNumbers(Callback):
    def __init__(self): self.rng = np.random.default_rng()
    def before_batch(self): self.learn.xb = (times(self.x, self.rng.random(len(self.x))),)
def in_random_order(x): return x[torch.rand(len(x)).argsort()]
class DropBlock(Module):
    "Divides its mask by the mean of all samples"
    def forward(self, x):
        m = (torch.rand_like(x[:,:1])<.7).float()
        return x*m/m.mean()

escaping = dict(permutation=(changed(lambda x: x[np.random.permutation(len(x))]),'the callback Changes'), sample=(changed(lambda x: tripled(x, random.sample(range(len(x)), 2))),'the callback Changes'),
    rows=(changed(lambda x: tripled(x, torch.randint(len(x), (2,)))),'the callback Changes'), own=(net(flat(), cbs=OwnNumbers),'the callback OwnNumbers'), block=(net(conv(DropBlock)),'the model'),
    order=(changed(in_random_order),'the callback Changes'), transform=(vision(batch=[in_random_order]),'a batch transform'))

@pytest.mark.whole
@pytest.mark.parametrize('mk,who', escaping.values(), ids=escaping)
@pytest.mark.by_default('permutation', 'block')
def test_a_sample_that_depends_on_the_numbers_of_others_is_refused(mk, who): assert f'You set a seed, and {who} {each}' in refused(mk)

by_rows = dict(mask=lambda x: x*torch.tensor(np.random.rand(*x.shape)), row=lambda x: tripled(x, [np.random.randint(len(x))]),
    each=lambda x: times(x, [random.random() for _ in x]), bootstrap=lambda x: x[torch.randint(len(x), (len(x),))])
@pytest.mark.parametrize('f', by_rows.values(), ids=by_rows)
def test_what_depends_on_the_number_of_rows(f):
    def tried(i):
        with RandomStream(i): learned(lambda: f, torch.rand(6, 4), 6, 'it')
    with pytest.raises(SeedError, match=f'it {each}'):
        for i in range(4): tried(i)

class Later(Callback):
    "Draws for each sample, until nobody looks"
    def before_batch(self): self.learn.xb = (times(self.x, torch.rand(len(self.x))) if self.train_iter<1 else in_random_order(self.x),)

def compared(mk, path):
    "Compare the first two steps under a seed on two ranks with those of one process"
    def run(rank, name, n):
        learn = mk(n)
        with suppress(TraceEnd),learn.no_bar(),learn.no_logging(),learn.distrib_ctx(seed=42): learn.fit(1, cbs=ShortTrace(path/name, 2, again=name=='again'))
    for name,n in dict(one=1, again=1, two=2).items(): on_ranks(partial(run, name=name, n=n), n, timeout=110)
    return Comparison(path/'one', path/'two', path/'again')

def test_a_comparison_finds_what_nobody_sees(tmp_path):
    res = compared(net(flat(nn.Dropout), cbs=Later), tmp_path)
    assert not res.ok and 'Later' in str(res), res

@pytest.mark.whole
def test_compiled_models():
    def compiled(): return torch.compile(flat(nn.Dropout)(), backend='aot_eager', fullgraph=True)
    same_on(dict(plain=net(compiled)), (2,), batches=False)

class Latent:
    def __len__(self): return n_all-4
    def __getitem__(self, i): return torch.randn(6),images[i,:,:8,:8].contiguous()

def gan(n):
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(6, 16), nn.Dropout(.2), nn.Linear(16, 192), nn.Unflatten(1, (3,8,8)))
    critic = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Dropout(.3), nn.Linear(8, 1))
    dls = DataLoaders(*[DataLoader(Latent(), bs=bs//n, shuffle=o) for o in (True,False)])
    return GANLearner.wgan(dls, maker, critic, opt_func=partial(Adam, mom=0.), switcher=FixedGANSwitcher(1, 1))

@pytest.mark.whole
@pytest.mark.replicas # its loss calls the parts of the model, which in shards is an error that says so
@pytest.mark.filterwarnings('ignore')
def test_a_gan(): same_on(dict(gan=gan), (3,), fit=lambda learn: learn.fit(2, .001))

def evaluated(learn):
    learn.fit(1, .01)
    return [learn.get_preds(cbs=[MCDropoutCallback()])[0],learn.get_preds(cbs=[MCDropoutCallback()])[0],learn.validate()]

@pytest.mark.whole
def test_evaluations_that_draw():
    res = same_on(dict(net=net(flat(nn.Dropout))), (3,), fit=evaluated)['net']['result']
    assert not near(res[0], res[1])
    same_on(dict(vision=vision(batch=aug_transforms(size=16))), (2,), fit=lambda learn: learn.fit(1, .01) or [learn.tta(n=2)[0] for _ in range(2)])

@pytest.mark.whole
def test_a_search_for_a_learning_rate():
    same_on(dict(net=net(flat(nn.Dropout))), (2,), batches=False, fit=lambda learn: learn.lr_find(num_it=8, show_plot=False) and learn.fit(1, .01))

def test_shards(): same_on(usual(dict(plain=net(flat(nn.Dropout)), encoder=sequences['encoder']), 'encoder'), (3,), shard=True)
@pytest.mark.whole
def test_applications_in_shards():
    "An LSTM holds weak references and its weights a second time, and fastai's `WeightDropout` a method of its own: a trial in shards leaves them alone"
    same_on(applications, sizes=(2,), batches=False, fit=lambda learn: learn.fit(1, .02), shard=True)
@pytest.mark.whole
def test_activations_that_are_computed_again():
    kw = dict(auto_wrap_policy='transformer_based_wrap', transformer_cls_names_to_wrap=['TransformerEncoderLayer'])
    one, = on_each(dict(encoder=sequences['encoder']), 1)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, activation_checkpointing=True, **kw)
    for r in on_each(dict(encoder=sequences['encoder']), 2, fsdp_plugin=plugin): assert all(near(r['encoder'][k], one['encoder'][k]) for k in ('weights','losses'))

@pytest.mark.whole
def test_a_comparison_under_a_seed_includes_what_is_random(tmp_path):
    res = compared(models['Dropout'], tmp_path)
    assert res.ok and not any(o.random for o in res.rows if o.name!='Recorder.start_epoch'), res

def test_accumulation(): same_on(dict(plain=net(flat(nn.Dropout))), (3,), gradient_accumulation_steps=2)

class ByChance(Module):
    def __init__(self): self.lin = nn.Linear(12, 12)
    def forward(self, x): return self.lin(x) if random.random()<.5 else x

@pytest.mark.replicas # the option is DDP's
def test_what_python_draws_in_a_model_all_ranks_draw():
    same_on(dict(plain=net(flat(ByChance, nn.Dropout))), (2,), kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])

class Permutes(Callback):
    def before_batch(self): self.learn.xb = (self.x[torch.randperm(len(self.x))],)

def refused(mk, n=2):
    with pytest.raises(RankError) as e: on_each(dict(it=mk), n)
    return str(e.value)

def test_rrelu_is_refused_on_ranks():
    mk = net(conv(nn.RReLU))
    on_each(dict(it=mk), 1)
    assert 'You set a seed, and the model makes of a sample' in refused(mk)

def test_a_permutation_of_the_batch_is_refused_on_ranks():
    mk = net(flat(), cbs=Permutes)
    on_each(dict(it=mk), 1)
    assert f'the callback Permutes {each}' in (said := refused(mk)) and 'leave permutations to MixUp' in said


@pytest.mark.parametrize('seed', (-1,1.5,'42',True))
def test_a_seed_is_a_whole_number(seed):
    with pytest.raises(OptionError, match='an integer of at least 0'): net(flat())(1).to_distributed(seed=seed)

def test_ranks_have_one_seed():
    def run(rank):
        learn = net(flat())(2)
        with learn.no_bar(),learn.no_logging(),learn.distrib_ctx(seed=rank): learn.fit(1)
    with pytest.raises(RankError, match=r'Ranks have different seeds: \[0, 1\]'): on_ranks(run, 2)

def tuned(path, n):
    "Several fits in one context, of which rank 0 keeps the weights"
    learn = net(flat(nn.Dropout))(n)
    with learn.no_bar(),learn.no_logging(),learn.distrib_ctx(seed=42):
        learn.fine_tune(1, .01)
        learn.fit_one_cycle(1, .01)
    if not rank_distrib(): torch.save([*map(plain, learn.model.parameters())], path)

@pytest.mark.whole
def test_launchers(tmp_path):
    on_ranks(lambda rank: tuned(tmp_path/'one', 1), 1, join=False)
    Accelerator(nprocs=3, compute_setup='cpu').distribute(tuned, start='fork')(tmp_path/'distribute', 3)
    notebook_launcher(tuned, (tmp_path/'launcher',2), num_processes=2, use_port=str(free_port()))
    one,*many = [torch.load(tmp_path/o) for o in ('one','distribute','launcher')]
    for o in many: assert near(o, one)

def test_one_process_and_what_comes_after_a_context_draw_as_torch_does():
    x,found = torch.ones(100),[]
    def dropped():
        torch.manual_seed(1)
        return F.dropout(x)
    class Look(Callback):
        def after_pred(self): found.append(dropped())
    was = dropped()
    for ctx in ({},dict(seed=1)):
        learn = net(flat(), cbs=Look)(1)
        with learn.no_bar(),learn.no_logging(),learn.distrib_ctx(**ctx): learn.fit(1)
        test_eq(dropped(), was)
        assert found and all(torch.equal(o, was) for o in found)
        found.clear()

def test_every_exception_is_importable():
    import fastdist
    from fastdist.base import errors
    kinds = [k for k,v in vars(errors).items() if isinstance(v, type) and issubclass(v, BaseException) and k[0]!='_']
    for k in kinds: assert k in fastdist.__all__ and getattr(fastdist, k) is getattr(errors, k), k
