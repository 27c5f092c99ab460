# fails: (?i)rank 1
# alone: no
# Only rank 0 enters the context, and the other one has ended long since
from fastai.vision.all import *
from fastdist import *

set_seed(48)
data = [(torch.randn(4), torch.randn(1)) for _ in range(60)]
learn = Learner(DataLoaders.from_dsets(data, data, bs=4), nn.Linear(4,1), loss_func=MSELossFlat())
if rank_distrib()==0:
    with learn.distrib_ctx(patience=5): learn.fit(1)
