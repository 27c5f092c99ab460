"Processes that tests start: commands as a person types them, what they print, kernels, and that none is left"
import nbformat,os,re,shutil,signal,socket,subprocess,sys,time
from contextlib import suppress
from multiprocessing.connection import Client
from nbclient import NotebookClient
from pathlib import Path
from random import SystemRandom
from tempfile import TemporaryDirectory
from types import SimpleNamespace

here = Path(__file__).parent # scripts that tests start lie beside this file
tests = here.parent
bin_,top = Path(sys.executable).parent,tests.parent
examples = top/'examples'
os.environ.setdefault('OMP_WAIT_POLICY', 'passive') # threads of several processes that spin take the cores from each other
os.environ['PYTHONPATH'] = os.pathsep.join(dict.fromkeys([str(here/'cold'), *filter(None, os.environ.get('PYTHONPATH', '').split(os.pathsep))]))
env = {k:v for k,v in os.environ.items() if k!='OMP_NUM_THREADS'} | dict(PYTHONWARNINGS='ignore')

def free_port():
    "As `fastdist.launch.group.free_port`; what scripts start may not import fastdist"
    while True:
        with suppress(OSError), socket.create_server(('127.0.0.1', SystemRandom().randrange(10_000, 32_768))) as s: return s.getsockname()[1]

def await_that(cond, seconds=90):
    end = time.monotonic()+seconds
    while not cond():
        assert time.monotonic()<end
        time.sleep(.05)

# Commands

gloo = re.compile(r'\[Gloo\] Rank \d+ is connected to \d+ peer ranks.*\n') # which torch 2.10 prints for each group

def start(*cmd, env=env, out=subprocess.PIPE, err=subprocess.STDOUT):
    return subprocess.Popen(list(map(str, cmd)), stdout=out, stderr=err, text=True, start_new_session=True, env=env)

def said(*procs, timeout):
    "Stdout and stderr of each of `procs`, which have `timeout` seconds to end; none of them is left, whatever happens"
    try: return [tuple(o and gloo.sub('', o) for o in p.communicate(timeout=timeout)) for p in procs]
    finally:
        for p in procs:
            if p.poll() is None: os.killpg(p.pid, signal.SIGKILL)

def output(*procs, timeout=150):
    "What `procs` print, all of which must succeed"
    outs = [o for o,_ in said(*procs, timeout=timeout)]
    for p,o in zip(procs, outs): assert p.returncode==0, o[-3000:]
    return ''.join(outs)

def run(*cmd, rc=0, timeout=110, **vars):
    "Stdout and stderr of a command, which must end with `rc`"
    p = start(*cmd, env=env|vars, err=subprocess.PIPE)
    (out,err), = said(p, timeout=timeout)
    assert p.returncode==rc, f'exit code {p.returncode}:\n{out[-2000:]}\n{err[-5000:]}'
    return out,err

def torchrun(*cmd, n=2): return bin_/'torchrun','--standalone','--nproc_per_node',n,*cmd
def accelerate(*cmd): return bin_/'accelerate','launch','--main_process_port',0,*cmd

class Warm:
    "A process that has imported what scripts import, but not fastdist, and runs each job in a fork: seconds less for each process"
    def __init__(self, **vars):
        self.d = TemporaryDirectory()
        self.at = f'{self.d.name}/socket'
        self.server = start(sys.executable, tests/'users/_start.py', '--serve', self.at, env=env|dict(OMP_NUM_THREADS='1')|vars, err=None)
        assert self.server.stdout.readline()=='ready\n'

    def ask(self, **job):
        with Client(self.at) as c:
            c.send(job)
            return SimpleNamespace(**c.recv())

    def __call__(self, *cmd, rc=0, timeout=110, **vars):
        "As `run`, for `torchrun`, `accelerate` and `python`"
        p = self.ask(cmd=list(map(str, cmd)), env=env|vars, cwd=os.getcwd(), timeout=timeout)
        assert p.code==rc and not p.left, f'exit code {p.code}, left {p.left}:\n{p.out[-2000:]}\n{p.err[-5000:]}'
        return p.out,p.err

    def start(self, *cmd, timeout=110, **vars): return Job(self.at, cmd=list(map(str, cmd)), env=env|vars, cwd=os.getcwd(), timeout=timeout)

    def close(self):
        self.server.terminate()
        self.server.communicate()
        self.d.cleanup()

