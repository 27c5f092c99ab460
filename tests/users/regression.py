# ranks: 3
# Where is the dot? Two numbers for each image, a transform and a metric of one's own
from fastai.vision.all import *
from fastdist import *
from _result import result

bs = 5
set_seed(4)
class Shift(Transform):
    def encodes(self, x:PILImageBW): return PILImageBW.create(np.roll(np.array(x), 1, 0))
def image(i):
    a = np.zeros((16,16), np.uint8)
    a[i%15,(i*7)%15] = 255
    return a
dls = DataBlock((ImageBlock(PILImageBW),RegressionBlock(2)), get_x=image, get_y=lambda i: np.array([i%15/15,(i*7)%15/15], dtype=np.float32),
    splitter=RandomSplitter(seed=1), item_tfms=Shift).dataloaders(list(range(100)), bs=bs)
def worst(inp, targ): return (inp-targ).abs().max(1)[0].mean()
model = nn.Sequential(ConvLayer(1,8,stride=2), Flatten(), nn.Linear(512,2), SigmoidRange(0,1))
learn = Learner(dls, model, loss_func=MSELossFlat(), metrics=[worst,rmse,mae,R2Score()])
with learn.distrib_ctx(): learn.fit_flat_cos(2, 1e-3)
result(learn)
