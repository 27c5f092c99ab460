"What test_ray.py runs in processes of their own: a cluster of two nodes on this machine, heads of ranks on it, and a trainer of Ray's own"
import json,os,signal,subprocess,sys,threading,time
from pathlib import Path

def cluster(d):
    "Serve a cluster until standard input ends; a line there kills its second node"
    from ray.cluster_utils import Cluster
    c = Cluster(initialize_head=True, head_node_args=dict(num_cpus=2, node_name='one', include_dashboard=False))
    second = c.add_node(num_cpus=2, node_name='two')
    print(c.address, flush=True)
    for _ in sys.stdin:
        c.remove_node(second, allow_graceful=False)
        print('killed', flush=True)
    c.shutdown()

def head(d):
    "Train, fail, be interrupted, and lose a node, on ranks of the cluster"
    import ray
    from fastai.basics import SGD,Callback,CrossEntropyLossFlat,DataLoaders,Learner,nn,set_seed,torch
    from fastdist import Accelerator,RankError,this_world
    ray.init(log_to_driver=False)
    begun = Path(d, 'begun')

    class Points:
        def __init__(self, n):
            self.x = torch.randn(n, 8, generator=torch.Generator().manual_seed(1))
            self.y = (self.x.sum(1)>0).long()
        def __len__(self): return len(self.x)
        def __getitem__(self, i): return self.x[i],self.y[i]

    class Stays(Callback):
        def after_fit(self): self.learn.where = os.getcwd(),os.environ.get('WANDB_NAME')

    def learner():
        set_seed(3)
        dls = DataLoaders.from_dsets(Points(128), Points(32), bs=8)
        return Learner(dls, nn.Sequential(nn.Linear(8,16), nn.ReLU(), nn.Linear(16,2)), loss_func=CrossEntropyLossFlat(), cbs=Stays())

    def trained(**kw):
        learn = learner()
        Accelerator(nprocs=4, compute_setup='cpu', **kw).distribute(learn.fit_one_cycle)(2, 1e-2)
        return learn

    def once(**kw):
        "A script that runs once: two fits in a context"
        learn = learner()
        learn.opt_func = SGD
        with learn.distrib_ctx(**kw), learn.no_bar(), learn.no_logging():
            for _ in range(2): learn.fit(1, 1e-2)
        return learn

    def apart(a, b): return max((x-y).abs().max().item() for x,y in zip(a.model.parameters(), b.model.parameters()))

    def away(fun, n=4, at=None):
        "The error of `fun` on ranks, and when it came; `at` is called when all ranks have begun"
        begun.mkdir(exist_ok=True)
        for f in begun.iterdir(): f.unlink()
        def wait():
            while len(list(begun.iterdir()))<n: time.sleep(.02)
            at()
        if at: threading.Thread(target=wait, daemon=True).start()
        try: Accelerator(nprocs=n, compute_setup='cpu', engine='ray').distribute(fun)()
        except (RankError,KeyboardInterrupt) as e: return f'{type(e).__name__}: {e}',time.time()

    def fails():
        if this_world().rank==1: raise ValueError('of the script')
        time.sleep(60)
    def dies():
        if this_world().rank==1: os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    def shows(): return os.environ['WANDB_API_KEY'],'a'*40 in subprocess.run(['ps','axww'], capture_output=True, text=True).stdout
    def sleeps():
        (begun/str(os.getpid())).touch()
        time.sleep(60)

    def lose():
        asked.append(time.time())
        print('kill', flush=True)

    asked,pressed = [],[]
    def freed():
        "CPUs that are free again within ten seconds"
        end = time.time()+60
        while (n := ray.available_resources().get('CPU', 0))<4 and time.time()<end: time.sleep(.1)
        return n
    def press(): pressed.append(time.time()) or os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGTERM)
    there,here = trained(engine='ray'),trained()
    gap = apart(once(), once(nprocs=2, engine='ray', compute_setup='cpu'))
    res = dict(apart=apart(there, here), once=gap, where=there.where, epochs=len(there.recorder.values), error=away(fails, 2)[0], died=away(dies, 2)[0])
    res |= dict(shown=Accelerator(nprocs=2, compute_setup='cpu', engine='ray').distribute(shows, all_ranks=True)())
    res |= dict(interrupt=away(sleeps, 2, press), pressed=pressed, free=freed(), handler=signal.getsignal(signal.SIGTERM)==before)
    res |= dict(lost=away(sleeps, 4, lose), asked=asked, groups=[o['state'] for o in ray.util.placement_group_table().values()])
    Path(d, 'res.json').write_text(json.dumps(res)) # Ray writes to standard output too

def killed(d):
    "Ranks that write down their processes, and sleep; nobody ends them but the end of their head"
    from fastdist import Accelerator
    def sleeps():
        Path(d, f'rank{os.getpid()}').touch()
        time.sleep(60)
    Accelerator(nprocs=2, compute_setup='cpu', engine='ray').distribute(sleeps)()

def detached(d):
    "Two jobs that go on without this process"
    from fastdist import Accelerator,this_world
    def waits():
        print('begun', flush=True)
        while not Path(d, 'go').exists(): time.sleep(.1)
        return this_world().rank
    for o in ('ended','home'): Accelerator(nprocs=2, compute_setup='cpu', engine='ray').distribute(waits, detach=o, all_ranks=True)()

def trainer(d):
    "A function of Ray Train that enters a context"
    import ray
    from ray.train import RunConfig,ScalingConfig,get_context
    from ray.train.torch import TorchTrainer
    def train():
        from fastai.basics import CrossEntropyLossFlat,DataLoaders,Learner,nn,torch
        from fastdist import Checkpoint,this_world
        torch.manual_seed(0)
        data = list(zip(torch.randn(64, 8), torch.arange(64)%2))
        learn = Learner(DataLoaders.from_dsets(data, data, bs=4, num_workers=0), nn.Linear(8,2), loss_func=CrossEntropyLossFlat())
        with open(f'{d}/said{this_world().rank}', 'w', buffering=1) as sys.stdout, learn.distrib_ctx(), learn.no_bar(): learn.fit(1, .1, cbs=Checkpoint(f'{d}/checkpoint'))
        sys.stdout = sys.__stdout__
        w = this_world()
        res = dict(weights=learn.model.weight.sum().item(), rank=get_context().get_world_rank(), local=w.local_rank, source=w.source)
        res['group'] = torch.distributed.is_initialized()
        Path(d, f'{w.rank}.json').write_text(json.dumps(res))
    ray.init(log_to_driver=False)
    TorchTrainer(train, scaling_config=ScalingConfig(num_workers=2, use_gpu=False), run_config=RunConfig(storage_path=f'{d}/storage')).fit()

if __name__=='__main__': globals()[sys.argv[1]](sys.argv[2])
