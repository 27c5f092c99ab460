# A U-Net that finds squares in tiny images
from fastai.vision.all import *
from fastdist import *
from _result import result

bs = 4
set_seed(2)
def square(i):
    mask = np.zeros((32,32), np.uint8)
    mask[i%16:i%16+12,5:20] = 1
    return mask
block = DataBlock((ImageBlock,MaskBlock(codes=['back','square'])), get_x=lambda i: PILImage.create(np.stack([square(i)*200+20]*3, -1)),
    get_y=lambda i: PILMask.create(square(i)), splitter=IndexSplitter(range(14, 20)))
body = nn.Sequential(ConvLayer(3,8,stride=2), ConvLayer(8,16,stride=2), ConvLayer(16,24,stride=2))
dls = block.dataloaders(list(range(20)), bs=bs)
learn = Learner(dls, DynamicUnet(body, 2, (32,32)), loss_func=CrossEntropyLossFlat(axis=1), metrics=[Dice(),foreground_acc])
with learn.distrib_ctx(): learn.fit_one_cycle(2, 1e-3)
result(learn)
