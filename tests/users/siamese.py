# Pairs of images from a transform of this script, the way of fastai's siamese tutorial
from fastai.vision.all import *
from fastdist import *
from _result import result

bs = 8
set_seed(37)
class Pairs(Transform):
    def __init__(self, items, vocab): self.items,self.vocab = items,vocab
    def _image(self, i): return TensorImage(torch.full((3,8,8), float(i)/60))
    def encodes(self, i):
        other = self.items[(i*7+3)%len(self.items)]
        return self._image(i),self._image(other),TensorCategory(int(i%2==other%2))

class Siamese(Module):
    def __init__(self): self.body,self.head = nn.Sequential(ConvLayer(3,4,stride=2), nn.AdaptiveAvgPool2d(1), Flatten()),nn.Linear(8,2)
    def forward(self, a, b): return self.head(torch.cat([self.body(a),self.body(b)], dim=1))

items = list(range(60))
tls = [TfmdLists(o, Pairs(items, range(2))) for o in (items[:45],items[45:])]
dls = DataLoaders.from_dsets(*tls, bs=bs, after_item=[ToTensor], after_batch=[Normalize.from_stats(*imagenet_stats)])
def both(model): return [params(model.body),params(model.head)]
learn = Learner(dls, Siamese(), loss_func=CrossEntropyLossFlat(), splitter=both, metrics=accuracy)
with learn.distrib_ctx(): learn.fit_one_cycle(2, slice(1e-3,1e-2))
result(learn)
