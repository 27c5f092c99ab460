# compared: steps
# shows: your loss does not say how it reduces
# A Wasserstein GAN, the way of fastai's tutorial; each rank draws noise of its own
from accelerate.utils import DistributedDataParallelKwargs
from fastai.vision.all import *
from fastai.vision.gan import *
from fastdist import *
from _result import result

bs = 8
set_seed(7)
dls = DataBlock(blocks=(TransformBlock,ImageBlock), get_x=partial(generate_noise, size=10), get_y=lambda i: PILImage.create(np.full((16,16,3), i, np.uint8)),
    splitter=IndexSplitter([]), batch_tfms=Normalize.from_stats(tensor([.5]*3), tensor([.5]*3))).dataloaders(list(range(96)), bs=bs)
generator,critic = basic_generator(16, n_channels=3, in_sz=10, n_features=8),basic_critic(16, n_channels=3, n_features=8)
learn = GANLearner.wgan(dls, generator, critic, opt_func=RMSProp, switcher=FixedGANSwitcher(n_crit=2, n_gen=1))
learn.recorder.train_metrics,learn.recorder.valid_metrics = True,False
with learn.distrib_ctx(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]): learn.fit(2, 2e-4, wd=0)
result(learn)
