"Everything that only a GPU can tell, as one table: `python benchmarks/gpu.py --help`"
import json,multiprocessing,os,re,sys,time,traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from importlib import import_module
from fastcore.all import call_parse
from jobs import save

os.environ |= dict(PYTORCH_NVML_BASED_CUDA_CHECK='1', CUBLAS_WORKSPACE_CONFIG=':4096:8', OMP_NUM_THREADS='1', PYTHONWARNINGS='ignore')
here = Path(__file__).resolve().parent
os.environ['PYTHONPATH'] = os.pathsep.join(map(str, (here,here.parent,os.environ.get('PYTHONPATH', '')))) # the server of forks looks nowhere else
processes = multiprocessing.get_context('forkserver') # imports once, and is forked before it has used a device
limit = 1200 # characters of a figure that are shown

def be(module, name, rank, size, device, backend, folder, port, stage):
    "Run check `name` as one of its processes, and write what came of it"
    for o in (1,2): os.dup2(os.open(folder/f'log{stage}.{rank}', os.O_WRONLY|os.O_CREAT|os.O_APPEND), o)
    from gpu_checks import NotHere,Place
    try: res = dict(result='held', figure=import_module(module).checks[name].f(Place(rank, size, device, backend, folder, port, stage)))
    except NotHere as e: res = dict(result='not here', figure=str(e))
    except BaseException as e: res = dict(result='did not hold', figure=' '.join(f'{type(e).__name__}: {e}'.split())[:300], trace=traceback.format_exc())
    (folder/f'said{stage}.{rank}').write_text(json.dumps(res))
    for o in (sys.stdout,sys.stderr): o.flush()
    os._exit(0) # whatever a failed check has left behind

def said(folder, stage, rank, secs):
    "What a process has written, or how it ended"
    path,log = [folder/f'{o}{stage}.{rank}' for o in ('said','log')]
    res = json.loads(path.read_text()) if path.exists() else dict(result='did not hold', figure=f'rank {rank} ended without a word, or not within {secs} s')
    return res | (dict(log=log.read_text()[-3000:]) if res['result']=='did not hold' and log.exists() else {})

def started(module, name, check, size, device, backend, folder, stage):
    "What the processes of one stage of a check say, in rank order; none of them is left"
    from fastdist.launch.group import free_port
    args,end = (device,backend,folder,free_port(),stage),time.monotonic()+check.secs
    ps = [processes.Process(target=be, args=(module,name,rank,size,*args)) for rank in range(size)]
    try:
        for p in ps: p.start()
        for p in ps: p.join(max(0, end-time.monotonic()))
    finally:
        for p in ps: p.kill()
    return [said(folder, stage, rank, check.secs) for rank in range(size)]

def row(module, name, check, size, device, backend):
    "What came of a check: the first rank that failed, or what rank 0 says"
    if check.cuda and device!='cuda': return dict(result='not here', figure='it needs a GPU')
    start = time.monotonic()
    with TemporaryDirectory() as d:
        for stage in range(check.stages):
            res = started(module, name, check, size, device, backend, Path(d), stage)
            worst = next((o for o in res if o['result']!='held'), None)
            if worst: break
    return (worst or res[0]) | dict(seconds=time.monotonic()-start) | (dict(ranks=res) if worst and size>1 else {})

def places(check, count):
    "Names of the places where a check runs, each with number of processes, device and backend"
    device = 'cuda' if count else 'cpu'
    if check.kind=='one': return {'one process':(1,device,'gloo')}
    if check.kind=='group': return {'one rank, NCCL' if count else 'one rank, gloo':(1,device,'nccl' if count else 'gloo')}
    n = 2 if count==1 and os.environ.get('NCCL_MULTI_RANK_GPU_ENABLE')=='1' else count # from NCCL 2.30 on
    several = {f'{n} ranks, NCCL':(n,device,'nccl')} if n>1 else {}
    return {'2 ranks on a GPU, gloo' if count else '2 CPU ranks':(2,device,'gloo')}|several

def machine(count):
    "What a reader of the table has to know of where it was made"
    import accelerate,fastai,fastdist,torch
    gpus = [torch.cuda.get_device_properties(i).name for i in range(count)]
    versions = {o.__name__:o.__version__ for o in (torch,fastai,accelerate,fastdist)} | dict(python=sys.version.split()[0])
    return dict(gpus=gpus, cores=len(os.sched_getaffinity(0)), versions=versions)

def counts(rows): return {k:sum(o['result']==k for o in rows) for k in ('held','did not hold','not here','not run')}
def show(o): print(f'{o["check"]} ({o["where"]}): {o["result"]}, {o.get("seconds", 0):.0f} s; {o["figure"][:limit]}', flush=True)

@call_parse
def main(
    only:str='', # Regular expression for the names of checks to run; all by default
    where:str='', # The same for places, such as 'NCCL'
    module:str='gpu_checks', # That registers the checks
    at_once:int=4, # Checks that run beside each other; those that take times run alone, last
    minutes:float=9.5, # After which no further check is begun
    out:str=None # JSON file for machine and rows
):
    "Check on this machine's GPUs, or on the CPU what can be checked there, all that fastdist says of them"
    processes.set_forkserver_preload([module])
    import torch
    checks = import_module(module).checks
    count,end,rows = torch.cuda.device_count(),time.monotonic()+60*minutes,[]
    about = machine(count)
    todo = [(k,c,at,how) for k,c in checks.items() if re.search(only, k) for at,how in places(c, count).items() if re.search(where, at)]
    def keep(): save(dict(machine=about, counts=counts(rows), rows=rows), out)
    def run(name, check, where, how):
        late = time.monotonic()>end
        rows.append(o := dict(check=name, says=check.f.__doc__, where=where)|(dict(result='not run', figure='no time was left') if late else row(module, name, check, *how)))
        show(o)
        keep() # whoever ends this has what was found
    with ThreadPoolExecutor(at_once) as pool: list(pool.map(lambda o: run(*o), [o for o in todo if not o[1].alone]))
    for o in todo:
        if o[1].alone: run(*o)
    keep() # checks beside each other may have written at once
    n = counts(rows)
    print(', '.join(f'{n[k]} {k}' for k in n))
    sys.exit(n['did not hold']>0)
