"""Train on scikit-learn's digits; after whatever has ended it, the same command goes on where it was: `python resume.py [FOLDER]`, also by torchrun or srun

All ranks together step with the same samples, so it may go on with fewer or more of them."""
import hashlib,sys
from fastai.basics import *
from sklearn.datasets import load_digits
from fastdist import *

def get_dls(total=64):
    xs,ys = load_digits(return_X_y=True)
    data = [(torch.tensor(x).float()/16, int(y)) for x,y in zip(xs, ys)]
    return DataLoaders.from_dsets(data[:1400], data[1400:], bs=total//this_world().size, num_workers=0)

def get_model(): return nn.Sequential(nn.Linear(64,64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64,10))

def digest(learn):
    "Eight letters, which differ where a weight or a loss does"
    parts = [o.cpu().numpy().tobytes() for o in learn.model.state_dict().values()]
    return hashlib.sha256(b''.join([*parts, str(learn.recorder.values).encode()])).hexdigest()[:8]

def get_learner(path, every=None, cbs=()):
    set_seed(42)
    return Learner(get_dls(), get_model(), loss_func=CrossEntropyLossFlat(), metrics=accuracy, cbs=[Checkpoint(path, every), *cbs])

def train(path='states', *args):
    learn = get_learner(path, *args)
    with learn.distrib_ctx(): learn.fine_tune(3, 1e-2)
    if this_world().rank==0: print(f'accuracy: {learn.recorder.values[-1][-1]:.3f}, digest {digest(learn)}')
    return learn

if __name__=='__main__': train(*sys.argv[1:])
