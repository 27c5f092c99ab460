"A Learner that a notebook sends to ranks comes home trained, though the kernel has used its threads before"
from pathlib import Path
import nbformat,pytest
from nbclient import NotebookClient
from fastcore.test import test_eq

pytestmark = pytest.mark.timeout(180)
here = Path(__file__).parent

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
learn.fit(1)
"""

def test_in_a_kernel(tmp_path):
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in notebook.format(here=str(here)).split('# %%')])
    nb.cells[5].metadata['tags'] = ['raises-exception']
    NotebookClient(nb, timeout=120, kernel_name='python3', resources=dict(metadata=dict(path=str(tmp_path)))).execute()
    shown = ''.join(o.get('text', '') for o in nb.cells[2].outputs)
    assert 'valid_loss' in shown and 'Epoch 1/3' in shown and shown.count('fastdist: 2 ranks')==1
    assert any('image/png' in o.get('data', {}) for o in nb.cells[3].outputs)
    test_eq(nb.cells[4].outputs[-1]['data']['text/plain'], '[10, 11]')
    err = nb.cells[5].outputs[-1]
    shown = '\n'.join(err['traceback'])
    test_eq((err['ename'], err['evalue'].count('ValueError:')), ('RankError',1))
    assert 'the user\'s own line' in err['evalue'] and err['evalue'].rstrip().endswith('lost') and 'start_ranks' not in shown
