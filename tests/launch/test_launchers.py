"Two CPU ranks under every launcher, started as a user would"
import json,nbformat,re,subprocess,sys,threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler,ThreadingHTTPServer
from pathlib import Path
import pytest
from accelerate.utils import write_basic_config
from fastai.data.external import untar_data
from jupyter_client.manager import start_new_kernel
from fastcore.all import first
from fastcore.test import test_eq
from fastdist import on_ranks,rank0_first
from procs import *

pytestmark = [pytest.mark.launcher, pytest.mark.timeout(180)]
script,digits = here/'report.py',examples/'digits.py'

def check(source, path):
    a,b = [json.loads((path/f'{i}.json').read_text()) for i in range(2)]
    assert (a['size'],b['size'],a['source'],b['source'])==(2,2,source,source)
    assert a['weights']==b['weights'] and a['values']==b['values']
    if source in ('torchrun','accelerate launch'): assert a['start']==b['start'], 'an unseeded state'
    assert (a['seen'],b['seen'])==(500,500)
    assert (a['left'],b['left'])==(0,0)

@pytest.mark.whole
def test_torchrun(tmp_path):
    out = output(start(*torchrun(script, tmp_path)))
    check('torchrun', tmp_path)
    assert out.count('fastdist: 2 ranks')==1 and out.count('valid_loss')==1

def test_accelerate_flags(warm, tmp_path):
    warm(*accelerate('--multi_gpu', '--num_processes', 2, script, tmp_path))
    check('accelerate launch', tmp_path)

@pytest.mark.whole
def test_accelerate_yaml(warm, tmp_path):
    cfg = tmp_path/'config.yaml'
    write_basic_config(save_location=str(cfg))
    warm(*accelerate('--config_file', cfg, '--multi_gpu', '--num_processes', 2, script, tmp_path))
    check('accelerate launch', tmp_path)

@pytest.mark.whole
def test_accelerate_that_starts_one_process_says_so(warm, tmp_path):
    _,err = warm(bin_/'accelerate', 'launch', '--cpu', '--num_processes', 2, script, tmp_path, PYTHONWARNINGS='default')
    assert 'HINT: add --multi_gpu' in err and json.loads((tmp_path/'0.json').read_text())['size']==1

def test_variables_as_fastai_launch_sets_them(warm, tmp_path):
    common = dict(WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT=str(free_port()))
    f = lambda i: warm(sys.executable, script, tmp_path, **common, RANK=str(i), DEFAULT_GPU=str(i))
    with ThreadPoolExecutor(2) as pool: list(pool.map(f, range(2)))
    check('fastai.launch', tmp_path)

@pytest.mark.whole
def test_plain_python_trains_on_two_ranks(tmp_path):
    out = output(start(sys.executable, digits))
    assert out.count('valid_loss')==out.count('accuracy: ')==1 and 'CUDA' not in out
    assert float(re.search(r'accuracy: ([\d.]+)', out)[1])>=.95

def _block(path, kind): return re.findall(rf'^```{kind}\n(.*?)^```', path.read_text(), re.M|re.S)

def _rows(out): return [re.sub(r'\d+\.\d+|\d+:\d+', '#', o).split() for o in out.replace('\r', '\n').splitlines() if re.match(r'epoch |\d+ ', o)]

def test_the_script_of_the_readme_prints_what_the_readme_shows(tmp_path):
    script,terminal = [_block(top/'README.md', o)[0] for o in ('python','console')]
    (tmp_path/'train.py').write_text(script)
    test_eq(len([o for o in script.splitlines() if o]), 8)
    test_eq(_rows(output(start(sys.executable, tmp_path/'train.py'))), _rows(terminal))

def test_notebook_launcher_in_a_script(warm, tmp_path):
    code = f'import sys; sys.path.append({str(here)!r}); import report; from accelerate import notebook_launcher; '
    warm(sys.executable, '-c', code + f'notebook_launcher(report.train, ({str(tmp_path)!r},), num_processes=2, use_port={str(free_port())!r})')
    check('notebook_launcher', tmp_path)

notebook = """import sys
sys.path.append({here!r})
import learners, report
from accelerate import notebook_launcher
from fastai.vision.all import *
from fastdist import *
# %%
learners.vision().dls.show_batch()
torch.set_num_threads(4)
(torch.ones(800,800)@torch.ones(800,800)).sum()
# %%
def train():
    torch.set_num_threads(4)
    report.train({out!r})
notebook_launcher(train, num_processes=2, use_port={port!r})
# %%
notebook_launcher(train, num_processes=2, use_port={port!r})"""

def tables(cell): return [o['data']['text/html'] for o in cell.outputs if '<table' in o.get('data', {}).get('text/html', '')]

def bars(cell): return [o for o in shown(cell).splitlines() if '█' in o or 'train_loss' in o]

three_ways = """from learners import *
def train():
    with digits().distrib_ctx() as learn: learn.fit(2)
start = Accelerator(nprocs=2, compute_setup='cpu')
# %%
digits().fit(2)
# %%
learn = digits()
start.distribute(learn.fit)(2)
# %%
start.distribute(train, start='fork')()
# %%
notebook_launcher(train, num_processes=2, use_port={port!r})"""

