"What of a Learner is its state, wherever it goes: home from ranks, into a file, back after a search"
from collections import Counter,defaultdict,namedtuple
from threading import Lock
from fastai.basics import *
from fastai.callback.all import *
from fastcore.test import test_eq
from fastdist import *
from fastdist.comm.rng import rank0_random
from fastdist.launch.pickling import read,write
from fastdist.state.snapshot import LearnerState,returned_state
from learners import digits

Range = namedtuple('Range', 'low high')

class Keeps(Callback):
    "Attributes as people write them"
    def __init__(self): self.seen,self.range,self.bare,self.lock = defaultdict(int),Range(0,0),Counter(),Lock()
    def before_fit(self):
        self.layers,self.locks,self.avg = list(self.model.children()),[Lock()],AvgMetric(accuracy)
        self.avg.reset()
    def after_batch(self):
        self.seen['batches'] += 1
        self.bare['batches'] += 1
        self.range = Range(0, self.iter)
        self.avg.accumulate(self.learn)

class Own(Callback):
    "Keeps its state where attributes do not show it"
    def __init__(self): self.state = lambda: 0
    def after_batch(self):
        n = self.state()+1
        self.state = lambda: n
    def state_dict(self): return dict(n=self.state())
    def load_state_dict(self, state): self.state = lambda: state['n']

class Drawn(DataLoader):
    "Draws its order from a generator that fastai does not know"
    def __init__(self, *args, **kw):
        super().__init__(*args, **kw)
        self.chance = np.random.default_rng(1)
    def get_idxs(self): return self.chance.permutation(self.n).tolist()

def fitted(learn):
    with learn.no_bar(), learn.no_logging(): learn.fit(1, 0.01)
    return learn

def brought(there, here, path):
    "What was trained `there`, written into `here`, by way of a file"
    write(returned_state(there), path)
    LearnerState(read(path)).put(here)
    return here

def test_containers_of_any_type_come_home(tmp_path):
    there,here = [digits(n=40, cbs=Keeps()) for _ in range(2)]
    brought(fitted(there), here, tmp_path/'a')
    test_eq((dict(here.keeps.seen),here.keeps.range,here.keeps.bare), (dict(there.keeps.seen),there.keeps.range,there.keeps.bare))
    here.keeps.seen['new'] += 1
    test_eq((here.keeps.avg.count,here.keeps.avg.value), (there.keeps.avg.count,there.keeps.avg.value))

def test_what_refers_to_layers_stays(tmp_path):
    "A hook on a copy of a layer would see nothing"
    there,here = [digits(n=40, cbs=Keeps()) for _ in range(2)]
    fitted(here)
    brought(fitted(there), here, tmp_path/'a')
    assert all(a is b for a,b in zip(here.keeps.layers, here.model.children()))

def test_buffers_that_no_state_dict_holds_come_home(tmp_path):
    there,here = [digits(n=40) for _ in range(2)]
    for o in (there,here): o.model.register_buffer('steps', torch.zeros(1), persistent=False)
    there.model.steps += 5
    test_eq(brought(fitted(there), here, tmp_path/'a').model.steps, torch.full((1,), 5.))

def test_a_callback_s_own_state_comes_home(tmp_path):
    there,here = [digits(n=40, cbs=Own()) for _ in range(2)]
    test_eq(brought(fitted(there), here, tmp_path/'a').own.state(), there.own.state())

def drawn():
    learn = digits(n=40)
    learn.dls = DataLoaders(Drawn(learn.dls.train_ds, bs=4, num_workers=0), learn.dls.valid, device='cpu')
    return learn

def test_a_loader_s_own_generator_comes_home(tmp_path):
    there,here = drawn(),drawn()
    brought(fitted(there), here, tmp_path/'a')
    test_eq(here.dls.train.get_idxs(), there.dls.train.get_idxs())

def test_a_loader_s_own_generator_goes_on_after_a_launch():
    "As it would after one process"
    one,home = drawn(),drawn()
    fitted(one)
    with home.no_bar(), home.no_logging(): Accelerator(nprocs=2, compute_setup='cpu').distribute(home.fit, start='fork')(1, 0.01)
    test_eq(home.dls.train.get_idxs(), one.dls.train.get_idxs())

def test_ranks_draw_alike_from_generators_that_differ():
    def drawn_on(rank):
        learn = drawn()
        learn.dls.train.chance = np.random.default_rng(rank)
        with learn.distrib_ctx(), rank0_random(learn.dls.train): return learn.dls.train.get_idxs(),learn.dls.train.chance.random()
    a,b = on_ranks(drawn_on, 3, join=False)[1:]
    test_eq(a, b)
