# shows: rank 1 asked for .*run_.* where rank 0 did .*run_
# A time stamp in the name of a file, which each rank takes at its own time
from time import time_ns
from fastai.vision.all import *
from fastdist import *
from _result import result

bs = 8
set_seed(56)
data = [(torch.randn(4), torch.randn(1)) for _ in range(40)]
learn = Learner(DataLoaders.from_dsets(data, data, bs=bs), nn.Linear(4,1), loss_func=MSELossFlat(), path='.')
with learn.distrib_ctx(): learn.fit(2, cbs=SaveModelCallback(fname=f'run_{time_ns()}'))
result(learn, files=len(list(Path('models').iterdir())))
