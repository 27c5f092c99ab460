# The same images larger and larger, one fit and one context each
from fastai.vision.all import *
from fastdist import *
from _result import result

bs = 6
set_seed(12)
def image(i): return PILImage.create((np.arange(24*24*3).reshape(24,24,3)*(i%5+1)%256).astype(np.uint8))
def get_dls(size):
    return DataBlock((ImageBlock,CategoryBlock), get_x=image, get_y=lambda i: 'abcde'[i%5], splitter=RandomSplitter(seed=1),
        item_tfms=Resize(size, method='squish')).dataloaders(list(range(60)), bs=bs)
model = nn.Sequential(ConvLayer(3,8,stride=2), ConvLayer(8,8,stride=2), nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(8,5))
learn = Learner(get_dls(8), model, loss_func=CrossEntropyLossFlat(), metrics=accuracy)
for size in (8,16):
    learn.dls = get_dls(size)
    with learn.distrib_ctx(): learn.fit_one_cycle(1, 1e-2)
with learn.distrib_ctx():
    learn.dls = get_dls(24)
    learn.fit_one_cycle(1, 1e-3)
result(learn)
