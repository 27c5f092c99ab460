"Predictions, and all that is made of them, are on every rank those of one process: all rows, once, in the data set's order"
import itertools,matplotlib,pytest,warnings
from contextlib import nullcontext
from functools import cache
matplotlib.use('agg')
from torch.utils.data import DataLoader as TorchLoader
from fastcore.test import ExceptionExpected,test_eq,test_ne
from fastai.vision.all import *
from fastai.text.all import SortedDL,pad_input
from fastdist import *
from compare import *
import learners

def rows(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    return list(zip(torch.randn(n, 8, generator=g), torch.randint(0, 3, (n,), generator=g)))

def plain(n, bs, rank=0, **kw):
    set_seed(3)
    learn = learner((rows(n),rows(n, 1)), nn.Sequential(nn.Linear(8,6), nn.ReLU(), nn.Linear(6,3)), bs, rank, **kw)
    learn.metrics = L(AvgMetric(accuracy), F1Score(average='macro'))
    return learn

ragged = partial(plain, drop_last=False)

def within(learn, **kw):
    with learn: return learn.get_preds(inner=True, **kw)

def gathered(learn):
    cb = GatherPredsCallback(with_input=True, with_loss=True)
    with learn.loss_not_reduced(): record = learn.validate(cbs=cb)
    return cb.all_tensors(),record

parts = dict(with_input=True, with_loss=True)
all_parts = dict(parts, with_decoded=True)

@sizes
@cases(
    valid=lambda o: o.get_preds(),
    train=lambda o: o.get_preds(0),
    train_dl=lambda o: o.get_preds(dl=o.dls.train),
    test_dl=lambda o: o.get_preds(dl=o.dls.test_dl(rows(5, 2))),
    all_parts=lambda o: o.get_preds(**all_parts),
    parts_of_train=lambda o: o.get_preds(0, **all_parts),
    act=lambda o: o.get_preds(act=torch.sigmoid),
    no_preds=lambda o: o.get_preds(with_preds=False, with_loss=True),
    no_targs=lambda o: o.get_preds(with_targs=False, with_input=True),
    nothing=lambda o: o.get_preds(with_preds=False, with_targs=False),
    inner=within,
    inner_train=lambda o: within(o, ds_idx=0, with_loss=True),
    a_batch=lambda o: o.get_preds(dl=[fa_collate(rows(5, 2))]),
    torch_loader=lambda o: o.get_preds(dl=TorchLoader(o.dls.valid_ds, o.dls.valid.bs)),
    callback=gathered)
def test_get_preds(cases, size): check(plain, size, cases, runs)

def shuffled(learn): return learn.dls.valid.new(shuffle=True)

@pytest.mark.whole
@sizes
@cases(
    shuffled=lambda o: o.get_preds(dl=shuffled(o)),
    all_parts=lambda o: o.get_preds(dl=shuffled(o), **all_parts),
    inner=lambda o: within(o, dl=shuffled(o)),
    train=lambda o: o.get_preds(dl=o.dls.train),
    loaders_order=lambda o: o.get_preds(dl=shuffled(o), reorder=False, with_input=True),
    trains_order=lambda o: o.get_preds(dl=o.dls.train, reorder=False, with_loss=True))
def test_shuffled(cases, size): check(ragged, size, cases, runs)

def test_each_rank_shuffles_in_another_way():
    "Left to itself; so the test above is of orders that had to be agreed on"
    a,b = on_ranks(lambda rank: list(shuffled(plain(37, 4, rank)).get_idxs()), join=False)
    test_eq(sorted(a), sorted(b))
    test_ne(a, b)

@sizes
@cases(
    valid=lambda o: o.validate(),
    train=lambda o: o.validate(0),
    shuffled=lambda o: o.validate(dl=shuffled(o)),
    other_dl=lambda o: o.validate(dl=o.dls.test_dl(rows(5, 2))),
    twice=lambda o: [o.validate(),o.validate()])
def test_validate(cases, size): check(plain, size, cases, runs)

def fetched(learn, **kw):
    cb,seen = FetchPredsCallback(**kw),[]
    learn.fit(2, 0.1, cbs=[cb, Callback(after_epoch=lambda self: seen.append(cb.preds))])
    return seen,learn.recorder.values

@sizes
@cases(
    valid=fetched,
    train=partial(fetched, ds_idx=0, with_input=True, with_decoded=True),
    test=lambda o: fetched(o, dl=o.dls.test_dl(rows(5, 2))),
    shuffled=lambda o: fetched(o, dl=shuffled(o)))
def test_fetch_preds_in_a_fit(cases, size): check(ragged, size, cases)

names = 'save_preds','save_targs'

def saved(root, ds_idx, learn):
    paths = {k:Path(root)/f'{len(learn.dls.valid_ds)}_{ds_idx}'/k for k in names}
    for o in paths.values(): o.mkdir(parents=True, exist_ok=True)
    return learn.get_preds(ds_idx, with_preds=False, with_targs=False, **paths)

def in_files(path): return torch.cat([torch.load(o, weights_only=False) for o in sorted(path.iterdir(), key=lambda o: int(o.name))])

@pytest.mark.whole
@sizes
def test_saved_preds(size):
    for f,root in (on_one,'one'),(on_all,'many'): f(plain, size, {i:partial(saved, root, i) for i in range(2)}, runs)
    for (n,_),i in itertools.product(runs, range(2)):
        for k in names: assert_same(*[in_files(Path(o)/f'{n}_{i}'/k) for o in ('one','many')])
        test_eq(in_files(Path('many')/f'{n}_{i}'/'save_targs'), tensor([y for _,y in rows(n, i)]))

def only_here(learn, error=False):
    with ExceptionExpected(ZeroDivisionError) if error else nullcontext(), learn.preds_on_rank0():
        few,all_ = learn.get_preds(),learn.get_preds(**all_parts)
        if error: 1/0
    return few,all_,learn.get_preds(**all_parts)

@pytest.mark.by_default('True')
@sizes
@pytest.mark.parametrize('error', (False,True))
def test_preds_on_rank0(size, error):
    args = plain,size,dict(f=partial(only_here, error=error)),runs
    one,(first,*others) = on_one(*args),on_all(*args)
    assert_same(one, first)
    nothing = [dict(f=((None,)*2,(None,)*5,o['f'][2])) for o in one]
    for o in others: assert_same(nothing, o)

class Brighter(Transform):
    "An augmentation that leaves nothing to chance"
    split_idx,order = 0,20
    def encodes(self, x:TensorImage): return 1-x*x

def pictures(n, bs, rank=0):
    imgs = [PILImage.create(np.random.RandomState(i).randint(0, 255, (4,4,3), dtype=np.uint8)) for i in range(n+4)]
    dblock = DataBlock((ImageBlock,CategoryBlock), get_x=lambda i: imgs[i], get_y=lambda i: 'abc'[i%3], splitter=IndexSplitter(range(4, n+4)),
        batch_tfms=Brighter)
    set_seed(3)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48,3))
    set_seed(5+rank)
    return Learner(dblock.dataloaders(range(n+4), bs=bs, num_workers=0, device='cpu'), model)

