"Jobs of CPU ranks that stay alive between requests, and tables of what they answer"
import importlib,json,multiprocessing,os,signal,sys,traceback,warnings,torch
from contextlib import contextmanager,redirect_stdout
from multiprocessing.connection import wait
from pathlib import Path
from threading import Thread
from torch import distributed as dist
from fastcore.all import modified_env

spawn = multiprocessing.get_context('spawn')
launcher_vars = 'RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE MASTER_ADDR MASTER_PORT'.split()

def rank_env(rank, size, port):
    "What torchrun would set for `rank`; one process of its own is told of no job"
    if size==1: return {}
    env = dict(zip(launcher_vars, (rank, size, rank, size, 0, 1, '127.0.0.1', port)))
    env |= dict(TORCHELASTIC_USE_AGENT_STORE=True, TORCHELASTIC_RUN_ID='benchmark', TORCHELASTIC_RESTART_COUNT=0)
    return {k:str(v) for k,v in env.items()}

def end_with_parent():
    "Let this process end when the one that started it does, however that ends and whatever happens here"
    def watch():
        multiprocessing.parent_process().join()
        os._exit(1)
    Thread(target=watch, daemon=True).start()

def bind(rank):
    "Give `rank` a core of its own, as `srun --cpu-bind=cores` does; else it is chance whether two ranks meet on one"
    if not hasattr(os, 'sched_setaffinity'): return
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank%len(cores)]})

def serve(conn, name, rank, size):
    "Make class `name` and send what it returns for each request, until this process is killed"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    warnings.filterwarnings('ignore')
    bind(rank)
    torch.set_num_threads(1)
    try:
        with open(os.devnull, 'w') as quiet, redirect_stdout(quiet): answer_all(conn, name, rank, size)
    except ModuleNotFoundError as e: conn.send(('missing', e.name))
    except Exception: conn.send(('failed', traceback.format_exc()))

def answer_all(conn, name, rank, size):
    mod,cls = name.split('.')
    obj = getattr(importlib.import_module(mod), cls)(rank, size)
    conn.send(('ready', None))
    while True: conn.send(('done', obj(*conn.recv())))

class Job:
    "`size` processes with one thread, each of which makes class `name` of a module here and waits for requests"
    def __init__(self, name, size, env=None):
        self.name,self.size,self.env,self.conns,self.procs = name,size,env or {},[],[]
        self.store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False) if size>1 else None
        for rank in range(size): self._start(rank)

    def _start(self, rank):
        here,there = spawn.Pipe()
        p = spawn.Process(target=serve, args=(there, self.name, rank, self.size), daemon=True)
        env = rank_env(rank, self.size, self.store and self.store.port) | dict(OMP_NUM_THREADS='1') | self.env
        with modified_env(*[k for k in launcher_vars if k in os.environ], **env): p.start()
        there.close()
        self.conns.append(here)
        self.procs.append(p)

    def ask(self, *request):
        "What each rank answers to `request`, in rank order"
        for c in self.conns: c.send(request)
        return self.answers()

    def answers(self, timeout=300):
        "One message of each rank, in rank order; an error on any of them is raised at once"
        got = {}
        while len(got)<self.size:
            ready = wait([c for c in self.conns if c not in got], timeout)
            if not ready: raise TimeoutError(f'{self.name} on {self.size} ranks was silent for {timeout} seconds')
            got |= {c:self._receive(c) for c in ready}
        return [got[c] for c in self.conns]

    def _receive(self, conn):
        try: kind,res = conn.recv()
        except EOFError: kind,res = 'failed','its process died'
        if kind=='missing': raise ModuleNotFoundError(f'{res} is not installed', name=res)
        if kind=='failed': raise RuntimeError(f'{self.name} on {self.size} ranks failed: {res}')
        return res

    def end(self):
        for p in self.procs: p.kill()
        for p in self.procs: p.join()

@contextmanager
def open_jobs(specs, env=None):
    "Key -> `Job`, for `specs` of key -> `(name, size)`, with `env` in the environment; none of their processes is left, whatever happens"
    jobs = {}
    old = signal.signal(signal.SIGTERM, lambda *_: sys.exit('terminated'))
    try:
        for k,spec in specs.items(): jobs[k] = Job(*spec, env=env)
        yield jobs
    finally:
        for o in jobs.values(): o.end()
        signal.signal(signal.SIGTERM, old)

def show_table(title, heads, rows):
    "Print `rows`, lists of cells in the order of `heads`; numbers are right-aligned, `None` is a dash"
    cells = [heads] + [['-' if c is None else c if isinstance(c, str) else f'{c:.2f}' for c in r] for r in rows]
    wide = [max(map(len, col)) for col in zip(*cells)]
    print(f'\n{title}')
    for r in cells: print('  '.join([r[0].ljust(wide[0])]+[c.rjust(w) for c,w in zip(r[1:], wide[1:])]))

def save(rows, out):
    if out: Path(out).write_text(json.dumps(rows, indent=1))
