# fails: model_0
# fails: model_1
# alone: no
# Each rank saves under a name of its own
from fastai.vision.all import *
from fastdist import *

set_seed(25)
data = [(torch.randn(4), torch.randn(1)) for _ in range(40)]
learn = Learner(DataLoaders.from_dsets(data, data, bs=8), nn.Linear(4,1), loss_func=MSELossFlat(), path='.')
with learn.distrib_ctx():
    learn.fit(1)
    learn.save(f'model_{rank_distrib()}')
