# compared: steps
# MixUp and label smoothing, which mix within the slice of a rank
from fastai.vision.all import *
from fastdist import *
from _result import result

bs = 8
set_seed(16)
def image(i): return PILImage.create(np.full((16,16,3), i*2, np.uint8))
dls = DataBlock((ImageBlock,CategoryBlock), get_x=image, get_y=lambda i: 'dim' if i<50 else 'bright', splitter=RandomSplitter(seed=1),
    batch_tfms=aug_transforms(size=16)).dataloaders(list(range(100)), bs=bs)
model = nn.Sequential(ConvLayer(3,8,stride=2), nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(8,2))
learn = Learner(dls, model, loss_func=LabelSmoothingCrossEntropy(), metrics=accuracy, cbs=[MixUp(0.4)])
with learn.distrib_ctx(): learn.fit_one_cycle(2, 1e-2)
result(learn)
