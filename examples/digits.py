"Train a small convolutional network on scikit-learn's digits: on as many ranks as a launcher started, or on those that this script starts: one a GPU, two without"
from fastai.vision.all import *
from sklearn.datasets import load_digits
from fastdist import *

def get_dls(bs=32):
    xs,ys = load_digits(return_X_y=True)
    items = list(zip((xs*15).astype(np.uint8).reshape(-1,8,8), ys))
    block = DataBlock((ImageBlock(PILImageBW),CategoryBlock), get_x=ItemGetter(0), get_y=ItemGetter(1), splitter=RandomSplitter(seed=42))
    return block.dataloaders(items, bs=bs)

def get_model():
    return nn.Sequential(ConvLayer(1,16), ConvLayer(16,32,stride=2), ConvLayer(32,64,stride=2), nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(64,10))

def train(epochs=5):
    set_seed(42)
    learn = Learner(get_dls(), get_model(), loss_func=CrossEntropyLossFlat(), metrics=accuracy)
    with learn.distrib_ctx(): learn.fit_one_cycle(epochs, 1e-2)
    if this_world().rank==0: print(f'accuracy: {learn.recorder.values[-1][-1]:.3f}')

if __name__=='__main__': Accelerator(nprocs=torch.cuda.device_count() or 2).distribute(train)()
