"A terminal that nobody reads for a while, a job that is suspended as a whole, and Ctrl-C meanwhile"
import io,os,signal,sys,time,pytest
from pathlib import Path
from contextlib import redirect_stdout,suppress
import procs
from fastai.test_utils import synth_learner
from fastcore.test import test_eq
from fastdist import *
from fastdist.launch.fork import on_ranks
from procs import await_that

pytestmark = [pytest.mark.launcher, pytest.mark.timeout(240)]
script = '''import os,sys,time
from pathlib import Path
from fastdist import *
from fastdist.launch.launcher import Command,RemoteAgent,agent_code
class Here:
    name,places = 'here',['here']
    def open(self, i): return Command([sys.executable,'-c',agent_code])
def talk(folder, lines):
    (folder/f'pid{os.getpid()}').touch()
    for i in range(lines): print('x'*1000, flush=True)
    (folder/f'said{this_world().rank}').touch()
    while not (folder/'go').exists(): time.sleep(.05)
    return 'came home'
if __name__=='__main__':
    how,folder,lines = sys.argv[1],Path(sys.argv[2]),int(sys.argv[3])
    RemoteAgent.patience = 2 if lines>400 else 8
    a = Accelerator(nprocs=2, compute_setup='cpu', **(dict(engine=Here()) if how=='agent' else {}))
    res = a.distribute(talk, **({} if how=='agent' else dict(start='fork')))(folder, lines)
    (folder/'result').write_text(res)
'''

@pytest.fixture
def job(tmp_path):
    "Starts a job whose output nobody reads; by default returns once its ranks have printed 400 KB, more than pipes hold"
    (tmp_path/'talks.py').write_text(script)
    started = []
    def start(how, lines=400, begun=lambda: len(list(tmp_path.glob('said*')))==2):
        with open(tmp_path/'err', 'w') as err: p = procs.start(sys.executable, '-u', tmp_path/'talks.py', how, tmp_path, lines, err=err)
        started.append(p)
        await_that(lambda: begun() or p.poll() is not None, 120)
        return p
    yield start
    for p in started:
        for pid in [p.pid, *below(p.pid)]:
            with suppress(ProcessLookupError): os.kill(pid, signal.SIGKILL)
        p.communicate()

def below(pid):
    "All processes that `pid` and those below it have started"
    found = []
    for p in Path('/proc').glob('[0-9]*/stat'):
        with suppress(OSError): found.append((int(p.parent.name), int(p.read_text().rpartition(')')[2].split()[1])))
    res = [c for c,parent in found if parent==pid]
    return res+[o for c in res for o in below(c)]

@pytest.mark.whole
@pytest.mark.parametrize('how', ['agent',pytest.param('local', marks=pytest.mark.whole)])
def test_a_job_that_nobody_reads_and_that_is_suspended(job, tmp_path, how):
    "Longer than an agent may be silent; all processes are continued, in any order"
    p = job(how)
    pids = [p.pid, *below(p.pid)]
    for o in pids: os.kill(o, signal.SIGSTOP)
    time.sleep(13)
    for o in pids: os.kill(o, signal.SIGCONT)
    (tmp_path/'go').touch()
    out,_ = p.communicate(timeout=90)
    assert p.returncode==0 and len(out)==400*1001, (tmp_path/'err').read_text()
    assert (tmp_path/'result').read_text()=='came home'

@pytest.mark.parametrize('how', [pytest.param('agent', marks=pytest.mark.whole),'local'])
def test_ctrl_c_where_nobody_reads(job, tmp_path, how):
    "Ranks end at once, and the script when its output is read"
    p = job(how)
    os.kill(p.pid, signal.SIGINT)
    ranks = [int(o.name[3:]) for o in tmp_path.glob('pid*')]
    await_that(lambda: not any(Path(f'/proc/{o}').exists() for o in ranks), 30)
    out,_ = p.communicate(timeout=60)
    assert p.returncode and 'KeyboardInterrupt' in (tmp_path/'err').read_text() and len(out)==400*1001
    assert not (tmp_path/'result').exists()

@pytest.mark.whole
@pytest.mark.parametrize('how', ['agent',pytest.param('local', marks=pytest.mark.whole)])
def test_a_job_whose_output_waits_for_longer_than_an_agent_may_be_silent(job, tmp_path, how):
    "More than the 64 MB that wait for a terminal, so that ranks wait too; the patience is that of two seconds in the place of eight"
    p = job(how, 100_000, lambda: len(list(tmp_path.glob('pid*')))==2)
    time.sleep(10)
    assert not (tmp_path/'said0').exists(), 'rank 0 does not wait'
    (tmp_path/'go').touch()
    out,_ = p.communicate(timeout=90)
    assert p.returncode==0 and len(out)==100_000*1001, (tmp_path/'err').read_text()
    assert (tmp_path/'result').read_text()=='came home'

class Printed(io.StringIO):
    def __init__(self, terminal):
        super().__init__()
        self.isatty = lambda: terminal

def fit_printed(terminal, **ctx):
    "What two epochs and an evaluation print where standard output is a terminal or not"
    with redirect_stdout(Printed(terminal)) as out, synth_learner(n_trn=2).distrib_ctx(**ctx) as learn:
        learn.fit(2)
        learn.validate()
    return out.getvalue()

@pytest.mark.parametrize('way', ['nprocs','launched','one'])
def test_a_log_has_a_line_an_epoch_and_no_bars(way):
    "A file, a pipe or a cluster's log would keep each drawing of a bar"
    if way=='launched': log,screen = [on_ranks(lambda rank: fit_printed(o), 2, timeout=120)[0] for o in (False,True)]
    else: log,screen = [fit_printed(o, nprocs=2 if way=='nprocs' else 1) for o in (False,True)]
    rows = [o.split()[0] for o in log.splitlines() if not o.startswith('fastdist:')]
    test_eq((rows, [o for o in '\r█' if o in log]), (['epoch','0','1'],[]))
    assert '█' in screen
