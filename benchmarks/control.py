"The control connection with many ranks on one machine: seconds, and bytes at rank 0, of a start, votes, errors, a wait, the end and a kill: `python benchmarks/control.py --help`"
import json,os,signal,socket,struct,time,traceback
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from fastcore.all import call_parse
from fastdist.comm.relay import NodeRelays
from fastdist.comm.vote import voting_connection
from fastdist.comm.vote import Notes
from fastdist.comm.watchdog import Watchdog
from fastdist.job.fork import RankError
from fastdist.job.world import World

def traffic(line):
    "Bytes that rank 0 has sent and received over the connections that are open now, as the kernel counts them"
    socks = [o.sock for o in (*line.lines.values(), *line.vote_lines.values())]
    return sum(sum(struct.unpack_from('QQ', o.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192), 120)) for o in socks) if line.rank==0 else 0

def deep(n):
    "Fail with a traceback as long as a user's; Python shortens that of a function which calls itself"
    if n: return deeper(n-1)
    raise ValueError('a broken file')

def deeper(n): return deep(n)

def fails(line, who):
    "Return when this rank, in `who`, failed, or when it heard of it"
    try:
        line.faults.arm()
        if line.rank not in who: time.sleep(60)
        at = time.monotonic()
        deep(30)
    except RankError: at = time.monotonic()
    except ValueError as e: line.faults.failed_here(e)
    return at

def votes(line, n=30):
    res = []
    for _ in range(n):
        start = time.perf_counter()
        line.votes.agree(0)
        res.append(time.perf_counter()-start)
    return median(res)

def waits(line, secs=5):
    "Return the processor time of rank 0 while all wait for the last rank"
    start = time.process_time()
    if line.rank==line.world.size-1: time.sleep(secs)
    line.votes.agree(0)
    return time.process_time()-start

def stage(line, f):
    "Return what `f` returns on this rank, the seconds until all have met after it, and rank 0's bytes"
    before,start = traffic(line),time.monotonic()
    res = f(line)
    if line.faults.failed or line.faults.trouble: line.faults.renew()
    else: line.votes.meet()
    took,line.faults.armed = time.monotonic()-start,False # what the next stage does to others is heard in it
    res = res,took,traffic(line)-before
    line.votes.meet() # none closes before rank 0 has counted
    return res

def whole(line, size):
    "All that a job can outlive"
    line.faults.renew()
    stages = dict(vote=votes, wait=waits, error=lambda o: fails(o, {size-1}), errors=lambda o: fails(o, range(size)))
    return {k:stage(line, f) for k,f in stages.items()}

def killed(line, size):
    "The last rank is killed; return when the others hear of it"
    line.faults.renew()
    at = time.monotonic()
    if line.rank==size-1:
        Path('killed').write_text(str(at))
        os.kill(os.getpid(), signal.SIGKILL)
    return dict(kill=fails(line, ()))

def be_rank(rank, size, local, job, gate):
    os.read(gate, 1)
    start,cpu = time.monotonic(),time.process_time()
    world = World(rank, size, rank%local, local, rank//local, size//local, master_addr='127.0.0.1')
    line = voting_connection(world, patience=60, topology=NodeRelays).add(Notes,Watchdog)
    line.topology.most = 0
    line.open(120)
    res = dict(start=(None, time.monotonic()-start, traffic(line)), memory=int(Path('/proc/self/statm').read_text().split()[1])*4096)
    res |= job(line, size)
    end = time.monotonic()
    line.close()
    Path(f'{rank}.json').write_text(json.dumps(res|dict(end=time.monotonic()-end, cpu=time.process_time()-cpu)))

def on_ranks(job, size, local):
    "Run `job` on `size` ranks forked from this process, `local` to a node, which begin together; return what those say that live"
    with TemporaryDirectory() as d:
        os.chdir(d)
        os.environ['FASTDIST_STORE'] = f'{d}/store'
        (gate,go),pids = os.pipe(),[]
        for r in range(size):
            pids.append(os.fork())
            if pids[-1]: continue
            os.close(go)
            try: be_rank(r, size, local, job, gate)
            except BaseException: traceback.print_exc()
            finally: os._exit(0)
        os.close(go)
        os.close(gate)
        for pid in pids: os.waitpid(pid, 0)
        res = {r:json.loads(Path(f'{r}.json').read_text()) for r in range(size) if Path(f'{r}.json').exists()}
        return res,float(Path('killed').read_text()) if Path('killed').exists() else None

def figures(size, local):
    "Return a row for each stage: what, seconds, bytes at rank 0"
    res,_ = on_ranks(whole, size, local)
    gone,at = on_ranks(killed, size, local)
    if (len(res),len(gone))!=(size,size-1): raise RuntimeError(f'{len(res)} and {len(gone)} of {size} ranks came to the end')
    took,sent = (lambda k, i=1: max(o[k][i] for o in res.values())),(lambda k: res[0][k][2])
    failed = res[size-1]['error'][0]
    rows = [('start', took('start'), sent('start')), ('vote', res[0]['vote'][0], sent('vote')/30), ('wait of 5 s, CPU', res[0]['wait'][0], sent('wait'))]
    rows += [('an error is heard', max(o['error'][0] for o in res.values())-failed, sent('error')), ('an error on all', took('errors'), sent('errors'))]
    return rows+[('a kill is heard', max(o['kill'] for o in gone.values())-at, None), ('end', max(o['end'] for o in res.values()), None), ('CPU of rank 0', res[0]['cpu'], None)]

@call_parse
def main(
    sizes:str='64,256', # Numbers of ranks
    local:int=8 # Ranks on a node, whose first one relays
):
    for size,on_node in [(int(o),n) for o in sizes.split(',') for n in (int(o),local)]:
        print(f'{size} ranks on {size//on_node} nodes', flush=True)
        for what,secs,n in figures(size, on_node): print(f'  {what:18} {secs:8.4f} s' + ('' if n is None else f' {n:14,.0f} bytes'), flush=True)
