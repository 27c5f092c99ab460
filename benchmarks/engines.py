"From a command to the first step of two ranks on hosts, in SLURM and on Ray: by `distribute`, and by the engine's plain use: `python benchmarks/engines.py --help`"
import os,subprocess,sys,time
from contextlib import ExitStack,contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from fastcore.all import call_parse
from jobs import save,show_table
from start import script
sys.path += [str(Path(__file__).resolve().parents[1]/'tests'/o) for o in ('helpers','launch')]
import test_slurm
from hosts import ssh_hosts
from procs import await_that,bin_,env,free_port,here

env = env|dict(OMP_NUM_THREADS='1', PYTHONPATH=os.pathsep.join([str(top), *filter(None, [os.environ.get('PYTHONPATH')])]))
torchrun = f'{bin_}/torchrun --nnodes 2 --nproc_per_node 1'

def distribute(engine): return f"Path(sys.argv[0]+'.called').write_text(str(time.time()))\nAccelerator(nprocs=2, compute_setup='cpu', {engine}).distribute(train)()"

actors = """
import ray
ray.init('auto', log_to_driver=False)

@ray.remote(num_cpus=1)
class Rank:
    def train(self, rank):
        os.environ.update(RANK=str(rank), WORLD_SIZE='2', LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT='{port}')
        train()

ray.get([Rank.remote().train.remote(i) for i in range(2)])
"""
executor = """
import submitit
executor = submitit.AutoExecutor('{d}/jobs', cluster='slurm')
executor.update_parameters(nodes=2, tasks_per_node=1, timeout_min=10)
"""

def python(d, name, code):
    "The command that runs the training with `code` at its end"
    (d/f'{name}.py').write_text(script.replace('sys.argv[1]', repr(str(d/'first')))+code)
    return [sys.executable, d/f'{name}.py']

@contextmanager
def on_hosts(d):
    "Two network namespaces; plainly, `ssh` starts torchrun on both"
    def plain():
        at = python(d, 'plain', 'train()')[1]
        cmd = f'OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore GLOO_SOCKET_IFNAME=eth0 {torchrun} --master_addr {h.net}.2 --master_port {free_port()} --node_rank'
        return [['ssh','-T',o,f'{cmd} {i} {at}'] for i,o in enumerate(h.names)]
    with ssh_hosts() as h: yield lambda: [python(d, 'ours', distribute(f'hosts={h.names}'))],plain,env|dict(PATH=os.environ['PATH'])

@contextmanager
def in_slurm(d):
    "Two daemons of SLURM; plainly, a job's `srun` starts torchrun on both nodes"
    def plain():
        cmd = f'srun {torchrun} --rdzv_id 1 --rdzv_backend c10d --rdzv_endpoint 127.0.0.1:{free_port()} {python(d, "plain", "train()")[1]}'
        return [['sbatch','--wait','--nodes','2','--ntasks-per-node','1','--output',d/'out','--wrap',cmd]]
    def ours():
        await_that(lambda: test_slurm.idle(vars), 60)
        return [python(d, 'ours', executor.format(d=d)+distribute('engine=executor'))]
    with ExitStack() as stack:
        test_slurm.env.update(env|dict(PATH=test_slurm.env['PATH']))
        vars = test_slurm.start(d, stack)
        yield ours,lambda: await_that(lambda: test_slurm.idle(vars), 60) or plain(),vars

@contextmanager
def on_ray(d):
    "A cluster of two nodes; plainly, two actors"
    vars = env|dict(RAY_AUTH_MODE='disabled', RAY_USAGE_STATS_ENABLED='0', TMPDIR=str(d))
    p = subprocess.Popen([sys.executable, here/'on_ray.py', 'cluster', d], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=vars)
    try:
        vars |= dict(RAY_ADDRESS=p.stdout.readline().strip())
        yield lambda: [python(d, 'ours', distribute("engine='ray'"))],lambda: [python(d, 'plain', actors.format(port=free_port()))],vars
    finally:
        p.stdin.close()
        p.wait(60)

def first_step(commands, d, vars):
    "Seconds to the first step: from the start of all `commands`, and from the call of `distribute` in one of them"
    for o in [d/'first', *d.glob('*.called')]: o.unlink(missing_ok=True)
    cmds,t = commands(),time.time()
    ps = [subprocess.Popen(list(map(str, o)), cwd=d, env=vars, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for o in cmds]
    said = [p.communicate(timeout=120)[0] for p in ps]
    if any(p.returncode for p in ps): raise RuntimeError('\n'.join(o[-5000:] for o in said))
    at = float((d/'first').read_text())
    return at-t,at-max([t, *(float(o.read_text()) for o in d.glob('*.called'))])

engines = dict(ssh=on_hosts, slurm=in_slurm, ray=on_ray)

@call_parse
def main(
    rounds:int=5, # Of each pair, in turn
    only:str='', # Engine; all by default
    out:str=None # JSON file to write the rows to
):
    "Time starts on other machines, which are this one"
    rows = []
    for name in [only] if only else engines:
        with TemporaryDirectory(prefix='fd', dir='/tmp') as d, engines[name](Path(d)) as (ours,plain,vars):
            pairs = []
            for i in range(rounds):
                t = {how:first_step(f, Path(d), vars) for how,f in list(dict(ours=ours, plain=plain).items())[::(-1)**i]}
                pairs.append((*t['ours'],t['plain'][0]))
                print(f'{name}, round {i+1} of {rounds}: {", ".join(f"{o:.2f}" for o in pairs[-1])} s', flush=True)
        ratios = {k:median(o[i]/o[2] for o in pairs) for i,k in enumerate(('ratio','call_ratio'))}
        rows.append(dict(engine=name, rounds=rounds) | {k:median(o[i] for o in pairs) for i,k in enumerate(('script','call','plain'))} | ratios)
    show_table('seconds to the first step of two ranks', ['','from the command','from the call','plain','ratio of commands','of the call'], [[o['engine'], *list(o.values())[2:]] for o in rows])
    save(rows, out)
