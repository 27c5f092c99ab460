"""perceptrain's own tutorials of its Trainer, with fastdist's Accelerator imported in place of its own: `perceptrain_fit.py NPROCS FILE` writes the trained weights of each to FILE

Under torchrun the ranks are there, and NPROCS says how many samples each has of a batch."""
import os,sys,torch
sys.path.extend(o for o in os.environ.get('PYTHONPATH', '').split(os.pathsep) if o not in sys.path) # a fork has begun before it was set
import perceptrain.trainer
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from fastdist import Accelerator
from perceptrain import DictDataLoader,TrainConfig,Trainer,to_dataloader
from perceptrain.callbacks import Callback
perceptrain.trainer.Accelerator = Accelerator
n,out = int(sys.argv[1]),Path(sys.argv[2])

def net():
    torch.manual_seed(42)
    return torch.nn.Sequential(torch.nn.Linear(1,16), torch.nn.Tanh(), torch.nn.Linear(16,1))

x = torch.linspace(0, 1, 40).reshape(-1, 1)
def sine():
    data = partial(to_dataloader, x, torch.sin(6*x), batch_size=20//n)
    return net(),dict(train_dataloader=data(), val_dataloader=data(), loss_fn='mse')

def decay():
    "A differential equation: u' = -u, and u(0) = 1"
    def slope(batch, model):
        t = batch['inside'][0].requires_grad_()
        u = model(t)
        parts = dict(inside=(torch.autograd.grad(u.sum(), t, create_graph=True)[0]+u).square().mean(), start=(model(batch['start'][0])-1).square().mean())
        return sum(parts.values()),parts
    loaders = dict(inside=to_dataloader(x, batch_size=20//n), start=to_dataloader(torch.zeros(40,1), batch_size=20//n))
    return net(),dict(train_dataloader=DictDataLoader(loaders), loss_fn=slope)

def fitted(make, d):
    model,kw = make()
    config = TrainConfig(max_iter=10, nprocs=n, compute_setup='cpu', backend='gloo', verbose=False, val_every=5 if 'val_dataloader' in kw else 0, root_folder=d,
        callbacks=[Callback(on='train_epoch_end', called_every=5, callback=lambda trainer, config, writer: trainer.opt_result.metrics)])
    model,_ = Trainer(model, torch.optim.Adam(model.parameters(), lr=1e-2), config, **kw).fit()
    return [p.detach() for p in getattr(model, 'module', model).parameters()]

if __name__=='__main__':
    with TemporaryDirectory() as d: res = {f.__name__:fitted(f, d) for f in (sine,decay)}
    if Accelerator(compute_setup='cpu').rank==0: torch.save(res, out)