@sizes
@cases(
    valid=lambda o: o.tta(),
    train=lambda o: o.tta(0, n=2),
    both=lambda o: o.tta(n=2, beta=None),
    best=lambda o: o.tta(n=2, use_max=True),
    test_dl=lambda o: o.tta(dl=o.dls.test_dl([3,1,2]), n=1))
def test_tta(cases, size): check(pictures, size, cases)

@sizes
@cases(
    some=lambda o: [o.predict(i) for i in (3,0)],
    with_input=lambda o: o.predict(1, with_input=True)[1:],
    unlabelled=lambda o: o.get_preds(dl=o.dls.test_dl([3,1,2,0,1])),
    labelled=lambda o: o.get_preds(dl=o.dls.test_dl([3,1,2], with_labels=True), with_loss=True))
@pytest.mark.by_default('3')
def test_predict(cases, size): check(pictures, size, cases)

def titles(f, **kw):
    plt.close('all')
    f(**kw)
    return [o.get_title() for o in plt.gcf().axes]

@sizes
def test_show_results(size): check(pictures, size, dict(shown=lambda o: titles(o.show_results, shuffle=False, max_n=4)))

def interpreted(learn, **kw):
    o = Interpretation.from_learner(learn, **kw)
    return o.losses,o.top_losses(1),o.top_losses(largest=False, items=True),o[[0]]

def classes(learn, **kw):
    o = ClassificationInterpretation.from_learner(learn, **kw)
    return o.confusion_matrix(),o.most_confused(),o.top_losses()

def plotted(learn): return titles(ClassificationInterpretation.from_learner(learn).plot_top_losses, k=range(1))

@sizes
@cases(
    valid=interpreted,
    train=partial(interpreted, ds_idx=0),
    classes=classes,
    classes_of_train=partial(classes, ds_idx=0),
    shuffled=lambda o: classes(o, dl=shuffled(o)),
    plotted=plotted)
@pytest.mark.by_default('3')
def test_interpretation(cases, size): check(pictures, size, cases)

