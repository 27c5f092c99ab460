"One cell on two hosts by SSH, and what befalls it there; where no hosts can be made, it says why"
import os,re,signal,socket,subprocess,sys,time
from threading import Thread
import pytest,torch
from fastai.vision.all import *
from fastdist import *
from fastdist.base.errors import *
from fastdist.launch.launcher import EngineError
from hosts import *

pytestmark = [pytest.mark.launcher, pytest.mark.slow, pytest.mark.timeout(240)]

@pytest.fixture(scope='module')
def hosts():
    if why := why_no_hosts(): pytest.skip(why)
    with ssh_hosts() as h:
        yield h
        await_that(lambda: not agents())

def agents():
    "Agents and ranks in the hosts"
    pids = lambda o: subprocess.run(['ip','netns','pids',o], capture_output=True, text=True).stdout.split()
    return [pid for o in names_here[:2] for pid in pids(o) if b'be_agent' in said_at(pid)]

def said_at(pid):
    try: return Path(f'/proc/{pid}/cmdline').read_bytes()
    except OSError: return b''

def rows(): return [(torch.tensor([i/50, i%7/7]), torch.tensor([i%5/5])) for i in range(53)]

class Rows(list): "A data set of the script's own"

class Counts(Callback):
    "A callback of the script's own, which returns with what it has counted"
    def __init__(self): self.n = 0
    def after_batch(self): self.n += 1

def learner(bs=5):
    set_seed(0)
    its = Rows(rows())
    dls = DataLoaders(DataLoader(its[:40], bs=bs, shuffle=True, num_workers=1), DataLoader(its[40:], bs=5))
    return Learner(dls, nn.Sequential(nn.Linear(2,4), nn.Tanh(), nn.Linear(4,1)), loss_func=MSELossFlat(), metrics=mae, cbs=Counts())

def on(hosts, f, n=2, **kw): return Accelerator(nprocs=n, compute_setup='cpu', hosts=hosts.names).distribute(f, **kw)

@pytest.mark.whole
def test_the_script_runs_once(hosts):
    def trained(**kw):
        learn = learner(6)
        learn.dls.valid.bs = 4
        with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(**kw):
            learn.fit(1)
            learn.model[0].bias.data.add_(1) # between two calls, here
            learn.fit(1)
            preds = learn.get_preds()[0]
        return [preds, *learn.model.parameters(), tensor(learn.recorder.values)],learn.counts.n
    one,two = trained(),trained(nprocs=2, hosts=hosts.names, compute_setup='cpu')
    for a,b in zip(one[0], two[0]): torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)
    assert one[1]==two[1]
    await_that(lambda: not agents())

def place(): return int(os.environ['RANK']),os.environ['GROUP_RANK'],os.environ['MASTER_ADDR'],os.environ['GLOO_SOCKET_IFNAME']