class Job:
    "A launcher that runs in a fork, for a test that does something to it meanwhile: as a `Popen`, of which nothing is left once it has ended"
    def __init__(self, at, **job):
        self.conn,self.returncode = Client(at),None
        self.conn.send(job|dict(told=True))
        self.pid = self.conn.recv()

    def poll(self): return self.returncode if self.returncode is not None or not self.conn.poll() else self.communicate() and self.returncode

    def communicate(self, timeout=None):
        if self.returncode is None:
            if not self.conn.poll(timeout): raise subprocess.TimeoutExpired('a launcher in a fork', timeout)
            res = SimpleNamespace(**self.conn.recv())
            assert not res.left, f'left {res.left}:\n{res.out[-2000:]}\n{res.err[-5000:]}'
            self.returncode,self.said = res.code,(res.out,res.err)
        return self.said

    def end(self):
        if self.poll() is None: os.killpg(self.pid, signal.SIGKILL)

# Debian's packages

def _apt(*args): return subprocess.run(['apt-get', *args], env=env|dict(DEBIAN_FRONTEND='noninteractive'), capture_output=True, text=True, timeout=150).stderr[-500:]

def why_missing(commands, *packages, path=None):
    "Why some of `commands` are not here, nor can be installed from Debian's `packages`"
    lack = lambda: [o for o in commands.split() if not shutil.which(o, path=path)]
    if not lack(): return
    if os.geteuid() or not shutil.which('apt-get'): return f'{lack()} are missing, and only root can install them, with apt-get'
    try: said = _apt('update')+_apt('install', '-y', *packages)
    except subprocess.TimeoutExpired as e: said = str(e)
    if lack(): return f'{lack()} are missing, and apt-get did not install them: {said}'

# What runs

def processes(path):
    "Processes that have `path` among their arguments, as forks of such a one have too"
    def args(pid):
        try: return Path(f'/proc/{pid}/cmdline').read_text().split('\0')
        except OSError: return []
    return [pid for pid in map(int, filter(str.isdigit, os.listdir('/proc'))) if str(path) in args(pid)]

def attached(name, what, **vars):
    "What another process that has found the detached job `name` prints of it"
    out,_ = run(sys.executable, '-c', f'from fastdist import *; job = Accelerator.attach({name!r}); print({what})', **vars)
    return out

def ended_and_home(**vars):
    "Check that other processes follow two detached jobs; that one is cancelled, and the other, which may have waited for its place, is done when there is a file `go`"
    follow = lambda o: await_that(lambda: 'begun' in attached(o, 'job.status, job.log()', **vars))
    follow('ended')
    assert attached('ended', 'job.cancel().status', **vars)=='cancelled\n'
    follow('home')
    assert attached('home', 'job.status', **vars)=='running\n'
    Path('go').touch()
    assert attached('home', 'job.result()', **vars)=='[0, 1]\n'

def alive(pid):
    try: return Path(f'/proc/{pid}/stat').read_text().split(') ')[1][0]!='Z'
    except OSError: return False

def listeners(pid='self'):
    "Addresses and ports at which TCP sockets of process `pid` listen, those of the network namespace in which it is"
    def linked(o):
        try: return os.readlink(o)
        except OSError: return ''
    own = {m[1] for o in Path(f'/proc/{pid}/fd').iterdir() if (m := re.fullmatch(r'socket:\[(\d+)\]', linked(o)))}
    rows = [o.split() for k in ('tcp','tcp6') for o in Path(f'/proc/{pid}/net/{k}').read_text().splitlines()[1:]]
    return {address(*o[1].split(':')) for o in rows if o[3]=='0A' and o[9] in own}

def address(ip, port):
    "What Linux writes as words of four bytes in the machine's order"
    raw = b''.join(int(ip[i:i+8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(ip), 8))
    return socket.inet_ntop(socket.AF_INET if len(raw)==4 else socket.AF_INET6, raw),int(port, 16)

# Notebooks

def executed(text, path, raises=()):
    "The notebook whose cells are in `text`, run in a kernel that stands in `path`; cells of the numbers `raises` end in an error"
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(o) for o in text.split('# %%')])
    for i in raises: nb.cells[i].metadata['tags'] = ['raises-exception']
    NotebookClient(nb, timeout=120, kernel_name='python3', resources=dict(metadata=dict(path=str(path)))).execute()
    return nb.cells

def shown(cell): return ''.join(o.get('text', '') for o in cell.outputs)

# Jobs of two nodes

def ends(out, size, source):
    "Check that `out` tells of a job of two nodes, whose ranks stand where they should and have the same weights, which have learnt something"
    assert f'fastdist: {size} ranks on 2 nodes, cpu over gloo, from {source};' in out, out[-3000:]
    n = size//2
    said = sorted(re.findall(rf'rank (\d) of {size} \(local (\d) of {n} on node (\d) of 2, [^)]*\) on cpu over gloo, from {source}: weights ([0-9a-f]{{8}})', out))
    assert [tuple(map(int, o[:3])) for o in said]==[(i,i%n,i//n) for i in range(size)], out[-3000:]
    assert float(re.search(r'accuracy: ([\d.]+)', out)[1])>.85
    assert len({o[3] for o in said})==1 and out.count('accuracy: ')==1
