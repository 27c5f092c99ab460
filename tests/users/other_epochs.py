# fails: (?i)epoch
# fails: (?i)ranks
# fails: \b3\b
# fails: \b2\b
# alone: no
# Each rank reads the number of epochs from its own machine's settings
from fastai.vision.all import *
from fastdist import *

set_seed(49)
data = [(torch.randn(4), torch.randn(1)) for _ in range(60)]
learn = Learner(DataLoaders.from_dsets(data, data, bs=4), nn.Linear(4,1), loss_func=MSELossFlat())
with learn.distrib_ctx(): learn.fit(2 if rank_distrib()==0 else 3)
