"The scripts of `examples/slurm` on a real SLURM of two nodes, which this file starts and ends; where none can be installed, it says why"
import getpass,os,re,secrets,shlex,signal,socket,subprocess
from contextlib import ExitStack,contextmanager,suppress
from pathlib import Path
from tempfile import TemporaryDirectory
import pytest
from procs import *
from test_restart import is_exact

pytestmark = [pytest.mark.launcher, pytest.mark.slow, pytest.mark.timeout(480)]
script = examples/'slurm/train.py'
env = env | dict(PATH=f"{bin_}:{os.environ['PATH']}:/usr/sbin:/sbin", PYTHONUNBUFFERED='')
host,user = socket.gethostname().partition('.')[0],getpass.getuser()

conf = """ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthInfo=socket={d}/munge.socket,cred_expire=5
SlurmUser={user}
SlurmdUser={user}
SlurmctldPidFile={d}/slurmctld.pid
SlurmdPidFile={d}/%n.pid
StateSaveLocation={d}
SlurmdSpoolDir={d}/%n
SlurmctldLogFile={d}/slurmctld.log
SlurmdLogFile={d}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0
KillWait=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=main Nodes=ALL Default=YES
"""
daemons = 'munged --foreground --key-file=key --socket={d}/munge.socket --pid-file={d}/munged.pid --log-file={d}/munged.log --seed-file={d}/seed', \
    'slurmctld -D','slurmd -D -N n1','slurmd -D -N n2'

def sh(cmd, env):
    "What `cmd` says, in whatever way it ends"
    return subprocess.run(shlex.split(cmd), env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120).stdout.strip()

@contextmanager
def running(cmd, d, env):
    "A daemon, which writes into `d` what it says"
    with open(d/'said', 'a') as f: p = subprocess.Popen(cmd.format(d=d).split(), stdout=f, stderr=f, cwd=d, env=env, start_new_session=True)
    try: yield p
    finally:
        p.terminate()
        with suppress(subprocess.TimeoutExpired): p.wait(10)
        p.kill()
        p.wait()

def members(d):
    "Processes of the cluster in `d`, its jobs' included: each has its configuration in the environment"
    def ours(pid):
        with suppress(OSError): return f'SLURM_CONF={d}/'.encode() in Path(f'/proc/{pid}/environ').read_bytes()
    return [pid for pid in map(int, filter(str.isdigit, os.listdir('/proc'))) if ours(pid)]

def end_members(d):
    for pid in members(d):
        with suppress(ProcessLookupError): os.kill(pid, signal.SIGKILL)

def idle(env): return sh('sinfo -h -o %T%D', env)=='idle2'

def end_jobs(env):
    sh(f'scancel --user {user}', env)
    with suppress(AssertionError): await_that(lambda: idle(env), 15)

def configure(d):
    "All that the daemons need in `d`, and the environment in which SLURM's commands find them"
    d.chmod(0o755) # munge refuses what others cannot enter
    (d/'slurm.conf').write_text(conf.format(d=d, host=host, user=user, ports=[free_port() for _ in range(3)]))
    (d/'key').touch(0o600)
    (d/'key').write_bytes(secrets.token_bytes(64))
    return env|dict(SLURM_CONF=f'{d}/slurm.conf')

def text(path): return Path(path).read_text(errors='replace') # a bar of a rank that was killed may end within a character
def logs(d): return '\n'.join(f'{p.name}: {text(p)[-1500:]}' for p in [d/'said', *d.glob('*.log')])

def start(d, stack):
    "The cluster, which ends with `stack`"
    env = configure(d)
    stack.callback(end_members, d)
    for o in daemons: stack.enter_context(running(o, d, env))
    stack.callback(end_jobs, env)
    try: await_that(lambda: idle(env))
    except AssertionError: pytest.fail(f'the cluster did not start\n{logs(d)}')
    return env

@pytest.fixture(scope='module')
def cluster():
    "The environment in which `sbatch` speaks to a SLURM of two nodes on this host, of which nothing is left afterwards"
    why = why_missing('munged slurmctld slurmd sbatch srun scancel scontrol sinfo', 'slurm-wlm', 'munge', path=env['PATH'])
    if why: pytest.skip(why)
    with TemporaryDirectory(prefix='slurm') as d, ExitStack() as stack: yield start(Path(d), stack)

def submit(args, env, out='out'):
    "A job of two nodes, whose names nobody resolves"
    meet = dict(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(free_port()))
    job = sh(f'sbatch --parsable --nodes 2 --output {Path(out).absolute()} {args}', env|meet)
    assert job.isdigit(), job
    return job

def state(job, env): return re.search(r'JobState=(\w+)', sh(f'scontrol show job {job}', env))[1]

def finished(job, env, secs, out='out'):
    "How `job` ended, and what it said"
    await_that(lambda: state(job, env) not in ('PENDING','CONFIGURING','RUNNING','COMPLETING'), secs)
    return state(job, env),text(out)

@pytest.mark.whole
@pytest.mark.parametrize('name,source', [('torchrun','torchrun'), pytest.param('ranks','srun', marks=pytest.mark.whole)])
def test_a_script_trains_on_two_nodes(cluster, name, source):
    job = submit(f'--chdir {script.parent} {script.parent}/{name}.sbatch', cluster)
    how,out = finished(job, cluster, 150)
    assert how=='COMPLETED', out[-3000:]
    ends(out, 4, source)

@pytest.mark.whole
def test_a_rank_that_is_killed_ends_the_job(cluster):
    job = submit(f'--ntasks-per-node 1 --wrap "srun python {here}/broken.py {Path.cwd()}"', cluster)
    trains = lambda: {int(p.stem):int(p.suffix[1:]) for p in Path.cwd().glob('[01].*')}
    await_that(lambda: len(trains())==2)
    os.kill(trains()[1], signal.SIGKILL)
    await_that(lambda: 'RankError: rank 1 failed:' in text('out'), 15) # ours; the job's end is SLURM's
    how,out = finished(job, cluster, 60)
    assert how=='FAILED' and out.count('RankError: rank 1 failed:')==1 and 'it died without an error message' in out, out[-3000:]

def submit_requeue(launcher, env):
    "The example's job, in a folder of its own"
    Path(launcher).mkdir()
    args = f'--chdir {script.parent} --cpus-per-task 1 {script.parent}/requeue.sbatch {launcher} {here}/restarted.py {Path(launcher).absolute()}'
    return submit(args, env | dict(FAULTS='0:slurm:42', RANKS_PER_NODE='1', OMP_NUM_THREADS='1'), f'{launcher}/out')

@pytest.mark.whole
def test_jobs_that_are_requeued_go_on(cluster):
    "SLURM signals the batch scripts, as it does when the time is nearly up; the jobs run at once"
    for launcher,job in {o:submit_requeue(o, cluster) for o in ('torchrun','python')}.items():
        how,out = finished(job, cluster, 300, f'{launcher}/out')
        assert how=='COMPLETED' and out.count('stopped in fit 1')==1 and 'resuming fit 1' in out, out
        assert 'Restarts=1' in sh(f'scontrol show job {job}', cluster)
        is_exact(Path(launcher), 2)
