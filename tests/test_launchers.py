"Two CPU ranks under every launcher, started as a user would"
import json,os,re,signal,subprocess,sys,threading,time
from functools import partial
from http.server import SimpleHTTPRequestHandler,ThreadingHTTPServer
from pathlib import Path
import nbformat,pytest
from accelerate.utils import write_basic_config
from fastai.data.external import untar_data
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient
from fastcore.test import test_eq
from fastdist import on_ranks,rank0_first

pytestmark = pytest.mark.timeout(180)
here = Path(__file__).parent
bin_,script,digits = Path(sys.executable).parent,here/'report.py',here.parent/'examples/digits.py'
env = {k:v for k,v in os.environ.items() if k!='OMP_NUM_THREADS'} | dict(PYTHONWARNINGS='ignore')

def start(*cmd, env=env):
    return subprocess.Popen(list(map(str, cmd)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, env=env)

def printed(*procs, timeout):
    "What each of `procs` prints until it ends; none of them is left, whatever happens"
    try: return [p.communicate(timeout=timeout)[0] for p in procs]
    finally:
        for p in procs:
            if p.poll() is None: os.killpg(p.pid, signal.SIGKILL)

def output(*procs, timeout=150):
    "What `procs` print, all of which must succeed"
    outs = printed(*procs, timeout=timeout)
    for p,o in zip(procs, outs): assert p.returncode==0, o[-3000:]
    return ''.join(outs)

def check(source, path):
    a,b = [json.loads((path/f'{i}.json').read_text()) for i in range(2)]
    assert (a['size'],b['size'],a['source'],b['source'])==(2,2,source,source)
    assert a['weights']==b['weights'] and a['values']==b['values']
    assert (a['seen'],b['seen'])==(500,500)
    assert (a['left'],b['left'])==(0,0)

def test_torchrun(tmp_path):
    out = output(start(bin_/'torchrun', '--standalone', '--nproc_per_node', 2, script, tmp_path))
    check('torchrun', tmp_path)
    assert out.count('fastdist: 2 ranks')==1 and out.count('valid_loss')==1

def launch(*args): return output(start(bin_/'accelerate', 'launch', '--main_process_port', 0, *args))

def test_accelerate_flags(tmp_path):
    launch('--multi_gpu', '--num_processes', 2, script, tmp_path)
    check('accelerate launch', tmp_path)

def test_accelerate_yaml(tmp_path):
    cfg = tmp_path/'config.yaml'
    write_basic_config(save_location=str(cfg))
    launch('--config_file', cfg, '--multi_gpu', '--num_processes', 2, script, tmp_path)
    check('accelerate launch', tmp_path)

def test_accelerate_that_starts_one_process_says_so(tmp_path):
    out = output(start(bin_/'accelerate', 'launch', '--cpu', '--num_processes', 2, script, tmp_path, env=env|dict(PYTHONWARNINGS='default')))
    assert 'HINT: add --multi_gpu' in out and json.loads((tmp_path/'0.json').read_text())['size']==1

def free_port():
    import socket
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]

def test_variables_as_fastai_launch_sets_them(tmp_path):
    common = dict(WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT=str(free_port()))
    output(*[start(sys.executable, script, tmp_path, env=env|common|dict(RANK=str(i), DEFAULT_GPU=str(i))) for i in range(2)])
    check('fastai.launch', tmp_path)

def test_plain_python_starts_two_ranks_that_learn(tmp_path):
    out = output(start(sys.executable, digits))
    assert 'fastdist: 2 ranks on 1 node, cpu over gloo, from notebook_launcher' in out
    assert float(re.search(r'accuracy: ([\d.]+)', out)[1])>=.95

def test_notebook_launcher_in_a_script(tmp_path):
    code = f'import sys; sys.path.append({str(here)!r}); import report; from accelerate import notebook_launcher; '
    output(start(sys.executable, '-c', code + f'notebook_launcher(report.train, ({str(tmp_path)!r},), num_processes=2, use_port={str(free_port())!r})'))
    check('notebook_launcher', tmp_path)

notebook = """import sys
sys.path += [{here!r}, {examples!r}]
import digits, report
from accelerate import notebook_launcher
from fastai.vision.all import *
from fastdist import *
# %%
digits.get_dls().show_batch()
torch.set_num_threads(4)
(torch.ones(800,800)@torch.ones(800,800)).sum()
# %%
def train():
    torch.set_num_threads(4)
    report.train({out!r})
notebook_launcher(train, num_processes=2, use_port={port!r})
# %%
notebook_launcher(train, num_processes=2, use_port={port!r})"""

def test_notebook_launcher_in_a_kernel(tmp_path):
    names = dict(here=str(here), examples=str(digits.parent), out=str(tmp_path), port=str(free_port()))
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in notebook.format(**names).split('# %%')])
    NotebookClient(nb, timeout=120, kernel_name='python3', resources=dict(metadata=dict(path=str(tmp_path)))).execute()
    check('notebook_launcher', tmp_path)
    text = ''.join(o.get('text', '') for o in nb.cells[2].outputs)
    assert text.count('fastdist: 2 ranks')==1

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

def test_the_stop_button_ends_all_ranks(tmp_path):
    km,kc = start_new_kernel(kernel_name='python3', cwd=str(tmp_path))
    children = lambda: Path(f'/proc/{km.provisioner.pid}/task/{km.provisioner.pid}/children').read_text().split()
    launch = 'notebook_launcher(train, ({},), num_processes=2, use_port="{}")'
    try:
        kc.execute_interactive(stopped.format(here=str(here)), timeout=90)
        kc.execute(launch.format(1000, free_port()))
        await_that(lambda: all((tmp_path/f'rank{i}').exists() for i in range(2)), 60)
        km.interrupt_kernel()
        test_eq(kc.get_shell_msg(timeout=10)['content']['status'], 'error')
        await_that(lambda: not children(), 10)
        test_eq(kc.execute_interactive(launch.format(1, free_port()), timeout=60)['content']['status'], 'ok')
    finally: km.shutdown_kernel(now=True)

def await_that(cond, seconds):
    end = time.monotonic()+seconds
    while not cond():
        assert time.monotonic()<end
        time.sleep(0.1)

@pytest.mark.parametrize('lines', [('fastdist','fastai.vision.all','fastai.text.all','fastai.tabular.all','fastai.distributed'),
    ('fastai.distributed','fastai.tabular.all','fastai.vision.all','fastdist')])
def test_import_order(lines):
    code = '\n'.join(f'from {o} import *' for o in lines) + """
import fastdist
names = 'setup_distrib teardown_distrib DistributedDL DistributedTrainer ParallelTrainer rank0_first'.split()
assert all(globals()[o] is getattr(fastdist, o) for o in names)
assert all(getattr(Learner, o).__module__=='fastdist.learner' for o in 'to_distributed detach_distributed distrib_ctx to_parallel parallel_ctx'.split())
assert fastdist.__version__"""
    output(start(sys.executable, '-c', code))

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
