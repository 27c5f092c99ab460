"Models of all kinds, sharded in the units that they get without being asked: outputs and gradients of two ranks are those of one process, in training and in evaluation, with recomputation too"
import pytest,torchvision,warnings
from types import SimpleNamespace
from fastai.vision.all import *
from fastai.text.all import *
from fastai.tabular.all import *
from fastai.collab import *
from fastcore.test import test_eq
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard,FSDPModule
from torch.distributed.fsdp.wrap import ModuleWrapPolicy,CustomPolicy,size_based_auto_wrap_policy
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrizations
from torchvision.models import convnext,densenet,efficientnet,resnet,swin_transformer,vgg,vision_transformer,mobilenet_v3_small,regnet_y_400mf
from fastdist.job.fork import *
from fastdist.train.units import *
from fastdist.train.recompute import *

def plan(**kw): return SimpleNamespace(**{**dict(classes=(), min_params=None, policy=None, one_unit=False, ignored=None), **kw})

class Attn(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q,self.k,self.v,self.o = [nn.Linear(d, d) for _ in range(4)]
    def forward(self, x): return self.o(F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))

class Block(nn.Module):
    def __init__(self, d, p=0.):
        super().__init__()
        self.ln1,self.attn,self.ln2 = nn.LayerNorm(d),Attn(d),nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, 4*d), nn.GELU(), nn.Dropout(p), nn.Linear(4*d, d))
    def forward(self, x, scale=1.):
        x = x+self.attn(self.ln1(x))*scale
        return x+self.mlp(self.ln2(x))

class GPT(nn.Module):
    "As GPT-2 is in Transformers: a `ModuleDict`, a list of blocks, tied weights, a parameter without dimensions"
    def __init__(self, n=3, d=8, v=50, tied=True, p=0.):
        super().__init__()
        self.transformer = nn.ModuleDict(dict(wte=nn.Embedding(v, d), h=nn.ModuleList(Block(d, p) for _ in range(n)), ln_f=nn.LayerNorm(d)))
        self.lm_head,self.scale = nn.Linear(d, v, bias=False),nn.Parameter(torch.ones(()))
        if tied: self.lm_head.weight = self.transformer.wte.weight
    def forward(self, x):
        x = self.transformer.wte(x)
        for b in self.transformer.h: x = b(x, scale=self.scale)
        return self.lm_head(self.transformer.ln_f(x))

class Llama(GPT):
    "Names its blocks, beside others that it does not have"
    _no_split_modules = ['Attn','OtherBlock']

class Stage(nn.Module):
    def __init__(self, d, n):
        super().__init__()
        self.down,self.blocks = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, d)),nn.Sequential(*[Block(d) for _ in range(n)])
    def forward(self, x): return self.blocks(self.down(x))

class Experts(nn.Module):
    "Runs only the experts that its samples need"
    def __init__(self, d=8):
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(d, 2*d), nn.ReLU(), nn.Linear(2*d, d)) for _ in range(4))
    def forward(self, x):
        kind = (x.sum(1)>0).long()
        return x+sum(self.experts[k](x)*(kind==k)[:,None] for k in kind.unique().tolist())

class Heads(nn.Module):
    "Chooses one of its heads by the data"
    def __init__(self, d=8):
        super().__init__()
        self.body,self.heads = nn.Sequential(nn.Linear(d, d), nn.ReLU()),nn.ModuleDict({o:nn.Sequential(nn.Linear(d, 9), nn.ReLU(), nn.Linear(9, 1)) for o in ('pos','neg')})
    def forward(self, x): return torch.cat([self.heads['pos' if o.sum()>0 else 'neg'](o) for o in self.body(x)[:,None]])

class Repeats(nn.Module):
    "Calls a block twice"
    def __init__(self):
        super().__init__()
        a,b = Block(8),Block(8)
        self.blocks = nn.ModuleList([a,b,a])
    def forward(self, x):
        for b in self.blocks: x = b(x)
        return x

