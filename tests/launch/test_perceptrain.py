"perceptrain's Trainer with fastdist's `Accelerator` in place of its own, from which the contract's section 2 has its names"
import pytest,subprocess,sys,torch
from procs import *

packages = 'perceptrain==0.1.0','nevergrad','livelossplot','bayesian-optimization==1.5.1' # without what they ask for: perceptrain pins a quantum simulator, which its Trainer does not import

@pytest.fixture(scope='module')
def site(tmp_path_factory):
    d = tmp_path_factory.mktemp('perceptrain')
    res = subprocess.run([sys.executable, *'-m pip install -q --no-deps --no-compile --target'.split(), d, *packages, 'rich', 'markdown-it-py', 'mdurl'], capture_output=True, text=True, timeout=100)
    if res.returncode: pytest.skip(f'pip could not install perceptrain: {res.stderr[-300:]}')
    return d

@pytest.mark.whole
@pytest.mark.launcher
def test_its_trainer_on_two_ranks_is_that_of_one_process(site, warm, tmp_path):
    "A supervised fit with validation, and a differential equation with a loader of several; ranks of `distribute`, as its `Trainer.fit` starts them, and of torchrun"
    path,env = here/'perceptrain_fit.py',dict(PYTHONPATH=str(site))
    run(sys.executable, path, 2, tmp_path/'two', **env)
    warm(sys.executable, path, 1, tmp_path/'one', **env)
    warm(*torchrun(path, 2, tmp_path/'torchrun'), **env)
    one,*others = [torch.load(tmp_path/o) for o in ('one','two','torchrun')]
    for res in others: torch.testing.assert_close(res, one, rtol=1e-9, atol=1e-12)
