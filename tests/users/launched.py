# start: python
# under: python, kernel
# once: no, notebook_launcher starts the ranks
# notebook_launcher, from a script or a cell
from accelerate import notebook_launcher
from fastai.vision.all import *
from fastdist import *
from sklearn.datasets import load_digits
from _result import result

bs = 16
xs,ys = load_digits(return_X_y=True)
class Digits:
    def __init__(self, idxs): self.idxs = idxs
    def __len__(self): return len(self.idxs)
    def __getitem__(self, i): return tensor(xs[self.idxs[i]]).float()/16,int(ys[self.idxs[i]])

def train(epochs):
    set_seed(43)
    dls = DataLoaders.from_dsets(Digits(range(150)), Digits(range(150, 200)), bs=bs, device='cpu')
    model = nn.Sequential(nn.Linear(64,20,bias=False), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20,10))
    learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), metrics=accuracy)
    with learn.distrib_ctx(in_notebook=True): learn.fit_one_cycle(epochs, 1e-2)
    result(learn)

notebook_launcher(train, (2,), num_processes=2, use_port=os.environ['FREE_PORT'])