class Padded(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=0., batch_first=True), 2)
    def forward(self, x): return self.enc(x, src_key_padding_mask=(torch.arange(6)>3)[None].expand(len(x), -1))[:,:4]

def images(n=32): return lambda g: torch.randn(4, 3, n, n, generator=g)
def tokens(v=40, n=12): return lambda g: torch.randint(2, v, (4, n), generator=g)
def floats(*shape): return lambda g: torch.randn(4, *shape, generator=g)
def small(cfg): return {**{k:0. if k.endswith('_p') and k!='weight_p' else v for k,v in cfg.items()}, 'emb_sz':12, 'n_hid':20}
def body(): return nn.Sequential(ConvLayer(3, 8, stride=2), nn.Sequential(*[ResBlock(1, 8, 8) for _ in range(2)]), ConvLayer(8, 16, stride=2), ConvLayer(16, 24, stride=2))
def norms():
    return nn.Sequential(nn.Linear(8,50), parametrizations.spectral_norm(nn.Linear(50,50)), parametrizations.weight_norm(nn.Linear(50,50)), nn.Linear(50,20))

convnext_cfg = [convnext.CNBlockConfig(12, 24, 2), convnext.CNBlockConfig(24, 48, 3), convnext.CNBlockConfig(48, None, 2)]
kinds = dict(
    resnet=(lambda: resnet.ResNet(resnet.Bottleneck, [1,2,1,1], 4, width_per_group=8), images(), 5),
    vgg=(lambda: nn.Sequential(vgg.make_layers([8,'M',16,16,'M',32,'M']), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32,64), nn.ReLU(True), nn.Linear(64,4)), images(), 5),
    densenet=(lambda: densenet.DenseNet(8, (2,3), 8, num_classes=4), images(), 3),
    mobilenet=(lambda: mobilenet_v3_small(num_classes=4, dropout=0., width_mult=.3), images(), 10),
    convnext=(lambda: convnext.ConvNeXt(convnext_cfg, 0., num_classes=4), images(), 9),
    vit=(lambda: vision_transformer.VisionTransformer(32, 8, 3, 4, 32, 64, num_classes=5), images(), 3),
    swin=(lambda: swin_transformer.SwinTransformer([2,2], 16, [1,2,1], [2,4,2], [2,2], num_classes=3, stochastic_depth_prob=0.), images(), 7),
    body_and_head=(lambda: create_vision_model(resnet18, 4, pretrained=False, ps=0.), images(), 9),
    unet=(lambda: DynamicUnet(body(), 3, (32,32), self_attention=True), images(), 9),
    xresnet=(lambda: XResNet(ResBlock, 1, [1,2,1,1], n_out=4, widen=.25, stem_szs=(8,8,16)), images(), 10),
    lm=(lambda: get_language_model(AWD_LSTM, 40, small(awd_lstm_lm_config)), tokens(), 3),
    lm_untied=(lambda: get_language_model(AWD_LSTM, 40, {**small(awd_lstm_lm_config), 'tie_weights':False}), tokens(), 5),
    text=(lambda: get_text_classifier(AWD_LSTM, 40, 3, 5, small(awd_lstm_clas_config), ps=[0.], lin_ftrs=[9]), tokens(), 2),
    tabular=(lambda: TabularModel([(10,4),(7,3)], 5, 2, [20,10]), lambda g: (torch.randint(0, 7, (4,2), generator=g), torch.randn(4, 5, generator=g)), 4),
    collab=(lambda: EmbeddingDotBias(5, 20, 30, (0,5)), lambda g: torch.randint(0, 20, (4,2), generator=g), 0),
    collab_nn=(lambda: EmbeddingNN([(20,4),(20,3)], [20,10]), lambda g: torch.randint(0, 20, (4,2), generator=g), 4),
    transformer=(lambda: nn.Transformer(16, 2, 2, 2, 32, dropout=0., batch_first=True), lambda g: (torch.randn(4, 5, 16, generator=g), torch.randn(4, 4, 16, generator=g)), 4),
    encoder=(lambda: Padded(), floats(6, 16), 2),
    gpt=(lambda: GPT(), tokens(50), 3), gpt_untied=(lambda: GPT(tied=False), tokens(50), 3), one_block=(lambda: GPT(1), tokens(50), 3), llama=(lambda: Llama(2), tokens(50), 2),
    stages=(lambda: nn.Sequential(nn.Linear(8,8), Stage(8,2), Stage(8,4)), floats(4, 8), 9),
    experts=(lambda: nn.Sequential(Experts(), Experts()), floats(8), 2), heads=(lambda: Heads(), floats(8), 1), repeats=(lambda: Repeats(), floats(3, 8), 2),
    mlp=(lambda: nn.Sequential(nn.Linear(8,50), nn.ReLU(True), nn.Linear(50,50), nn.ReLU(True), nn.Linear(50,2)), floats(8), 3), norms=(norms, floats(8), 4))

