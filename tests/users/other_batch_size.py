# fails: (?i)batch size|\bbs\b
# fails: 16
# fails: (?i)ranks
# alone: no
# A rank has less memory, so its author gives it smaller batches
from fastai.vision.all import *
from fastdist import *

set_seed(33)
data = [(torch.randn(4), torch.randn(1)) for _ in range(120)]
dls = DataLoaders.from_dsets(data[:100], data[100:], bs=16 if rank_distrib()==0 else 8)
learn = Learner(dls, nn.Linear(4,1), loss_func=MSELossFlat())
with learn.distrib_ctx(): learn.fit(2)