def masks(n, bs, rank=0):
    g = torch.Generator().manual_seed(1)
    data = list(zip(torch.randn(n, 2, 3, 3, generator=g), torch.randint(0, 2, (n,3,3), generator=g)))
    set_seed(3)
    return learner((data,data), nn.Conv2d(2, 2, 1), bs, rank, CrossEntropyLossFlat(axis=1))

@pytest.mark.whole
@sizes
def test_segmentation_interpretation(size): check(masks, size, dict(losses=lambda o: SegmentationInterpretation.from_learner(o).top_losses()))

@cache
def made(name):
    set_seed(3)
    return getattr(learners, name)()

def of_kind(name, n, bs, rank=0):
    set_seed(5+rank)
    learn = made(name)
    learn.dls.loaders = [o.new(bs=bs) for o in learn.dls.loaders]
    return learn

@pytest.mark.whole
@sizes
@pytest.mark.parametrize('name', 'tabular collab text_classifier'.split())
@cases(
    valid=lambda o: o.get_preds(with_decoded=True, with_loss=True),
    train=lambda o: o.get_preds(0),
    record=lambda o: o.validate())
@pytest.mark.by_default('tabular-2', 'collab-3')
def test_kinds_of_loaders(cases, name, size): check(partial(of_kind, name), size, cases, [(0,4),(0,5)])

@pytest.mark.whole
@sizes
@cases(
    row=lambda o: o.predict(pd.Series(dict(size=7, kind='y')))[1:],
    frame=lambda o: o.get_preds(dl=o.dls.test_dl(pd.DataFrame(dict(size=range(5), kind='x')))))
def test_rows_of_a_table(cases, size): check(partial(of_kind, 'tabular'), size, cases, [(0,4),(0,2)])

def sorted_texts(learn):
    "Inputs without the padding, of which there is as much as a batch needs"
    assert isinstance(learn.dls.valid, SortedDL)
    x,p,y = learn.get_preds(with_input=True)
    return [o[o!=1] for o in x],p,y

@pytest.mark.whole
@sizes
@cases(
    valid=sorted_texts,
    new=lambda o: o.get_preds(dl=o.dls.test_dl(['fine','a fine movie','a movie','bad bad bad bad','good'])))
@pytest.mark.by_default('3')
def test_sorted_texts(cases, size): check(partial(of_kind, 'text_classifier'), size, cases, [(0,1),(0,8)])

class Outputs(nn.Module):
    "Two outputs for each sample, put together by `form`"
    def __init__(self, form):
        super().__init__()
        self.form,self.a,self.b = form,nn.Linear(4,2),nn.Linear(4,3)
    def forward(self, x): return self.form(self.a(x), self.b(x))

def two_losses(pred, a, b, reduction='mean'):
    x,y = pred.values() if isinstance(pred, dict) else pred
    loss = (x-a).pow(2).mean(1)+((y[0] if is_listy(y) else y)-b).pow(2).mean(1)
    return loss.mean() if reduction=='mean' else loss

class OneInput(list): n_inp = 1

def nested(form, n, bs, rank=0):
    g = torch.Generator().manual_seed(1)
    data = OneInput(zip(*[torch.randn(n, k, generator=g) for k in (4,2,3)]))
    set_seed(3)
    return learner((data,data), Outputs(form), bs, rank, two_losses)

@pytest.mark.whole
@sizes
@pytest.mark.parametrize('form', [lambda a,b: (a,b), lambda a,b: [a,b], lambda a,b: (a,[b,a])], ids='tuple list both'.split())
@cases(
    parts=lambda o: o.get_preds(**parts),
    shuffled=lambda o: o.get_preds(dl=shuffled(o)),
    record=lambda o: o.validate())
@pytest.mark.by_default('tuple-2', 'both-3')
def test_tuples(cases, form, size): check(partial(nested, form), size, cases)

@pytest.mark.whole
@sizes
@cases(
    parts=lambda o: o.get_preds(reorder=False, **parts),
    record=lambda o: o.validate())
def test_dicts(cases, size): check(partial(nested, lambda a,b: dict(a=a, b=b)), size, cases)

class Upright(nn.Linear):
    "Samples along the second axis"
    def forward(self, x): return super().forward(x).T[:,:,None]

def upright(n, bs, rank=0):
    set_seed(3)
    return learner((rows(n),rows(n, 1)), Upright(8,3), bs, rank, lambda p,y: F.cross_entropy(p[:,:,0].T, y))

@pytest.mark.whole
@sizes
def test_samples_along_the_second_axis(size): check(upright, size, dict(preds=lambda o: o.get_preds(concat_dim=1, with_targs=False, reorder=False)))

def sentences(n): return [(torch.randint(2, 9, (k,), generator=torch.Generator().manual_seed(k)), k) for k in [2+i*5%7 for i in range(n)]]

