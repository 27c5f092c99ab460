"Models of all kinds, sharded in the units that they get without being asked: outputs and gradients of two ranks are those of one process, in training and in evaluation, with recomputation too"
import pytest,warnings
from types import SimpleNamespace
from fastai.vision.all import *
from fastai.text.all import *
from fastai.tabular.all import *
from fastai.collab import *
from fastcore.test import test_eq
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard,FSDPModule
from torch.distributed.fsdp.wrap import ModuleWrapPolicy,CustomPolicy
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrizations
from torchvision.models import convnext,densenet,resnet,swin_transformer,vgg,vision_transformer,mobilenet_v3_small
from fastdist.launch.fork import *
from fastdist.parallel.norms import *
from fastdist.shard.wrap_policy import *

def plan(**kw): return SimpleNamespace(**{**dict(classes=(), min_params=None, policy=None, one_unit=False, ignored=()), **kw})

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

class Tower(nn.Module):
    def __init__(self, embed, n=2, d=8):
        super().__init__()
        self.embed,self.block = embed,nn.ModuleList(Block(d) for _ in range(n))
    def forward(self, x, y=0.):
        x = self.embed(x)+y
        for b in self.block: x = b(x)
        return x

class T5(nn.Module):
    "Two attributes of one class that share an embedding"
    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(40, 8)
        self.encoder,self.decoder = Tower(self.shared),Tower(self.shared)
    def forward(self, x): return self.decoder(x, self.encoder(x))@self.shared.weight.T

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
    "Chooses a head for each sample by the data"
    def __init__(self, d=8):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(d, d), nn.ReLU())
        self.heads = nn.ModuleDict({o:nn.Sequential(nn.Linear(d, 9), nn.ReLU(), nn.Linear(9, 1)) for o in ('pos','neg')})
    def forward(self, x): return torch.cat([self.heads['pos' if o.sum()>0 else 'neg'](self.body(o)) for o in x[:,None]])

class Repeats(nn.Module):
    "Calls a block twice"
    def __init__(self):
        super().__init__()
        a,b = Block(8),Block(8)
        self.blocks = nn.ModuleList([a,b,a])
    def forward(self, x):
        for b in self.blocks: x = b(x)
        return x

class ThinResNet(resnet.ResNet):
    "A ResNet with an eighth of the channels"
    def __init__(self, pretrained=False):
        super().__init__(resnet.BasicBlock, [1,2,1,1])
        self.fc = nn.Linear(64, 4)
    def _make_layer(self, block, planes, *args, **kw): return super()._make_layer(block, planes//8, *args, **kw)

class Padded(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=0., batch_first=True), 2)
    def forward(self, x): return self.enc(x, src_key_padding_mask=(torch.arange(6)>3)[None].expand(len(x), -1))[:,:4]

def images(n=32): return lambda g: torch.randn(4, 3, n, n, generator=g)
def tokens(v=40, n=12): return lambda g: torch.randint(2, v, (4, n), generator=g)
def floats(*shape): return lambda g: torch.randn(4, *shape, generator=g)
def small(cfg): return {**{k:0. if k.endswith('_p') and k!='weight_p' else v for k,v in cfg.items()}, 'emb_sz':12, 'n_hid':20}
def body():
    convs = [ConvLayer(i, o, stride=2) for i,o in ((3,8),(8,16),(16,24))]
    return nn.Sequential(convs[0], nn.Sequential(*[ResBlock(1, 8, 8) for _ in range(2)]), *convs[1:])

def norms(): return nn.Sequential(nn.Linear(8,50), parametrizations.spectral_norm(nn.Linear(50,50)), parametrizations.weight_norm(nn.Linear(50,20)))
def vgg_net(): return nn.Sequential(vgg.make_layers([8,'M',16,16,'M',32]), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32,64), nn.ReLU(True), nn.Linear(64,4))
def swin(): return swin_transformer.SwinTransformer([2,2], 16, [1,2,1], [2,4,2], [2,2], num_classes=3, stochastic_depth_prob=0.)
def conv_next(): return convnext.ConvNeXt([convnext.CNBlockConfig(*o) for o in ((12,24,2), (24,48,3), (48,None,2))], 0., num_classes=4)
def dense(): return densenet.DenseNet(8, (2,3), 8, num_classes=4)
def xresnet(): return XResNet(ResBlock, 1, [1,2,1,1], n_out=4, widen=.25, stem_szs=(8,8,64))
def transformer(): return nn.Transformer(16, 2, 2, 2, 32, dropout=0., batch_first=True)
def flat(): return nn.Sequential(nn.Linear(8,50), nn.ReLU(True), nn.Linear(50,50), nn.ReLU(True), nn.Linear(50,2))
def two(a, b): return lambda g: (a(g), b(g))
def ids(n): return lambda g: torch.randint(0, n, (4,2), generator=g)

