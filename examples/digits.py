"Train a small convolutional network on scikit-learn's digits, on all GPUs, or on two CPU ranks where there is none: `python examples/digits.py`"
from fastai.basics import *
from sklearn.datasets import load_digits
from fastdist import *

set_seed(42)
data = L((tensor(x).view(1,8,8)/16, y) for x,y in zip(*load_digits(return_X_y=True))).shuffle()
dls = DataLoaders.from_dsets(data[:1440], data[1440:], bs=32)
convs = ConvLayer(1,16),ConvLayer(16,32,stride=2),ConvLayer(32,64,stride=2)
model = nn.Sequential(*convs, nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(64,10))
learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), metrics=accuracy)
with learn.distrib_ctx(nprocs=torch.cuda.device_count() or 2): learn.fit_one_cycle(5, 1e-2)
print(f'accuracy: {learn.recorder.values[-1][-1]:.3f}')