def test_each_host_has_its_ranks_and_secrets_do_not_show(hosts, monkeypatch, capsys):
    monkeypatch.setenv('WANDB_API_KEY', 'a'*40)
    def look():
        print(f'I am rank {os.environ["RANK"]}')
        Accelerator(compute_setup='cpu').broadcast(0)
        secrets = os.environ['WANDB_API_KEY'],'a'*40 in subprocess.run(['ps','axww'], capture_output=True, text=True).stdout
        return place(),secrets,({at for at,_ in listeners()},listeners(os.getppid()))
    found = on(hosts, look, n=4, all_ranks=True)()
    assert [o[0] for o in found]==[(r, str(r//2), f'{hosts.net}.2', 'eth0') for r in range(4)]
    assert all(o[1]==('a'*40,False) for o in found)
    assert [o[2] for o in found]==[({f'{hosts.net}.{i}'},set()) for i in (2,2,3,3)], 'ranks listen where the others come, and their agent nowhere'
    assert 'I am rank 0' in (out := capsys.readouterr().out) and 'I am rank 1' not in out

@pytest.mark.whole
def test_an_error_has_rank_and_host(hosts):
    def bad(): raise ValueError('no luck') if os.environ['RANK']=='1' else time.sleep(1)
    with pytest.raises(RankError, match=rf'(?s)rank 1 on {hosts.names[1]} failed:.*no luck'): on(hosts, bad)()

def ends(hosts, what, match):
    "Check that a job ends within ten seconds of `what`, with an error that matches"
    began = Path(hosts.d)/'began'
    began.unlink(missing_ok=True)
    def long():
        if os.environ['RANK']=='1': began.write_text(str(os.getpid()))
        time.sleep(100)
    def act():
        await_that(lambda: began.exists() and began.read_text())
        what(int(began.read_text()))
    Thread(target=act).start()
    with pytest.raises(RankError, match=match): on(hosts, long)()
    await_that(lambda: not agents())

@pytest.mark.whole
def test_a_killed_rank(hosts): ends(hosts, lambda pid: os.kill(pid, signal.SIGKILL), rf'rank 1 on {hosts.names[1]} failed:\nit died without an error message, killed by SIGKILL')

class Dies(Callback):
    "Kill rank 1 in the second epoch, if that has not been done"
    def __init__(self, d): self.done = d/'done'
    def after_batch(self):
        if os.environ.get('RANK')!='1' or self.epoch<1 or self.iter<1 or self.done.exists(): return
        self.done.touch()
        os.kill(os.getpid(), signal.SIGKILL)

@pytest.mark.whole
def test_the_same_call_again_goes_on(hosts, tmp_path):
    def fit(d, *cbs):
        learn = learner()
        with learn.no_bar(), learn.no_logging(): on(hosts, learn.fit_one_cycle)(3, 1e-2, cbs=[Checkpoint(d, every=1), *cbs])
        return learn
    with pytest.raises(RankError, match=rf'rank 1 on {hosts.names[1]} failed:\nit died without an error message, killed by SIGKILL'): fit(tmp_path/'states', Dies(tmp_path))
    again,once = fit(tmp_path/'states', Dies(tmp_path)),fit(tmp_path/'undisturbed')
    for a,b in zip(again.model.parameters(), once.model.parameters()): assert torch.equal(a, b)
    test_eq(again.recorder.values, once.recorder.values)
    test_eq(again.counts.n, once.counts.n)

@pytest.mark.whole
def test_a_killed_agent(hosts):
    ends(hosts, lambda pid: os.kill(int(Path(f'/proc/{pid}/stat').read_text().rpartition(') ')[2].split()[1]), signal.SIGKILL), rf'rank \d on {hosts.names[1]} failed:\nits machine was lost: `ssh .* {hosts.names[1]}` ended')

@pytest.mark.whole
def test_a_cut_connection(hosts):
    def cut(pid): sh(f'ip link set {hosts.names[1]}v down')
    try: ends(hosts, cut, rf'rank \d on {hosts.names[1]} failed:\nits machine was lost')
    finally: sh(f'ip link set {hosts.names[1]}v up')

@pytest.mark.whole
def test_machines_that_do_not_reach_each_other(hosts):
    for o in hosts.names: sh(f'bridge link set dev {o}v isolated on')
    try:
        with pytest.raises(EngineError, match=f'{hosts.names[1]} cannot reach {hosts.names[0]}, where rank 0 is, at any of {hosts.net}.2'): on(hosts, place)()
    finally:
        for o in hosts.names: sh(f'bridge link set dev {o}v isolated off')

def test_a_host_that_lacks_fastdist(hosts):
    python = shutil.which('python3', path='/usr/bin:/usr/local/bin')
    with pytest.raises(EngineError, match=f'(?s){hosts.names[0]} cannot run ranks: .*(No module named|not found)'): Accelerator(nprocs=2, hosts=hosts.names, python=python).distribute(place)()

def refused(hosts, dest, match):
    "Check that no rank starts where `dest` is the second host, that the error says why, and that nothing is left"
    with pytest.raises(EngineError, match=rf'(?s)^{re.escape(dest)} cannot run ranks: .*{match}.*HINT: `ssh {re.escape(dest)} '): Accelerator(nprocs=2, compute_setup='cpu', hosts=[hosts.names[0],dest]).distribute(place)()
    await_that(lambda: not agents())

@pytest.mark.whole
def test_a_wrong_second_host(hosts): refused(hosts, 'nowhere.invalid', 'Could not resolve')

@pytest.mark.whole
def test_a_host_where_nobody_listens(hosts): refused(hosts, f'ssh://{hosts.net}.1:1', 'Connection refused')

@pytest.mark.whole
def test_an_address_that_nobody_has(hosts): refused(hosts, f'{hosts.net}.99', 'No route to host|timed out')

@pytest.mark.whole
def test_a_host_that_says_nothing(hosts):
    with socket.create_server((f'{hosts.net}.1',0)) as s: refused(hosts, f'ssh://{hosts.net}.1:{s.getsockname()[1]}', 'timed out')

script = """
import os,sys,time
from pathlib import Path
from fastdist import *
def long():
    Path(sys.argv[2]).write_text('began')
    time.sleep(100)
Accelerator(nprocs=4, hosts=sys.argv[1].split(','), compute_setup='cpu').distribute(long)()
"""

@pytest.mark.whole
@pytest.mark.parametrize('sig', [signal.SIGINT,signal.SIGKILL])
def test_the_head_ends(hosts, tmp_path, sig):
    (tmp_path/'script.py').write_text(script)
    p = start(sys.executable, tmp_path/'script.py', ','.join(hosts.names), tmp_path/'began', env=dict(os.environ))
    try:
        await_that((tmp_path/'began').exists)
        p.send_signal(sig)
        (out,_), = said(p, timeout=60)
        await_that(lambda: not agents())
    finally: p.kill()
    if sig==signal.SIGINT: assert out.rstrip().splitlines()[-1].startswith('fastdist: interrupted by Ctrl-C or SIGINT at '), out

@pytest.mark.whole
def test_a_detached_job_comes_home_to_another_process_with_the_weights_of_here(hosts, tmp_path, monkeypatch):
    monkeypatch.setenv('FASTDIST_JOBS', str(tmp_path))
    learn,here = learner(),learner()
    job = on(hosts, learn.fit_one_cycle, detach='two')(1, 1e-2)
    with here.no_bar(), here.no_logging(): Accelerator(nprocs=2, compute_setup='cpu').distribute(here.fit_one_cycle, start='fork')(1, 1e-2)
    code = "from fastdist import *; job = Accelerator.attach('two'); print(job.wait(180).status); print([p.sum().item() for p in job.result()[0].parameters()])"
    out,_ = run(sys.executable, '-c', code, timeout=200, **os.environ)
    job.result()
    assert out=='done\n'+f'{[p.sum().item() for p in learn.model.parameters()]}\n', out
    assert 'epoch' in job.log() and 'over ssh' in job.log()
    for a,b in zip(learn.model.parameters(), here.model.parameters()): assert torch.allclose(a, b, atol=1e-6, rtol=0)
    assert here.recorder.values==learn.recorder.values and torch.allclose(here.get_preds()[0], learn.get_preds()[0], atol=1e-6)
    assert learn.counts.n==here.counts.n>0
