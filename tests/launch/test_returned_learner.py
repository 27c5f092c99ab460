"A Learner that a notebook sends to ranks returns trained, though the kernel has used its threads before"
import pytest
from fastcore.test import test_eq
from procs import *

pytestmark = [pytest.mark.launcher, pytest.mark.timeout(180)]

notebook = """import sys
sys.path.append({here!r})
from fastai.basics import *
from fastai.callback.all import *
from fastdist import *
from sklearn.datasets import load_digits
xs,ys = load_digits(return_X_y=True)
data = [(torch.tensor(x).float()/16, int(y)) for x,y in zip(xs[:500], ys)]
class Keep(Callback):
    def after_fit(self): torch.save(self.model.state_dict(), f'{{this_world().rank}}.pth')
set_seed(1)
dls = DataLoaders.from_dsets(data[:400], data[400:], bs=16, device='cpu')
learn = Learner(dls, nn.Sequential(nn.Linear(64,32), nn.ReLU(), nn.Linear(32,10)), loss_func=CrossEntropyLossFlat(), metrics=accuracy, cbs=Keep())
# %%
torch.set_num_threads(4)
(torch.ones(800,800)@torch.ones(800,800)).sum()
# %%
accelerator = Accelerator(nprocs=2, compute_setup='cpu')
model,opt = accelerator.distribute(learn.fit_one_cycle)(3, 0.05)
# %%
for r in range(2):
    for k,v in torch.load(f'{{r}}.pth').items(): assert torch.equal(v, learn.model.state_dict()[k])
assert model is learn.model and opt is learn.opt and len(learn.recorder.values)==3 and learn.recorder.values[-1][-1]>.8
learn.recorder.plot_loss()
learn.recorder.losses
# %%
scale = 10
accelerator.distribute(lambda x: x*scale+accelerator.rank, all_ranks=True)(1)
# %%
class Boom(Callback):
    def after_batch(self):
        if this_world().rank==1: raise ValueError('lost') # the user's own line
accelerator.distribute(learn.fit)(1, cbs=Boom())
# %%
for dl in learn.dls.loaders: dl.fake_l.num_workers = 0 # a fork server cannot have so many tensors
learn.fit(1)
"""

@pytest.mark.whole
def test_in_a_kernel(tmp_path):
    cells = executed(notebook.format(here=str(here)), tmp_path, raises=[5])
    tables = [o['data']['text/html'] for o in cells[2].outputs if 'text/html' in o.get('data', {})]
    assert any('<th>valid_loss</th>' in o for o in tables) and 'valid_loss' not in shown(cells[2]) and shown(cells[2]).count('fastdist: 2 ranks')==1, cells[2].outputs
    assert any('image/png' in o.get('data', {}) for o in cells[3].outputs)
    test_eq(cells[4].outputs[-1]['data']['text/plain'], '[10, 11]')
    err = cells[5].outputs[-1]
    test_eq((err['ename'], err['evalue'].count('ValueError:')), ('RankError',1))
    assert 'the user\'s own line' in err['evalue'] and err['evalue'].rstrip().endswith('lost') and 'start_ranks' not in '\n'.join(err['traceback'])
