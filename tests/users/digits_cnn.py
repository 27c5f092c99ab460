# under: torchrun
# A small convolutional network on digits, with fastai's defaults everywhere
from fastai.vision.all import *
from fastdist import *
from sklearn.datasets import load_digits
from _result import result

bs = 24
set_seed(42)
xs,ys = load_digits(return_X_y=True)
items = list(range(300))
block = DataBlock((ImageBlock(PILImageBW),CategoryBlock), get_x=lambda i: (xs[i]*15).astype(np.uint8).reshape(8,8), get_y=lambda i: int(ys[i]),
    splitter=RandomSplitter(seed=42))
dls = block.dataloaders(items, bs=bs)
model = nn.Sequential(ConvLayer(1,8), ConvLayer(8,16,stride=2), nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(16,10))
learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), metrics=[accuracy,error_rate])
with learn.distrib_ctx(): learn.fit_one_cycle(2, 1e-2)
result(learn)
