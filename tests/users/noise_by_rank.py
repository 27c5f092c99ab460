# fails: (?i)ranks? 1
# fails: (?i)weight|differ
# alone: no
# once: fails
# Noise on the weights, which each rank draws by itself: ranks would part without a word
from fastai.vision.all import *
from fastdist import *

set_seed(32)
class Noise(Callback):
    def after_step(self):
        for p in self.model.parameters(): p.data += 0.01*torch.randn_like(p)

data = [(torch.randn(4), torch.randn(1)) for _ in range(60)]
learn = Learner(DataLoaders.from_dsets(data, data, bs=4), nn.Linear(4,1), loss_func=MSELossFlat(), cbs=Noise())
with learn.distrib_ctx(): learn.fit(4)