def reset(m):
    "What fastai's `ModelResetter` does, with whole parameters"
    units = [o for o in m.modules() if isinstance(o, FSDPModule)]
    for o in units: o.unshard()
    getattr(m, 'reset', noop)()
    for o in units: o.reshard()

def output(m, x):
    y = m(*x)
    return y[0] if isinstance(y, tuple) else y

def step(m, x):
    reset(m)
    m.zero_grad()
    torch.manual_seed(3) # dropout of weights
    y = output(m, x)
    (y-1).square().mean().backward()
    return y.detach()

def train(m):
    "Training mode, but for batch norms, which count all samples only in a Learner"
    for o in m.train().modules():
        if isinstance(o, _BatchNorm): o.eval()

def shard(m, **kw):
    whole = unsharded_params(m, plan(**kw))
    units = choose_units(m, plan(**kw))
    check_units(m, units, whole)
    mesh = init_device_mesh('cpu', (2,))
    for o in [*units, m]: fully_shard(o, mesh=mesh, ignored_params={*whole})
    return units

def passes(kind, rank=None, again=False):
    "Outputs of two steps and of an evaluation, gradients of the second step, and the number of units"
    torch.manual_seed(0)
    mk,data,_ = kinds[kind]
    m,x,n = mk(),tuplify(data(torch.Generator().manual_seed(1))),None
    if rank is not None:
        units,x = shard(m),[o.chunk(2)[rank] for o in x]
        n = len(units)
        if again: recompute(units)
    train(m)
    ys = [step(m, x) for _ in range(2)]
    grads = {k:p.grad for k,p in m.named_parameters() if p.ndim}
    grads = {k:g.full_tensor() if rank is not None and g is not None else g for k,g in grads.items()}
    reset(m.eval())
    with torch.no_grad(): return [*ys, output(m, x)],grads,n

def same(kind, **kw):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        ys,grads,_ = passes(kind)
        (ys0,got,n),(ys1,*_) = on_ranks(lambda rank: passes(kind, rank, **kw), timeout=60)
    test_eq(n, kinds[kind][2])
    for y,*parts in zip(ys, ys0, ys1): assert torch.allclose(torch.cat(parts), y, 1e-4, 1e-5)
    big = max(g.abs().max() for g in grads.values() if g is not None)
    test_eq({k for k,g in got.items() if g is None}, {k for k,g in grads.items() if g is None})
    for k,g in grads.items(): assert g is None or (got[k]-g).abs().max()<2e-6*big, k

@pytest.mark.parametrize('kind', kinds)
def test_gradients_are_those_of_one_process(kind): same(kind)

@pytest.mark.parametrize('kind', ['resnet','unet','lm','lm_untied','text','gpt','one_block','stages','experts','repeats','encoder'])
def test_recomputed_too(kind): same(kind, again=True)
