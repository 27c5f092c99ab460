# Several labels for one image
from fastai.vision.all import *
from fastdist import *
from _result import result

bs = 6
set_seed(5)
names = ['red','green','blue']
def labels(i): return [o for k,o in enumerate(names) if i>>k&1]
def image(i): return PILImage.create(np.array([[[200*(i>>k&1) for k in range(3)]]*16]*16, np.uint8))
dls = DataBlock((ImageBlock,MultiCategoryBlock(vocab=names)), get_x=image, get_y=labels, splitter=RandomSplitter(seed=1),
    batch_tfms=Normalize.from_stats(*imagenet_stats)).dataloaders(list(range(60)), bs=bs)
model = nn.Sequential(ConvLayer(3,8,stride=2), nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(8,3))
learn = Learner(dls, model, loss_func=BCEWithLogitsLossFlat(), metrics=[partial(accuracy_multi, thresh=0.2),F1ScoreMulti(),APScoreMulti()])
with learn.distrib_ctx(): learn.fit(2, 1e-2)
result(learn)
