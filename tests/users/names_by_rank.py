# shows: rank 1 asked for .*model_1.* where rank 0 did .*model_0
# Each rank saves under a name of its own: what rank 0 writes counts, and ranks are told
from fastai.vision.all import *
from fastdist import *
from _result import result

bs = 8
set_seed(25)
data = [(torch.randn(4), torch.randn(1)) for _ in range(40)]
learn = Learner(DataLoaders.from_dsets(data, data, bs=bs), nn.Linear(4,1), loss_func=MSELossFlat(), path='.')
with learn.distrib_ctx():
    learn.fit(1)
    learn.save(f'model_{rank_distrib()}')
result(learn, files=sorted(o.name for o in Path('models').iterdir()))