def padded(n, bs, rank=0):
    set_seed(3)
    model = nn.Sequential(nn.Embedding(9,4), nn.Linear(4,2))
    return learner((sentences(n),sentences(n)), model, bs, rank, lambda p,y: p.mean(), before_batch=pad_input)

def unpadded(preds, n): return [x[:k] for x,(_,k) in zip(preds, sentences(n), strict=True)]

@pytest.mark.by_default('True')
@sizes
@pytest.mark.parametrize('reorder', (True,False))
def test_shapes_that_differ_between_batches(size, reorder):
    "Either each sample's predictions, however padded, or the same error everywhere"
    args = padded,size,dict(f=lambda o: list(o.get_preds(reorder=reorder)[0])),runs
    one,many = on_one(*args),on_all(*args, call=attempt)
    for rank,(i,(n,_)) in itertools.product(many, enumerate(runs)):
        a,b = one[i]['f'],rank[i]['f']
        if isinstance(b, Failure): test_eq((b,'Error: ' in b), (many[0][i]['f'],True))
        else: assert_same(unpadded(a, n), unpadded(b, n))

def stats(rank):
    learn = plain(5, 2, rank)
    with warnings.catch_warnings(record=True) as said, learn.distrib_ctx(), learn.no_bar(), learn.no_logging():
        warnings.simplefilter('always')
        learn.fit(1, cbs=[ActivationStats(),Callback(before_epoch=lambda self: self.learn.__dict__.setdefault('early', len(said)))])
        learn.fit(1, cbs=ActivationStats())
    return [learn.early,*[str(o.message) for o in said if 'ActivationStats' in str(o.message)]]

def test_activation_stats_are_said_to_be_those_of_a_rank():
    "Once, before the first batch, by rank 0"
    (early,text),(_,) = on_ranks(stats, join=False)
    assert early and 'statistics are those of rank 0' in text, text

class Keep(Callback):
    def __init__(self, hooks): self.hooks,self.seen = hooks,[]
    def after_batch(self): self.seen += [tuple(o) for o in self.hooks.stored[0].tolist()]

def hooked(learn):
    cb = Keep(Hooks([learn.model[0]], lambda m,i,o: i[0]))
    with cb.hooks: learn.validate(cbs=cb)
    return set(cb.seen)

def outputs(learn):
    with hook_outputs([learn.model[0]]) as hooks: learn.get_preds(dl=[fa_collate(rows(5, 2))])
    return hooks.stored

@sizes
def test_a_hook_sees_each_sample_on_some_rank(size):
    args = plain,size,dict(seen=hooked),runs
    one,many = on_one(*args),on_all(*args)
    for i,o in enumerate(one): test_eq(set.union(*(m[i]['seen'] for m in many)), o['seen'])

class Counted(Callback):
    "What a user counts and collects in evaluations; the sum over ranks is asked for outside"
    def before_validate(self): self.n,self.correct,self.seen = 0,0,[]
    def after_batch(self):
        if self.training: return
        self.n += len(self.yb[0])
        self.correct += int((self.pred>0).sum())
        self.seen += self.xb[0][:,0].tolist()

class InTurn(torch.utils.data.IterableDataset):
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __iter__(self): return iter(rows(self.n, 3))

def counted(learn, cb):
    learn.validate(cbs=cb)
    res = [cb.n,cb.correct,sorted(cb.seen)]
    learn.validate(dl=TorchLoader(InTurn(5), batch_size=learn.dls.bs), cbs=cb)
    return [*res,cb.n,cb.correct,sorted(cb.seen)]

@sizes
def test_what_callbacks_count_adds_up_over_ranks(size):
    "Also where a batch has fewer samples than ranks, and where all ranks make its step"
    args = plain,size,dict(counted=lambda o: counted(o, Counted())),runs
    one,many = on_one(*args),on_all(*args)
    for i,o in enumerate(one):
        parts = list(zip(*[m[i]['counted'] for m in many]))
        test_eq([sorted(itertools.chain(*v)) if k%3==2 else sum(v) for k,v in enumerate(parts)], o['counted'])

@pytest.mark.whole
@sizes
def test_hooks_on_a_batch_of_each_rank(size): check(plain, size, dict(outputs=outputs))

def come_and_go(rank):
    learn = plain(5, 1, rank)
    for _ in range(10):
        with learn.distrib_ctx(): pass
    with learn.distrib_ctx(), learn.no_bar(): return learn.validate()

@pytest.mark.whole
def test_contexts_in_which_nothing_is_exchanged():
    "No rank leaves before the others have come"
    a,b,c = on_ranks(come_and_go, 3, join=False)
    assert a==b==c
