# A frozen body, a new head, then all of it with rates that differ by layer
from fastai.vision.all import *
from fastdist import *
from _result import result

bs = 4
set_seed(19)
def tiny(pretrained=False, **kwargs): return nn.Sequential(ConvLayer(3,8,stride=2), ConvLayer(8,8,stride=2), nn.AdaptiveAvgPool2d(1), nn.Linear(1,1))
def image(i): return PILImage.create((np.arange(16*16*3).reshape(16,16,3)*(i%3+1)%256).astype(np.uint8))
dls = DataBlock((ImageBlock,CategoryBlock), get_x=image, get_y=lambda i: 'abc'[i%3], splitter=RandomSplitter(seed=1)).dataloaders(list(range(50)), bs=bs)
learn = vision_learner(dls, tiny, pretrained=False, cut=-2, splitter=default_split, metrics=accuracy, ps=0., normalize=False)
learn.freeze()
with learn.distrib_ctx(): learn.fine_tune(1, 1e-3, freeze_epochs=1)
learn.unfreeze()
with learn.distrib_ctx(): learn.fit_one_cycle(1, slice(1e-5,1e-3))
result(learn)