vision = dict(resnet=(ThinResNet, images()), vgg=(vgg_net, images()), convnext=(conv_next, images()), swin=(swin, images()),
    densenet=(dense, images()), mobilenet=(lambda: mobilenet_v3_small(num_classes=4, dropout=0., width_mult=.3), images()),
    vit=(lambda: vision_transformer.VisionTransformer(32, 8, 3, 4, 32, 64, num_classes=5), images()),
    body_and_head=(lambda: create_vision_model(ThinResNet, 4, pretrained=False, ps=0., cut=-2), images()),
    unet=(lambda: DynamicUnet(body(), 3, (32,32), self_attention=True), images()), xresnet=(xresnet, images()))
text = dict(lm=(lambda: get_language_model(AWD_LSTM, 40, small(awd_lstm_lm_config)), tokens()),
    lm_untied=(lambda: get_language_model(AWD_LSTM, 40, {**small(awd_lstm_lm_config), 'tie_weights':False}), tokens()),
    classifier=(lambda: get_text_classifier(AWD_LSTM, 40, 3, 5, small(awd_lstm_clas_config), ps=[0.], lin_ftrs=[9]), tokens()))
tables = dict(tabular=(lambda: TabularModel([(10,4),(7,3)], 5, 2, [20,10]), two(ids(7), floats(5))),
    collab=(lambda: EmbeddingDotBias(5, 20, 30, (0,5)), ids(20)), collab_nn=(lambda: EmbeddingNN([(20,4),(20,3)], [20,10]), ids(20)), flat=(flat, floats(8)))
transformers = dict(transformer=(transformer, two(floats(5, 16), floats(4, 16))), encoder=(Padded, floats(6, 16)),
    gpt=(GPT, tokens(50)), gpt_untied=(lambda: GPT(tied=False), tokens(50)), one_block=(lambda: GPT(1), tokens(50)),
    llama=(lambda: Llama(2), tokens(50)), t5=(T5, tokens()))
others = dict(stages=(lambda: nn.Sequential(nn.Linear(8,8), Stage(8,2), Stage(8,4)), floats(4, 8)),
    experts=(lambda: nn.Sequential(Experts(), Experts()), floats(8)), heads=(Heads, floats(8)), repeats=(Repeats, floats(3, 8)), norms=(norms, floats(8)))
kinds = dict(vision=vision, text=text, tables=tables, transformers=transformers, others=others)

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
    units = choose_units(m, plan(**kw), least=1)
    check_units(m, units, whole)
    mesh = init_device_mesh('cpu', (2,))
    for o in [*units, m]: fully_shard(o, mesh=mesh, ignored_params={*whole})
    return units

def passes(mk, data, rank=None, again=False):
    "Return outputs of two steps and of an evaluation, and gradients of the second step"
    torch.manual_seed(0)
    m,x = mk(),tuplify(data(torch.Generator().manual_seed(1)))
    if rank is not None:
        units,x = shard(m),[o.chunk(2)[rank] for o in x]
        if again: recompute(units)
    train(m)
    ys = [step(m, x) for _ in range(2)]
    grads = {k:p.grad for k,p in m.named_parameters() if p.ndim and p.grad is not None}
    if rank is not None: grads = {k:g.full_tensor() for k,g in grads.items()}
    reset(m.eval())
    with torch.no_grad(): return [*ys, output(m, x)],grads

def same(mks, **kw):
    "Compare two ranks with one process"
    def each(rank=None): return {k:passes(*o, rank, **(kw if rank is not None else {})) for k,o in mks.items()}
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        alone,ranks = each(),on_ranks(each, timeout=60)
    for k,(ys,grads) in alone.items():
        (y0,got),(y1,_) = [o[k] for o in ranks]
        for y,*parts in zip(ys, y0, y1): assert torch.allclose(torch.cat(parts), y, 1e-4, 1e-5), k
        test_eq(got.keys(), grads.keys())
        for n,g in grads.items(): assert (got[n]-g).abs().max()<2e-6*max(o.abs().max() for o in grads.values()), (k,n)

