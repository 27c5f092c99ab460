# fails: (?i)rank 1
# fails: (?i)seed|data set|validation
# alone: no
# once: no, the split is drawn by the number of the process
# Each process seeds with a number of its own: each rank draws its own samples for validation
from fastai.vision.all import *
from fastdist import *
from sklearn.datasets import load_digits

torch.manual_seed(os.getpid())
xs,ys = load_digits(return_X_y=True)
dls = DataBlock((TransformBlock,CategoryBlock), get_x=lambda i: tensor(xs[i]).float()/16, get_y=lambda i: int(ys[i]), splitter=RandomSplitter()).dataloaders(
    list(range(200)), bs=16)
learn = Learner(dls, nn.Linear(64,10), loss_func=CrossEntropyLossFlat(), metrics=accuracy)
with learn.distrib_ctx(): learn.fit(2)
