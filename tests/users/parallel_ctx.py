# shows: parallel_ctx|to_parallel
# compared: steps
# alone: no
# once: no, parallel_ctx starts no ranks
# fastai's example takes parallel_ctx where there are ranks already: they train apart, which is said
from fastai.vision.all import *
from fastdist import *
from _result import result

bs = 8
set_seed(45)
data = [(torch.randn(4), torch.randn(1)) for _ in range(40)]
learn = Learner(DataLoaders.from_dsets(data, data, bs=bs), nn.Linear(4,1), loss_func=MSELossFlat())
with learn.parallel_ctx(): learn.fit(1)
result(model=learn.model, n_steps=len(learn.recorder.losses))