@pytest.mark.parametrize('kind', kinds)
@pytest.mark.by_default('transformers')
def test_gradients_are_those_of_one_process(kind): same(kinds[kind])

@pytest.mark.whole
@pytest.mark.parametrize('kind', ['text','transformers','others'])
@pytest.mark.by_default('transformers')
def test_recomputed_too(kind): same(kinds[kind], again=True)

@pytest.mark.whole
def test_recomputed_images(): same({k:vision[k] for k in ('resnet','unet')}, again=True)

def normed(rank=None):
    "Return gradients and statistics of a step with batch norms that count the samples of all ranks"
    torch.manual_seed(0)
    m,x = ThinResNet(),torch.randn(4, 3, 32, 32)
    if rank is not None:
        sync_bn(m)
        recompute(shard(m))
        x = x.chunk(2)[rank]
    m(x).square().mean().backward()
    grads = [p.grad if rank is None else p.grad.full_tensor() for p in m.parameters()]
    return grads,[*m.buffers()]

def test_batch_norms_of_all_ranks_are_recomputed():
    grads,bufs = normed()
    big = max(o.abs().max() for o in grads)
    for got,held in on_ranks(normed):
        for a,b in zip(got, grads): assert (a-b).abs().max()<1e-5*big
        for a,b in zip(held, bufs): assert torch.allclose(a.double(), b.double(), 1e-4, 1e-6)

def named(m, least=1, **kw):
    names = {id(o):n for n,o in m.named_modules()}
    return ' '.join(names[id(o)] for o in choose_units(m, plan(**kw), least))

chosen = dict(resnet='layer1.0 layer2.0 layer2.1 layer3.0.downsample.0 layer3.0 layer4.0.downsample.0 layer4.0', vgg='0.0 0.3 0.5 0.8 3 5',
    lm='0.rnns.0 0.rnns.1 0.rnns.2', lm_untied='0.rnns.0 0.rnns.1 0.rnns.2 0 1', classifier='0 1', collab='', tabular='embeds.0 embeds.1 layers.0.0 layers.1.0 layers.2.0',
    gpt='transformer.h.0 transformer.h.1 transformer.h.2', one_block='transformer.h.0.mlp.0 transformer.h.0.mlp.3 transformer.h.0', llama='transformer.h.0.attn transformer.h.1.attn', t5='encoder.block.0 encoder.block.1 decoder.block.0 decoder.block.1',
    stages='0 1.blocks.0 1.blocks.1 1 2.blocks.0 2.blocks.1 2.blocks.2 2.blocks.3 2', experts='0 1', heads='body.0', repeats='blocks.0 blocks.1', norms='0 1 2')

@pytest.mark.parametrize('kind', chosen)
def test_what_is_chosen(kind):
    mk = first(o[kind][0] for o in kinds.values() if kind in o)
    for _ in range(2): test_eq(named(mk()), chosen[kind]) # in the same order each time

def test_a_hundred_equal_blocks_are_units(): test_eq(len(choose_units(nn.Sequential(*[Block(8) for _ in range(100)]), plan(), least=1)), 100)
def test_a_small_model_is_one_unit(): test_eq((named(GPT(), 2**16), named(GPT(2, 128), 2**16)), ('','transformer.h.0 transformer.h.1'))

blocks = 'transformer.h.0 transformer.h.1 transformer.h.2'
asked = dict(all_but_ignored=(dict(ignored=r'.*\.h\.1'), 'transformer.h.0 transformer.h.2'), one=(dict(one_unit=True, classes=('Block',)), ''),
    classes=(dict(classes=('Block','GELU')), blocks), tied=(dict(classes=('Block','Embedding','Linear'), ignored=r'.*(attn|mlp)'), blocks), size=(dict(min_params=600), blocks),
    lists=(dict(policy=lambda module, recurse, nonwrapped_numel: True, ignored=r'.*\.(attn|mlp|ln.*)'), ''),
    custom=(dict(policy=CustomPolicy(lambda m: isinstance(m, (Block,nn.ModuleList)))), blocks),
    module_policy=(dict(policy=ModuleWrapPolicy({Attn})), ' '.join(f'{o}.attn' for o in blocks.split())))

