"Models of libraries, in fastai's own lines, train on ranks as in one process, and without a warning"
import pytest,transformers,warnings
from contextlib import nullcontext
from fastcore.test import test_eq
from fastai.vision.all import *
from fastdist import *

def images(bs, size=32):
    imgs = [PILImage.create(np.random.RandomState(i).randint(0, 255, (size,size,3), dtype=np.uint8)) for i in range(32)]
    block = DataBlock((ImageBlock,CategoryBlock), get_x=lambda i: imgs[i], get_y=lambda i: 'abc'[i%3], splitter=IndexSplitter(range(24,32)))
    return block.dataloaders(range(32), bs=bs, num_workers=0, device='cpu')

class Double(Callback):
    "In single precision rounding grows to 1e-2 within three steps of deep norms over few samples"
    def before_batch(self): self.learn.xb = tuple(o.double() for o in self.xb)

def vision(arch, bs):
    learn = vision_learner(images(bs), arch, pretrained=False, normalize=False, ps=0., opt_func=partial(SGD, mom=0.), metrics=accuracy, cbs=Double())
    learn.model.double()
    return learn

def bert(bs):
    set_seed(1)
    config = transformers.BertConfig(vocab_size=40, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=3,
        hidden_dropout_prob=0., attention_probs_dropout_prob=0.)
    class Bert(Module):
        def __init__(self): self.m = transformers.BertForSequenceClassification(config)
        def forward(self, x): return self.m(x).logits
    data = [(torch.randint(0, 40, (7,)), i%3) for i in range(32)]
    return Learner(DataLoaders.from_dsets(data[:24], data[24:], bs=bs, num_workers=0, device='cpu'), Bert(), loss_func=CrossEntropyLossFlat(), metrics=accuracy)

archs = 'efficientnet_b0','mobilenetv3_small_050','regnetx_002','resnetv2_18','convnext_atto','test_vit'
lines = {'resnet18':partial(vision, resnet18), 'bert':bert} | {o:partial(vision, o) for o in archs}

def trained(line, bs, ctx, **kw):
    set_seed(1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        learn = lines[line](bs)
        learn.recorder.add_time = False
        with learn.distrib_ctx(**kw) if ctx else nullcontext(), learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-2)
    return learn.model.state_dict(),[*learn.recorder.values[-1]],[str(o.message) for o in said if 'rank' in str(o.message)]

@pytest.mark.slow
@pytest.mark.parametrize('size,kw', [(2,{}), (2,dict(shard=True))], ids=['replicas','shards'])
@pytest.mark.parametrize('line', lines)
def test_as_in_one_process(line, size, kw):
    state,values,_ = trained(line, 8, False)
    for got,vals,said in on_ranks(lambda rank: trained(line, 8//size, True, **kw), size, join=False, timeout=200):
        test_eq(said, [])
        test_eq(list(got), list(state))
        for k,v in state.items(): assert torch.allclose(got[k].double(), v.double(), 1e-5, 1e-5), (k, (got[k]-v).abs().max())
        assert np.allclose(vals, values, atol=1e-5), (vals, values)
