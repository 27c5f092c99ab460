"Lines of fastai and of its libraries train on ranks as in one process, and without a warning"
import pytest,transformers,warnings
from math import inf
from contextlib import nullcontext
from fastai.vision.all import *
from fastai.vision.gan import *
from fastai.tabular.all import *
from fastai.collab import *
from fastai.text.all import *
from fastdist import *

n,cut = 42,27 # items, of which the first are trained: two batches of 12 and one that is dropped; then one and one of 3

class Double(Callback):
    "In single precision rounding grows to 1e-2 within three steps of deep norms over few samples"
    def before_batch(self): self.learn.xb,self.learn.yb = (tuple(o.double() if o.is_floating_point() else o for o in b) for b in (self.xb,self.yb))

def sets(items, bs): return DataLoaders.from_dsets(items[:cut], items[cut:], bs=bs, num_workers=0, device='cpu')
def pictures(size): return [np.random.RandomState(i).randint(0, 255, (size,size,3), dtype=np.uint8) for i in range(n)]

def images(bs, size=32):
    imgs = list(map(PILImage.create, pictures(size)))
    block = DataBlock((ImageBlock,CategoryBlock), get_x=lambda i: imgs[i], get_y=lambda i: 'abc'[i%3], splitter=IndexSplitter(range(cut,n)))
    return block.dataloaders(range(n), bs=bs, num_workers=0, device='cpu')

def vision(bs, drop, arch): return vision_learner(images(bs), arch, pretrained=False, normalize=False, metrics=accuracy, **drop or {})

def masks(bs, size=32):
    imgs = pictures(size)
    block = DataBlock((ImageBlock,MaskBlock(['a','b'])), get_x=lambda i: PILImage.create(imgs[i]),
        get_y=lambda i: PILMask.create((imgs[i][...,0]>127).astype(np.uint8)), splitter=IndexSplitter(range(cut,n)))
    return block.dataloaders(range(n), bs=bs, num_workers=0, device='cpu')

def unet(bs, drop): return unet_learner(masks(bs), resnet18, pretrained=False, normalize=False, metrics=[DiceMulti(),foreground_acc])

