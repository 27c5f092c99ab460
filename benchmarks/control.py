"The job's store with many ranks on one machine: seconds of a start, a vote, an error on one rank and on all, the end, and a kill: `python benchmarks/control.py --help`"
import json,os,signal,time,traceback
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from fastcore.all import call_parse
from fastdist.base.errors import RankError
from fastdist.comm.job import Job
from fastdist.launch.world import World

def timed(f):
    start = time.monotonic()
    f()
    return time.monotonic()-start

def vote(job): return median([timed(lambda: job.agree('a vote')) for _ in range(30)])

def error(job, who):
    "Return the seconds until this rank has the error of those in `who`, and all have resumed"
    def fails():
        job.interrupt.enable()
        try:
            if job.rank in who: raise ValueError('a broken file')
            time.sleep(60)
        except ValueError as e: job.fail(e)
        except RankError: pass
    return timed(fails),timed(job.restart)

def whole(job, size, at):
    res = dict(start=time.monotonic()-at, vote=vote(job), error=error(job, {size-1}), errors=error(job, range(size)))
    end = timed(job.leave)
    return res|dict(end=end)

def killed(job, size, at):
    "The last rank is killed; return the seconds until the others have its error"
    job.interrupt.enable()
    job.meet()
    if job.rank==size-1: os.kill(os.getpid(), signal.SIGKILL)
    try: return timed(lambda: time.sleep(60))
    except RankError: return time.monotonic()-at

def be_rank(f, rank, size, out, gate):
    os.read(gate, 1)
    start = time.monotonic()
    job = Job(World(rank, size, rank, size, master_addr='127.0.0.1')).open(120)
    Path(f'{out}/{rank}').write_text(json.dumps(f(job, size, start)))

def started(f, size):
    "Run `f` on `size` forked ranks, and return what the slowest took"
    with TemporaryDirectory() as out:
        os.environ['FASTDIST_STORE'] = f'{out}/store'
        (gate,opening),pids = os.pipe(),[]
        for rank in range(size):
            pids.append(os.fork())
            if pids[-1]: continue
            try:
                os.close(opening)
                be_rank(f, rank, size, out, gate)
            except BaseException: traceback.print_exc()
            finally: os._exit(0)
        os.close(opening)
        for p in pids: os.waitpid(p, 0)
        return [json.loads(p.read_text()) for p in Path(out).iterdir() if p.name.isdigit()]

@call_parse
def main(
    sizes:str='8,64' # Numbers of ranks
):
    "Print seconds of the slowest rank"
    for size in map(int, sizes.split(',')):
        res = started(whole, size)
        print(f'{size} ranks:', {k:max(o[k] for o in res) if k!='error' and k!='errors' else [max(o[k][i] for o in res) for i in range(2)] for k in res[0]})
        print(f'{size} ranks, from the start to the error of the one that is killed:', max(started(killed, size)))