@pytest.mark.whole
def test_ranks_in_a_kernel_started_in_three_ways(tmp_path):
    "By `notebook_launcher` also again, in a kernel in which much was done; bars and tables are those of fastai"
    names = dict(here=str(here), examples=str(digits.parent), out=str(tmp_path), port=str(free_port()))
    cells = executed('\n# %%\n'.join((notebook,three_ways)).format(**names), tmp_path)
    check('notebook_launcher', tmp_path)
    assert shown(cells[2]).count('fastdist: 2 ranks')==1
    for o in cells[5:]:
        (table,),rows = tables(o),2
        test_eq((table.count('<tr>'), 'train_loss' in table, bars(o)), (1+rows,True,[]))

used = """import torch,matplotlib.pyplot as plt
torch.set_num_threads(4)
(torch.ones(800,800)@torch.ones(800,800)).sum()
plt.plot([1,2])
# %%
"""

@pytest.mark.whole
def test_the_notebook_for_two_gpus_in_a_kernel_in_which_much_was_done(tmp_path):
    "Without GPUs its ranks are two processes on the CPU"
    nb = nbformat.read(examples/'kaggle_two_t4.ipynb', 4)
    cells = executed(used + '\n# %%\n'.join(o.source for o in nb.cells if o.cell_type=='code'), tmp_path)
    once,both,valid,fun = [first(o for o in cells if t in o.source) for t in ('nprocs=2): learn.fit','distribute(learn','validate','distribute(train')]
    test_eq([tables(o)[0].count('<tr>') for o in (once,both,fun)], [4,2,4])
    assert 'fastdist: 2 ranks on 1 node, cpu over gloo' in shown(both)
    loss,acc = json.loads([o['data']['text/plain'] for o in valid.outputs if o.output_type=='execute_result'][0])
    assert acc>.8 and float(fun.outputs[-1]['data']['text/plain'])>.8

stopped = """import sys,time
sys.path.append({here!r})
from learners import *
from fastdist import *
from accelerate import notebook_launcher
class Slow(Callback):
    def after_batch(self):
        Path(f'rank{{this_world().rank}}').touch()
        time.sleep(0.05)
def train(n):
    learn = digits(cbs=Slow())
    with learn.distrib_ctx(): learn.fit(n)"""

@pytest.mark.whole
def test_the_stop_button_ends_all_ranks(tmp_path):
    km,kc = start_new_kernel(kernel_name='python3', cwd=str(tmp_path))
    children = lambda: Path(f'/proc/{km.provisioner.pid}/task/{km.provisioner.pid}/children').read_text().split()
    launch = 'notebook_launcher(train, ({},), num_processes=2, use_port="{}")'
    try:
        kc.execute_interactive(stopped.format(here=str(here)), timeout=90)
        kc.execute(launch.format(1000, free_port()), stop_on_error=False) # or the kernel refuses what comes in the moment after the error
        await_that(lambda: all((tmp_path/f'rank{i}').exists() for i in range(2)))
        km.interrupt_kernel()
        test_eq(kc.get_shell_msg(timeout=60)['content']['status'], 'error')
        await_that(lambda: not children())
        test_eq(kc.execute_interactive(launch.format(1, free_port()), timeout=60)['content']['status'], 'ok')
    finally: km.shutdown_kernel(now=True)

@pytest.mark.parametrize('first', [True,False])
@pytest.mark.by_default('False')
def test_import_order(warm, first):
    "A warm process has imported all but fastdist"
    others = 'fastai.distributed','fastai.tabular.all','fastai.vision.all','fastai.text.all'
    lines = ('fastdist',*others[::-1]) if first else (*others,'fastdist')
    code = '\n'.join(f'from {o} import *' for o in lines) + """
import fastdist
names = 'setup_distrib teardown_distrib DistributedDL DistributedTrainer ParallelTrainer rank0_first'.split()
assert all(globals()[o] is getattr(fastdist, o) for o in names)
assert all(getattr(Learner, o).__module__=='fastdist.learner' for o in 'to_distributed detach_distributed distrib_ctx to_parallel parallel_ctx'.split())
assert fastdist.__version__"""
    (run if first else warm)(sys.executable, '-c', code)

class Server(SimpleHTTPRequestHandler):
    def do_GET(self):
        self.server.gets.append(self.path)
        super().do_GET()
    def log_message(self, *args): pass

@pytest.fixture
def served(tmp_path):
    "The address of a folder that holds an archive, and the list of what was fetched from it"
    (tmp_path/'site/few').mkdir(parents=True)
    (tmp_path/'site/few/x.txt').write_text('hello')
    subprocess.run(['tar', 'czf', 'few.tgz', 'few'], cwd=tmp_path/'site', check=True)
    server = ThreadingHTTPServer(('127.0.0.1', 0), partial(Server, directory=tmp_path/'site'))
    server.gets = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f'http://127.0.0.1:{server.server_port}/few.tgz',server.gets
    server.shutdown()
    server.server_close()

@pytest.mark.parametrize('how', [lambda url,base: rank0_first(untar_data, url, base=base), lambda url,base: rank0_first(lambda: untar_data(url, base=base))])
def test_one_download_for_all(served, tmp_path, how):
    url,gets = served
    res = on_ranks(lambda rank: (how(url, tmp_path)/'x.txt').read_text(), 3, join=False)
    assert res==['hello']*3 and len(gets)==1