def tabular(bs, drop):
    r = np.random.RandomState(0)
    df = pd.DataFrame(dict(size=r.randn(n), other=r.randn(n), kind=list('xyz')*(n//3), y=r.randint(0, 2, n)))
    dls = TabularDataLoaders.from_df(df, procs=[Categorify,FillMissing,Normalize], cat_names=['kind'], cont_names=['size','other'], y_names='y', y_block=CategoryBlock(),
        valid_idx=list(range(cut,n)), bs=bs)
    return tabular_learner(dls, layers=[8,4], config=tabular_config(ps=0. if drop else .1, embed_p=0. if drop else .1), metrics=accuracy)

def collab(bs, drop, **kw):
    r = np.random.RandomState(0)
    df = pd.DataFrame(dict(user=r.randint(0, 7, 60), item=r.randint(0, 5, 60), rating=r.rand(60)*5))
    return collab_learner(CollabDataLoaders.from_df(df, bs=bs, valid_pct=.3, seed=1), n_factors=4, y_range=(0,5.5), metrics=mae, **kw)

words = 'good bad fine poor great dull'.split()
def texts(): return pd.DataFrame(dict(text=['the movie was '+' '.join([words[i*j%6] for j in range(i%9+1)]) for i in range(n)], label=[str(i%3) for i in range(n)]))
def small(config): return config | dict(emb_sz=8, n_hid=10)
keep = 1e-12 # with 0, fastai's WeightDropout cannot reset its weights

def text_loaders(bs, *blocks, **kw):
    block = TextBlock.from_df('text', tok=BaseTokenizer(), rules=[], n_workers=1, **kw)
    return DataBlock((block,*blocks), get_x=ColReader('text'), splitter=IndexSplitter(range(cut,n)), **dict(get_y=ColReader('label')) if blocks else {}).dataloaders(
        texts(), bs=bs, num_workers=0, device='cpu')

def language_model(bs, drop):
    dls = text_loaders(bs, is_lm=True, seq_len=5)
    return language_model_learner(dls, AWD_LSTM, config=small(awd_lstm_lm_config), drop_mult=keep if drop else 1., pretrained=False,
        metrics=[accuracy,Perplexity()])

def text_classifier(bs, drop):
    dls = text_loaders(bs, CategoryBlock)
    return text_classifier_learner(dls, AWD_LSTM, config=small(awd_lstm_clas_config), drop_mult=keep if drop else 1., ps=[0.] if drop else None,
        pretrained=False, metrics=accuracy)

class Logits(Callback):
    def after_pred(self): self.learn.pred = self.pred.logits

def bert(bs, drop):
    config = transformers.BertConfig(vocab_size=40, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=3,
        **dict(hidden_dropout_prob=0., attention_probs_dropout_prob=0.) if drop else {})
    data = [(torch.randint(0, 40, (7,)), i%3) for i in range(n)]
    return Learner(sets(data, bs), transformers.BertForSequenceClassification(config), loss_func=CrossEntropyLossFlat(), metrics=accuracy, cbs=Logits())

def hf_resnet(bs, drop):
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8,16], depths=[1,1], layer_type='basic', num_labels=3)
    data = [(torch.randn(3,32,32), i%3) for i in range(n)]
    return Learner(sets(data, bs), transformers.ResNetForImageClassification(config), loss_func=CrossEntropyLossFlat(), metrics=accuracy, cbs=Logits())

def ts(bs, drop):
    tsai = pytest.importorskip('tsai.basics')
    from tsai.models.InceptionTime import InceptionTime
    set_seed(1) # the import draws
    r = np.random.RandomState(0)
    X,y = r.randn(n,2,20).astype('float32'),np.array(['a','b'])[r.randint(0, 2, n)]
    splits,tfms = (list(range(cut)),list(range(cut,n))),[None,tsai.TSClassification()]
    dls = tsai.get_ts_dls(X, y, splits=splits, tfms=tfms, batch_tfms=tsai.TSStandardize(by_sample=True), bs=bs,
        num_workers=0, device='cpu')
    return tsai.ts_learner(dls, InceptionTime, metrics=accuracy, nf=4)

def smp(bs, drop):
    smp = pytest.importorskip('segmentation_models_pytorch')
    data = [(torch.tensor(o).permute(2,0,1)/255, torch.tensor(o[...,0]>127).long()) for o in pictures(32)]
    return Learner(sets(data, bs), smp.Unet('resnet18', encoder_weights=None, classes=2), loss_func=CrossEntropyLossFlat(axis=1), metrics=[Dice(),foreground_acc])

lines = dict(unet=unet, tabular=tabular, collab=collab, collab_nn=partial(collab, use_nn=True, layers=[8]),
    language_model=language_model, text_classifier=text_classifier,
    bert=bert, hf_resnet=hf_resnet, resnet18=partial(vision, arch=resnet18), ts=ts, smp=smp)
archs = ('efficientnet_b0','mobilenetv3_small_050','regnetx_002','resnetv2_18','convnext_atto','test_vit')
lines |= {o:partial(vision, arch=o) for o in archs}
deep = 'resnet18',*archs
with_whole = 'ts','smp','unet','resnet18',*archs # of the first two the packages are not among those for development, the others take up to a minute each
modes = dict(replicas=(2,{}), of_three=(3,{}), shards=(2,dict(shard=True)), seed=(2,dict(seed=42)), seed_of_three=(3,dict(seed=42)))
def case(line, mode, turn): return pytest.param(line, mode, id=f'{line}-{mode}', marks=pytest.mark.whole if line in with_whole or turn%len(modes) else ())
cases = [case(o, m, i-j) for i,o in enumerate(lines) for j,m in enumerate(modes)] # by default each line in one mode, the modes in turn
others = DeprecationWarning,PendingDeprecationWarning,FutureWarning,ResourceWarning

plain_sgd = partial(SGD, mom=0.)

class InDouble(CrossEntropyLossFlat):
    "That of fastai divides in single precision, in which a third is rounded, and deep norms over few samples make 2e-3 of it; this one agrees to 1e-10"
    def __call__(self, inp, targ, **kw): return F.cross_entropy(inp.as_subclass(Tensor), targ.as_subclass(Tensor), reduction=kw.get('reduction', self.reduction)).float()

def trained(line, size=1, ctx=None, drop=None, loss=None):
    "Return weights, values and predictions after two epochs of `line`, and what was said"
    set_seed(1)
    was = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        learn = lines[line](12//size, drop)
        learn.model.double()
        if loss: learn.loss_func = loss()
        learn.add_cb(Double())
        if drop: learn.opt_func = plain_sgd # each error in the scale of a gradient shows, which Adam divides out
        learn.recorder.add_time = False
        with nullcontext() if ctx is None else learn.distrib_ctx(**ctx), learn.no_bar(), learn.no_logging():
            learn.fit(2, 1e-2 if drop else 1e-4)
            values = [[*o] for o in learn.recorder.values]
            preds,targs = learn.get_preds(reorder=line!='language_model') # as fastai, which cannot reorder several batches of one
    torch.set_default_dtype(was)
    return dict(weights=learn.model.state_dict(), values=values, preds=preds, targs=targs),{str(o.message) for o in said if not issubclass(o.category, others)}

def gap(a, b):
    "Return the largest difference of nested numbers, relative above 1"
    if isinstance(a, dict): return gap([*a.values()], [*b.values()]) if [*a]==[*b] else inf
    if isinstance(a, (tuple,list,L)): return max(map(gap, a, b), default=0.) if len(a)==len(b) else inf
    a,b = (torch.as_tensor(o).as_subclass(Tensor).double() for o in (a,b))
    return max(((a-b).abs()/b.abs().clamp(min=1)).flatten().tolist(), default=0.) if a.shape==b.shape else inf

@pytest.mark.slow
@pytest.mark.parametrize('line,mode', cases)
@pytest.mark.by_default('bert')
def test_as_in_one_process(line, mode):
    size,ctx = modes[mode]
    drop = None if ctx.get('seed') else dict(ps=0.)
    loss = InDouble if mode=='of_three' and line in deep else None
    plain,expected = trained(line, 1, None, drop, loss)
    if ctx.get('seed'): (plain,expected), = on_ranks(lambda rank: trained(line, 1, ctx), 1, join=False, timeout=100)
    for got,said in on_ranks(lambda rank: trained(line, size, ctx, drop, loss), size, join=False, timeout=200):
        assert not said-expected, said-expected
        for k,v in plain.items(): assert gap(got[k], v)<1e-6, (k, gap(got[k], v))

# A loss that holds models

def noise(i): return torch.randn(10, generator=torch.Generator().manual_seed(i))
def picture(i): return PILImage.create(np.random.RandomState(i).randint(0, 255, (16,16,3), dtype=np.uint8))

def gan(size, ctx):
    "Return weights and losses of a Wasserstein GAN, whose samples and their order are given"
    set_seed(7)
    block = DataBlock(blocks=(TransformBlock,ImageBlock), get_x=noise, get_y=picture, splitter=IndexSplitter([]))
    dls = block.dataloaders(list(range(48)), bs=12//size, num_workers=0, device='cpu')
    dls.train.shuffle = False
    nets = basic_generator(16, n_channels=3, in_sz=10, n_features=8),basic_critic(16, n_channels=3, n_features=8)
    learn = GANLearner.wgan(dls, *nets, opt_func=plain_sgd, switcher=FixedGANSwitcher(n_crit=2, n_gen=1))
    learn.recorder.train_metrics,learn.recorder.valid_metrics = True,False
    with ctx(learn), learn.no_bar(), learn.no_logging(): learn.fit(2, 1e-2, wd=0)
    return learn.model.state_dict(),learn.recorder.losses

@pytest.mark.slow
@pytest.mark.parametrize('size', [3,*(pytest.param(o, marks=pytest.mark.whole) for o in (2,4))])
def test_a_gan_as_in_one_process(size):
    "Its loss is a mean over samples, which no trial can tell"
    state,losses = gan(1, nullcontext)
    for got,vals in on_ranks(lambda rank: gan(size, Learner.distrib_ctx), size, join=False, timeout=100):
        assert gap(dict(got), dict(state))<1e-5 and gap(vals, losses)<1e-5
