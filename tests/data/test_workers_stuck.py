"A data worker that lives and gives nothing ends the fit and is named; a slow data set does not"
import os,re,signal,sys,threading,time,pytest
from importlib import import_module
from importlib.util import spec_from_loader
from torch.utils.data._utils.worker import ManagerWatchdog
from fastai.basics import *
from fastdist import *
from fastcore.test import test_eq

pytestmark = pytest.mark.skipif(not sys.platform.startswith('linux'), reason='a stack is asked for by a signal that Linux alone has')

class Data:
    def __init__(self, act): self.act = act
    def __len__(self): return 24
    def __getitem__(self, i):
        if i==0 and torch.utils.data.get_worker_info(): self.act() # fastai reads one in the process itself
        return tensor([i/24]),tensor([i/12])

class Stream(torch.utils.data.IterableDataset):
    "The same samples, which are read in sequence"
    def __init__(self, act): self.data = Data(act)
    def __len__(self): return len(self.data)
    def __iter__(self): return map(self.data.__getitem__, range(len(self)))

def nothing(): pass
def stopped(): os.kill(os.getpid(), signal.SIGSTOP)
def slow(): time.sleep(2.5)

def locked(rank):
    "Let the data workers of this process wait for a lock in torch's own code"
    lock = threading.Lock()
    lock.acquire()
    ManagerWatchdog.is_alive = staticmethod(lock.acquire)

def importing(rank):
    "Let the data workers of this process wait for a module that a thread of it imported when they were forked"
    begun,finder = threading.Event(),Unfinished()
    finder.begun = begun
    sys.meta_path.insert(0, finder)
    threading.Thread(target=import_module, args=('unfinished',), daemon=True).start()
    begun.wait()
    ManagerWatchdog.is_alive = staticmethod(partial(import_module, 'unfinished'))

class Unfinished:
    "Finds the module `unfinished`, whose import does not end"
    def find_spec(self, name, path, target=None): return spec_from_loader(name, self) if name=='unfinished' else None
    def create_module(self, spec): "Return nothing, so that Python makes the module"
    def exec_module(self, module):
        self.begun.set()
        threading.Event().wait()

def loaders(kind, valid):
    dss,kw = (Data(nothing),Data(valid)),dict(num_workers=1)
    if kind=='stream': return DataLoaders(*[DataLoader(Stream(o.act), bs=4, **kw) for o in dss])
    if kind=='torch': return DataLoaders(*[torch.utils.data.DataLoader(o, batch_size=4, **kw) for o in dss])
    return DataLoaders.from_dsets(*dss, bs=4, shuffle=False, **kw)

def fitted(rank, kind, how):
    "Fit on `rank`, where the workers of validation of rank 0 are stuck; return the error and what a fit after it gives"
    dls = loaders(kind, dict(stopped=stopped, slow=slow).get(how, nothing))
    if rank==0: dict(locked=locked, importing=importing).get(how, noop)(rank)
    learn,err = Learner(dls, nn.Linear(1,1), loss_func=MSELossFlat(), opt_func=SGD, metrics=mae),''
    with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(patience=8):
        try: learn.fit(1, .1)
        except RuntimeError as e: err = f'{type(e).__name__} {e}'
        learn.dls = loaders(kind, nothing)
        for dl in learn.dls: 
            if kind=='fastai': dl.fake_l.num_workers = 0
        if kind=='fastai': learn.fit(1, .1)
    return err,len(learn.recorder.values)

@pytest.mark.parametrize('kind', ['fastai','torch'])
@pytest.mark.parametrize('how', ['stopped','locked','importing'])
@pytest.mark.by_default('stopped', 'locked')
def test_a_worker_that_gives_nothing_is_named(kind, how):
    res = on_ranks(lambda rank: fitted(rank, kind, how), join=False)
    for err,n in res:
        assert re.search(r'Process \d+ is ' + ('stopped' if how=='stopped' else 'at\n  File'), err) and 'begin again from the last Checkpoint' in err, err
        if how!='stopped': assert '_worker_loop' in err
        test_eq(n, kind=='fastai')

def test_a_worker_of_a_stream_is_named():
    "torch's iterator is made within the `__iter__` of the loader"
    for err,_ in on_ranks(lambda rank: fitted(rank, 'stream', 'locked'), join=False): assert re.search(r'Process \d+ is at\n  File', err) and '_worker_loop' in err, err

@pytest.mark.parametrize('kind', ['fastai','torch'])
@pytest.mark.by_default('torch')
def test_a_slow_data_set_is_waited_for(kind):
    for err,n in on_ranks(lambda rank: fitted(rank, kind, 'slow'), join=False): test_eq((err,n), ('',1))
