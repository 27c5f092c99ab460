"A training with `Checkpoint` that is killed, or asked to stop, and started again by its launcher ends with the numbers of the undisturbed run"
import json,pytest,re,sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from jupyter_client.manager import start_new_kernel
from tempfile import TemporaryDirectory
from fastcore.test import test_close,test_eq
from fastdist import *
from procs import *
import restarted

pytestmark = pytest.mark.timeout(180)
script = here/'restarted.py'

def numbers(path): return json.loads((path/'numbers').read_text())

@cache
def undisturbed(n):
    "The numbers of the run on `n` ranks that nothing happens to"
    with TemporaryDirectory() as d:
        if n==1: on_ranks(lambda rank: restarted.main(d), 1, join=False)
        else: restarted.main(d, 'head')
        return numbers(Path(d))

def is_exact(path, n):
    for a,b in zip(numbers(path), undisturbed(n)): test_eq(a, b)

@pytest.mark.whole
def test_torchrun_starts_it_again(warm, tmp_path):
    out,err = warm(*torchrun('--max-restarts', 3, script, tmp_path), FAULTS='0:raise:12,1:SIGTERM:42,1:kill:60', timeout=150)
    assert 'a bad batch' in err and err.count('rank 1: SIGTERM')==1 and re.search(r'exitcode: -9\b', err), err[-3000:]
    test_eq([out.count(o) for o in ('2 ranks on 1 node','stopped in fit 1','fit 0 already finished')], [4,1,2])
    is_exact(tmp_path, 2)

@pytest.mark.whole
def test_torchrun_goes_on_with_fewer_nodes(warm, tmp_path):
    "The second agent may come when the first has begun alone, whose rank waits then; an agent is taken for dead after six seconds without a sign of life"
    once = dict(AT_FIRST='2', TORCH_DISABLE_SHARE_RDZV_TCP_STORE='1') # torch's agent of rank 0 tells its shared store's address in the first round alone, and who comes later waits for it in vain
    meets = f'127.0.0.1:{free_port()}','join_timeout=60,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=6'
    args = '--nnodes','1:2','--nproc_per_node',1,'--max-restarts',3,'--rdzv_id','here','--rdzv_backend','c10d','--rdzv_endpoint',meets[0],'--rdzv_conf',meets[1]
    def agent(faults, rc=0): return warm(bin_/'torchrun', *args, script, tmp_path, FAULTS=faults, rc=rc, **once, timeout=120)
    with ThreadPoolExecutor(2) as pool:
        stays,_ = pool.submit(agent, '1:agent:30'),await_that(lambda: served(meets[0]))
        pool.submit(agent, '1:agent:30', -9).result()
        out,err = stays.result()
    assert '2 ranks on 2 nodes' in out and 'resuming fit 1' in out
    assert 'it died without an error message' in err, err[-3000:]
    for a,b in zip(numbers(tmp_path), undisturbed(2)): test_close(a, b, 1e-4)

def served(at):
    host,_,port = at.partition(':')
    try: return socket.create_connection((host,int(port))).close() is None
    except OSError: return False

@pytest.mark.parametrize('how,n', [((),1), (('head',),2)])
@pytest.mark.by_default('how0')
def test_the_same_command_goes_on(warm, tmp_path, how, n):
    for fault,rc in (f'{n-1}:SIGTERM:10',143),('0:SIGUSR1:42',138),('',0): out,err = warm(sys.executable, script, tmp_path, *how, rc=rc, FAULTS=fault)
    assert not err and 'resuming fit 1 at epoch 0, batch 21' in out or n>1, out+err
    is_exact(tmp_path, n)

@pytest.mark.whole
def test_a_process_that_is_killed_goes_on(warm, tmp_path):
    for fault,rc in ('0:kill:33',-9),('0:raise:50',1),('',0): warm(sys.executable, script, tmp_path, rc=rc, FAULTS=fault)
    is_exact(tmp_path, 1)

# Notebooks

cells = """import sys,os
sys.path.append({here!r})
os.environ['FAULTS'] = '0:SIGINT:30,0:kill:50'
from restarted import *
# %%
learn = get_learner({out!r}+'/states', 5, [Faulty({out!r})])
# %%
with learn.distrib_ctx(), learn.no_bar(): learn.fine_tune(3, 1e-2)
write({out!r}, learn)"""

@pytest.mark.launcher
@pytest.mark.whole
def test_a_cell_that_is_run_again_goes_on(tmp_path):
    "Interrupted in its second fit, run again with the same Learner, and in a new kernel after the first one has died; with a new Learner it returns at once"
    begin,make,fit = cells.format(here=str(here), out=str(tmp_path)).split('# %%')
    (km,kc),run = start_new_kernel(),lambda code: kc.execute_interactive(code, timeout=60, output_hook=lambda msg: None)['content']['status']
    try:
        test_eq([run(o) for o in (begin,make,fit)], ['ok','ok','error'])
        kc.execute(fit)
        await_that(lambda: not km.is_alive())
    finally: km.shutdown_kernel(now=True)
    km,kc = start_new_kernel()
    try:
        for _ in range(2):
            test_eq([run(o) for o in (begin,make,fit)], ['ok']*3)
            is_exact(tmp_path, 1)
    finally: km.shutdown_kernel(now=True)
