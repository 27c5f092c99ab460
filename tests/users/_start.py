"""Start users' scripts on a terminal, and show what is on it in the end: `python tests/users/_start.py SCRIPT [N]`

A person's terminal is a pty. Ranks are forked from a process that has imported what scripts import, but not fastdist, and stand there as torchrun would have started them:
that costs a second, where launchers take many. What is still running when the script has ended is found, since orphans are handed to who started it."""
import atexit,gc,multiprocessing,os,psutil,pty,random,re,resource,runpy,select,shutil,signal,struct,sys,tempfile,termios,threading,time,warnings
import torch,torch.distributed.run,numpy as np
from ctypes import CDLL
from fcntl import ioctl
from importlib import import_module
from multiprocessing.connection import Listener
from pathlib import Path
from types import ModuleType
from accelerate.commands import accelerate_cli
from torch.distributed.launcher.api import elastic_launch
sys.path.append(str(Path(__file__).parent.parent/'helpers'))
from forks import huge_pages
from procs import free_port

def as_one(text, n):
    "The script `text` with plain fastai or Accelerate, in one process, with the batches of `n` ranks"
    for a,b in (('from fastdist import *','from fastai.distributed import *'), ('from fastdist import Accelerator','from accelerate import Accelerator')):
        text = re.sub(f'^{re.escape(a)}', b, text, flags=re.M)
    text = re.sub(r'Accelerator\(nprocs=\d+\)\.distribute\((.+)\)\(', r'\1(', text)
    text = re.sub(r'\bnum_processes=\d+', 'num_processes=1', text.replace('in_notebook=True', '').replace(f'(nprocs={n})', '()').replace('accelerator.distribute(train)', 'train'))
    return re.sub(r'^(\s*)bs = (\d+)', lambda m: f'{m[1]}bs = {int(m[2])*n}', text, flags=re.M)

def _streams():
    "Python's streams anew, for the descriptors that are there now"
    for i,(name,mode) in enumerate((('stdin','r'), ('stdout','w'), ('stderr','w'))): setattr(sys, name, open(i, mode, buffering=1, closefd=False))

def code_of(f, *args):
    "The exit code of a Python whose script is `f`"
    try: code = f(*args)
    except SystemExit as e: code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException as e:
        while e.__traceback__.tb_next and e.__traceback__.tb_frame.f_code.co_filename==__file__: e.__traceback__ = e.__traceback__.tb_next
        sys.excepthook(type(e), e, e.__traceback__)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for o in (sys.stdout,sys.stderr): o.flush()
    return code or 0

def script(path, text, *args):
    "What `python path *args` does, with `text` for what is in the file"
    _streams()
    main = sys.modules['__main__'] = ModuleType('__main__')
    for f in (random.seed,np.random.seed,torch.seed): f() # as a new process begins
    main.__file__,sys.argv,sys.path[0] = str(path),[str(path),*args],str(Path(path).parent)
    exec(compile(text, path, 'exec'), vars(main))

def python(*args):
    "What `python *args` does: a script, `-m` and a module, or `-c` and code"
    first,*rest = [o for o in args if o!='-u']
    if first=='-m':
        _streams()
        sys.argv,sys.path[0] = rest,os.getcwd()
        runpy.run_module(rest[0], run_name='__main__', alter_sys=True)
    elif first=='-c': script('', *rest)
    else: script(first, Path(first).read_text(), *rest)

# Launchers in this process, whose ranks are forks of it

def _rank(*args):
    for o in (signal.SIGTERM,signal.SIGHUP,signal.SIGQUIT): signal.signal(o, signal.SIG_DFL) # the agent has handlers of its own
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = code_of(python, *args)
    if code: os._exit(code)

def _elastic_launch(config, entrypoint):
    config.start_method = 'fork'
    return elastic_launch(config, _rank)

def launch(name, *args):
    "What `torchrun`, `accelerate` or `python` does with `args`; ranks of the first two are forked by torch's agent, where it would start a Python"
    _streams()
    torch.distributed.run.elastic_launch = _elastic_launch
    sys.argv = [name,*args]
    if name=='torchrun': torch.distributed.run.main(list(args))
    elif name=='accelerate': accelerate_cli.main()
    else: python(*args)

def fork_ranks(path, text, n):
    "Fork `n` ranks, as torchrun would have started them, and end as they do"
    job = dict(WORLD_SIZE=n, LOCAL_WORLD_SIZE=n, GROUP_RANK=0, GROUP_WORLD_SIZE=1, MASTER_ADDR='127.0.0.1', MASTER_PORT=free_port(), TORCHELASTIC_RUN_ID='users')
    for rank in range(n):
        if os.fork(): continue
        own = dict(RANK=rank, LOCAL_RANK=rank, TORCHELASTIC_ERROR_FILE=f'{os.getcwd()}/users_0/attempt_0/{rank}/error.json')
        os.environ.update({k:str(v) for k,v in (job|own).items()})
        os._exit(code_of(script, path, text))
    codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(n)]
    os._exit(next((abs(o) for o in codes if o), 0))

def lead(path=None, text=None, n=0, cmd=None, real=False, plain=False):
    "In the session of the new terminal: run `cmd`, or the script, in `n` ranks or in this process; `real` where what a launcher says of a rank's end is the point, `plain` for a script without a guard that knows no fastdist"
    if plain: multiprocessing.set_start_method('fork') # from Python 3.14 on the default would run the whole script again for its data workers
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if cmd and not real and Path(cmd[0]).name in ('torchrun','accelerate'): os._exit(code_of(launch, Path(cmd[0]).name, *cmd[1:]))
    if cmd: os.execvp(cmd[0], cmd)
    if n: fork_ranks(path, text, n)
    os._exit(code_of(script, path, text))

