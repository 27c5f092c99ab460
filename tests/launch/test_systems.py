"Systems that have no fork, few signals and none of Unix's modules, as Windows: what is missing is taken away before fastdist is imported"
import pytest,re,sys
from fastcore.test import *
from procs import *

pytestmark = pytest.mark.launcher

bare = '''
import os,signal,socket,sys
import torch,accelerate,fastai.basics,torch._dynamo # which work there
lacks = {os:'register_at_fork fork memfd_create geteuid getuid killpg setsid getpgid',
    signal:'SIGURG SIGUSR1 SIGUSR2 SIGKILL SIGHUP SIGCHLD SIGSTOP SIGCONT pthread_kill pthread_sigmask siginterrupt'}
for o,names in lacks.items():
    for k in names.split(): delattr(o, k)
class Lacks:
    def find_spec(self, name, path=None, target=None):
        if name in unix: raise ImportError(f'no module named {name!r}')
unix = 'fcntl','resource','termios','pwd','grp'
for o in unix: sys.modules.pop(o, None)
sys.meta_path.insert(0, Lacks())
from fastai.basics import *
from fastai.callback.progress import ProgressCallback
from fastdist import *
def get_learner(bs=4):
    set_seed(1)
    data = [(torch.randn(8),i%2) for i in range(40)]
    dls = DataLoaders.from_dsets(data, data, bs=bs, num_workers=0, device='cpu')
    return Learner(dls, nn.Linear(8,2), loss_func=CrossEntropyLossFlat(), metrics=accuracy).remove_cb(ProgressCallback)
learn = get_learner()
'''

def system(code, *args, **kw):
    "Stdout and stderr of `code` on such a system"
    return run(sys.executable, '-c', bare+code, *args, **kw)

alone = '''
del socket.AF_UNIX
with learn.distrib_ctx(): learn.fit(1)
with learn.lean_ctx(): learn.fit(1)
learn.fit(1, cbs=Checkpoint('a'))
with learn.distrib_ctx(): learn.fit(1, cbs=[Checkpoint('b', every=3),Timeline()])
print(len(learn.recorder.losses), len([*Path('b').iterdir()])>0, learn.timeline is not None)
import sys
from fastdist.check import main
sys.argv = ['fastdist-check']
main()
'''

@pytest.mark.whole
def test_one_process():
    out,_ = system(alone)
    assert '10 True True' in out and 'All is well.' in out, out

ranks = '''
class Fails(Callback):
    def before_batch(self):
        if this_world().rank==1 and self.iter==2: raise ValueError('a batch that fails')
with learn.distrib_ctx():
    try: learn.fit(1, cbs=Fails())
    except Exception as e: print(type(e).__name__)
    learn.fit(1)
print([round(o, 6) for o in learn.model.weight.flatten().tolist()])
'''

@pytest.mark.whole
def test_ranks(tmp_path):
    "They hear of an error when their collective is broken"
    env = dict(WORLD_SIZE='2', LOCAL_WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT=str(free_port()))
    procs = [start(sys.executable, '-c', bare+ranks, env=globals()['env']|env|dict(RANK=str(r), LOCAL_RANK=str(r))) for r in range(2)]
    outs = [o for o,_ in said(*procs, timeout=100)]
    assert [p.returncode for p in procs]==[0,0], ''.join(outs)
    test_eq([o.count('lacks the signals') for o in outs], [1,0])
    assert 'RankError' in outs[0] and 'ValueError' in outs[1], outs
    test_eq(outs[0].splitlines()[-1], outs[1].splitlines()[-1])

spawn_only = '''
import multiprocessing
multiprocessing.get_all_start_methods = lambda: ['spawn']
multiprocessing.set_start_method('spawn')
'''

head = '''
Accelerator(nprocs=2, compute_setup='cpu').distribute(learn.fit)(1)
print(len(learn.recorder.losses), learn.opt.state_dict()['hypers'][0]['lr']>0)
def fails(): raise ValueError('a rank that fails')
try: Accelerator(nprocs=2, compute_setup='cpu').distribute(fails)()
except Exception as e: print(type(e).__name__, 'a rank that fails' in str(e))
'''

@pytest.mark.whole
def test_a_head_starts_ranks_by_spawn(tmp_path):
    (tmp_path/'train.py').write_text(spawn_only+re.sub(' pthread_sigmask| SIGKILL', '', bare)+head) # Python's own spawn needs these on Linux
    out,err = run(sys.executable, tmp_path/'train.py', timeout=220) # five times Python imports all anew
    test_eq(out.splitlines()[-2:], ['5 True','RankError True'])