@pytest.mark.parametrize('how', asked)
def test_what_is_asked_for(how):
    kw,want = asked[how]
    test_eq(named(GPT(), **kw), want)

def test_nothing_is_chosen_that_a_parent_reads_or_runs_as_it_likes():
    test_eq(named(kinds['text']['classifier'][0](), policy=lambda module, recurse, nonwrapped_numel: isinstance(module, (AWD_LSTM,WeightDropout,nn.Embedding)) or recurse), '')
    test_eq(named(Padded(), min_params=1), 'enc.layers.0 enc.layers.1')
    with pytest.raises(ValueError, match="You set transformer_cls_names_to_wrap=\\['WeightDropout'\\].*none of these"): named(kinds['text']['classifier'][0](), classes=('WeightDropout',))

def test_what_cannot_be_sharded_is_named():
    emb = nn.Sequential(nn.Embedding(9, 4, max_norm=1.), nn.Linear(4, 4))
    with pytest.raises(ValueError, match='You set max_norm=1.0 for the embedding 0.*HINT'): check_units(emb, [])
    check_units(emb, [], [emb[0].weight])
    mixed = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16())
    with pytest.raises(ValueError, match='0.weight has torch.float32, 1.weight has torch.bfloat16.*HINT.*Linear'): check_units(mixed, [])
    check_units(mixed, [mixed[1]])
    check_units(nn.Sequential(mixed[0], mixed[1].requires_grad_(False)), []) # torch needs one dtype of what is trained
    with pytest.raises(ValueError, match='settings to single modules'): named(mixed, policy=CustomPolicy(lambda m: dict(a=1) if m is mixed[0] else False))

class Tracks(nn.Module):
    "Divides by a mean that it keeps, and has a hidden state"
    def __init__(self, d=6):
        super().__init__()
        self.layer,self.bn,self.drop,self.hidden = nn.Linear(d, d),nn.BatchNorm1d(d),nn.Dropout(.3),0.
        self.register_buffer('mean', torch.ones(d))
    def forward(self, x, *, debug=1.):
        self.mean.lerp_(x.detach().abs().mean(0), .1)
        self.hidden = (self.drop(self.bn(self.layer(x/self.mean.clone())))*debug+self.hidden).tanh()
        y,self.hidden = self.hidden,self.hidden.detach()
        return y

class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.ModuleList(Tracks() for _ in range(3))
    def forward(self, x):
        for o in self.rows: x = x+o(x, debug=.5)
        return x

def stepped(m, x):
    torch.manual_seed(2)
    for _ in range(3): m(x).square().mean().backward()
    m.eval()
    with torch.no_grad(): y = m(x)
    return [y, *m.buffers(), *[o.hidden for o in m.rows], *[p.grad for p in m.parameters()]]

def test_a_second_pass_changes_nothing():
    torch.manual_seed(0)
    m,x = Rows(),torch.randn(5, 6)
    again = deepcopy(m)
    undo = recompute(choose_units(again, plan(), least=1))
    for a,b in zip(stepped(m, x), stepped(again, x)): assert torch.equal(a, b)
    test_eq([*again.state_dict()], [*m.state_dict()])
    undo()
    for a,b in zip(m.modules(), again.modules()): test_eq((type(a),vars(a).keys()), (type(b),vars(b).keys()))

def test_the_pass_is_a_second_one_in_training_only():
    m,seen = Rows(),[]
    own = m.rows[1].forward
    m.rows[1].forward = mine = lambda x, **kw: seen.append(torch.is_grad_enabled()) or own(x, **kw) # the user's
    undo = recompute([*m.rows])
    m(torch.randn(5, 6)).sum().backward()
    test_eq(seen, [True]*2)
    with torch.no_grad(): m(torch.randn(5, 6))
    test_eq(seen, [True]*2+[False])
    undo()
    undo()
    assert m.rows[1].forward is mine and 'forward' not in vars(m.rows[0])

def test_two_backward_passes_over_one_graph():
    m,grads = Rows(),[]
    undo = recompute([*m.rows])
    y = m(torch.randn(5, 6)).square().sum()
    for o in (True,False):
        m.zero_grad()
        y.backward(retain_graph=o)
        grads.append([p.grad.clone() for p in m.parameters()])
    for a,b in zip(*grads): assert torch.equal(a, b)
    undo()