def family(): return psutil.Process().children(recursive=True)

def _gone(seconds):
    "The processes that are left after `seconds`, at most; what they run"
    end = time.monotonic()+seconds
    while (left := [o for o in family() if o.is_running() and o.status()!=psutil.STATUS_ZOMBIE]) and time.monotonic()<end: time.sleep(0.02)
    return left

def play(timeout=150, env=None, **job):
    "What the terminal shows of `job`, its exit code (`None` if it took longer than `timeout`), the seconds it took, and what it left running"
    CDLL(None).prctl(36, 1) # PR_SET_CHILD_SUBREAPER
    os.environ.update(FREE_PORT=str(free_port()), **(env or {}))
    start = time.monotonic()
    d = tempfile.mkdtemp(prefix='users') # not a `TemporaryDirectory`, which forks would clean up
    os.chdir(d)
    pid,fd = pty.fork()
    if not pid: lead(**job)
    ioctl(fd, termios.TIOCSWINSZ, struct.pack('4H', 50, 160, 0, 0))
    raw,code = _read(pid, fd, start+timeout)
    seconds = time.monotonic()-start
    left = _gone(2 if code is not None else 0)
    res = dict(raw=raw.decode(errors='replace'), code=code, seconds=seconds, cpu=_cpu(), left=[' '.join(o.cmdline()) or o.name() for o in left])
    for o in left: o.kill()
    os.chdir('/')
    shutil.rmtree(d, ignore_errors=True)
    return res

def run(cmd, env, cwd, timeout, tell=lambda pid: None):
    "Exit code of the launcher `cmd`, whose process `tell` gets, `None` if it took longer than `timeout`; its stdout and stderr, and what it left running"
    CDLL(None).prctl(36, 1) # PR_SET_CHILD_SUBREAPER
    files = [tempfile.TemporaryFile() for _ in range(2)]
    pid = os.fork()
    if not pid:
        os.setsid()
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        if env.get('PYTHONWARNINGS')=='ignore': warnings.simplefilter('ignore')
        for i,f in enumerate(files, 1): os.dup2(f.fileno(), i)
        os._exit(code_of(launch, Path(cmd[0]).name, *cmd[1:]))
    tell(pid)
    code,end = None,time.monotonic()+timeout
    while code is None and time.monotonic()<end:
        p,status = os.waitpid(pid, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if p else time.sleep(.02)
    left = _gone(2 if code is not None else 0)
    for o in left: o.kill()
    for f in files: f.seek(0)
    out = re.sub(r'\[Gloo\] Rank \d+ is connected.*\n', '', files[0].read().decode()) # torch 2.10 prints it for each group
    return dict(code=code, out=out, err=files[1].read().decode(), left=[' '.join(o.cmdline()) or o.name() for o in left])

def _cpu(): return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])

def _read(pid, fd, end):
    "Bytes from `fd` until process `pid` has ended or it is `end`, and its exit code"
    raw,code = b'',None
    while time.monotonic()<end:
        if code is None:
            p,status = os.waitpid(pid, os.WNOHANG)
            if p: code = os.waitstatus_to_exitcode(status)
        ready = select.select([fd], [], [], 0.02 if code is None else 0)[0]
        try: data = os.read(fd, 1<<16) if ready else b''
        except OSError: data = b''
        raw += data
        if code is not None and not data: break
        if ready and not data: time.sleep(0.01)
    return raw,code

def screen(raw):
    "The lines that are there in the end: what came after a carriage return overwrites, and escapes are gone"
    lines = []
    for line in re.sub(r'\x1b\[[0-9;?]*[A-Za-z]', '', raw).replace('\r\n', '\n').split('\n'):
        shown = ''
        for part in line.split('\r'): shown = part+shown[len(part):]
        lines.append(shown.rstrip())
    return [o for o in lines if o]

def serve(at):
    "Fork a process for each job that comes to the socket `at`"
    CDLL(None).prctl(1, signal.SIGTERM) # PR_SET_PDEATHSIG: end with the tests, however they end
    with Listener(at) as listener:
        print('ready', flush=True)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            conn = listener.accept()
            if os.fork():
                conn.close()
                continue
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            job = conn.recv()
            if job.pop('told', False): job['tell'] = conn.send
            conn.send((run if 'cwd' in job else play)(**job))
            os._exit(0)

def warm_up():
    "Import what scripts import, but not what is tested; as on a machine with one core, where a loader that is not told has one data worker"
    gc.disable() # there is no garbage yet
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    import_module('fastcore.basics') # which counts them
    os.sched_setaffinity(0, cores)
    for o in 'vision.all text.all tabular.all collab vision.gan distributed callback.all'.split(): __import__(f'fastai.{o}')
    for o in 'torch._dynamo sklearn.datasets torch.distributed.launcher.api accelerate cloudpickle IPython.display'.split(): __import__(o)
    gc.freeze()
    gc.enable()
    huge_pages()

def main(script, n=2, *_):
    "For a person: the script on one process, then on `n` ranks"
    warm_up()
    path = Path(script).resolve()
    for k in (0,int(n)):
        pid = os.fork()
        if pid: os.waitpid(pid, 0)
        else:
            text = path.read_text()
            res = play(path=path, text=text if k else as_one(text, int(n)), n=k, plain=not k)
            print(f'--- {k or 1} {"ranks" if k else "process"}: exit code {res["code"]} after {res["seconds"]:.1f} s, left: {res["left"]}', *screen(res['raw']), sep='\n', flush=True)
            os._exit(0)

if __name__=='__main__':
    if sys.argv[1]=='--serve':
        warm_up()
        serve(sys.argv[2])
    else: main(*sys.argv[1:])
    os._exit(0) # what was imported to warm up has leaks to tell of
