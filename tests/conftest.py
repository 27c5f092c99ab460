import gc,os,pytest,random,signal,sys
from binascii import crc32
from functools import cache
from importlib import import_module,metadata
from inspect import unwrap
from pathlib import Path
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

sys.path[:0] = [str(o) for o in Path(__file__).parent.iterdir() if o.is_dir() and o.name!="users"] # helpers, and tests that import one another
from covering import covered
from forks import huge_pages
from procs import Warm

gc.disable() # until all is imported, which makes little garbage and a million objects to look at
os.environ.setdefault('OMP_NUM_THREADS', '1')
os.environ['CUDA_VISIBLE_DEVICES'] = '' # as in `__main__`
os.environ.pop('PYTHONDONTWRITEBYTECODE', None) # or each new process compiles fastdist again
sys.dont_write_bytecode = False
metadata.entry_points = cache(metadata.entry_points) # or each rank's first process group searches all packages for a backend
metadata.entry_points(group='torch.distributed.backends')

settings.register_profile('same', max_examples=40, deadline=None, derandomize=True, database=None)
settings.register_profile('search', settings.get_profile('same'), max_examples=5000, derandomize=False) # `pytest --hypothesis-profile search`
settings.load_profile('same')

def pytest_addoption(parser):
    parser.addoption('--whole', nargs='?', type=int, const=0, help='what `tests/README.md` lists: each combination of parameters, each number of ranks, whole tables and all engines; a number for other moments of test_survive.py')
    parser.addoption('--shard', action='store_true', help='models in shards, wherever a test does not say; without the tests that are about replicas or start processes')

def pytest_configure(config):
    signal.signal(signal.SIGINT, signal.default_int_handler) # a shell's background ignores it, and so would the ranks in which a test presses Ctrl-C
    if not config.getoption('numprocesses', 0) or hasattr(config, 'workerinput'): # xdist's head runs no test
        for o in ('_dynamo','distributed.algorithms.ddp_comm_hooks','distributed.fsdp','distributed.tensor'): import_module(f'torch.{o}') # DDP and shards import them when they are made, for two seconds; forked ranks have them then
    for o in ('launcher: starts processes as a person does', 'slow: takes more than ten seconds', 'replicas: is about DDP, or does what a model in shards refuses',
        'whole: runs with --whole alone', 'by_default(*ids): the rows that run without --whole, by a part of their ids'): config.addinivalue_line('markers', o)
    if config.getoption('--shard'): shard_by_default()
    if config.getoption('--whole') is not None: os.environ['WHOLE'] = '1' # for what a test leaves out by itself

def shard_by_default():
    "Give what takes `shard` another default; forked ranks have it too"
    import_module('fastdist.shard.layout') # ranks have what it imports of torch
    from fastdist.train import trainer
    from fastdist.learner import Learner
    for f in map(unwrap, (trainer.DistributedTrainer.__init__,Learner.to_distributed,Learner.distrib_ctx)):
        at = f.__code__.co_varnames.index('shard')-1
        f.__defaults__ = *f.__defaults__[:at],True,*f.__defaults__[at+1:]

def pytest_collection_modifyitems(config, items):
    "fastai's stars bring functions named `test_...` that are no tests; whatever can hang gets a timeout; slow tests come first, so that all workers end at the same time"
    items[:] = sorted((o for o in items if o.function.__module__==o.module.__name__), key=lambda o: o.get_closest_marker('slow') is None)
    if config.getoption('--shard'): items[:] = [o for o in items if not (o.get_closest_marker('replicas') or o.get_closest_marker('launcher') or 'warm' in o.fixturenames)]
    if config.getoption('--whole') is None: items[:] = covered([o for o in items if not o.get_closest_marker('whole') and runs_by_default(o)])
    for o in items:
        if 'warm' in o.fixturenames: o.add_marker('launcher')
        if not o.get_closest_marker('timeout'): o.add_marker(pytest.mark.timeout(300))

def runs_by_default(item):
    marker = item.get_closest_marker('by_default')
    return not marker or any(o in item.callspec.id for o in marker.args)

def pytest_collection_finish():
    gc.enable()
    gc.freeze() # what is imported stays
    huge_pages()

def pytest_unconfigure(): gc.unfreeze() # or nanobind tells of leaks

class OneByOne(LoadScopeScheduling):
    "Each test goes to the worker that is free, but for those that share what takes long to make or keeps all cores busy, which one worker does first"
    together,by_file = ('test_faults','test_users','test_slurm','test_engines_slurm'),('test_hosts','test_ray')
    def _split_scope(self, nodeid):
        if any(f'{o}.py' in nodeid for o in self.together): return 'together'
        return next((o for o in self.by_file if f'{o}.py' in nodeid), nodeid)

def pytest_xdist_make_scheduler(config, log): return OneByOne(config, log)

@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch): monkeypatch.chdir(tmp_path)

@pytest.fixture(autouse=True)
def same_handlers():
    "torch leaves handlers of signals, after `notebook_launcher` for one, which would change how ranks of later tests end; ours are taken off"
    signals = signal.SIGINT,signal.SIGTERM,signal.SIGUSR1,signal.SIGCHLD
    before = [signal.getsignal(o) for o in signals]
    yield
    for o,f in zip(signals, before):
        assert signal.getsignal(o)==f or not str(getattr(signal.getsignal(o), '__module__', '')).startswith('fastdist')
        signal.signal(o, f)

@pytest.fixture(autouse=True)
def same_draws(request):
    "Each test draws the same in each run, on whichever worker and after whichever tests it is"
    for seed in (random.seed,import_module('numpy.random').seed,import_module('torch').default_generator.manual_seed): seed(crc32(f'tests/{request.path.name}::{request.node.nodeid.partition("::")[2]}'.encode())) # the same in whichever folder

@pytest.fixture(autouse=True)
def small_units(request, monkeypatch):
    "Tests of shards have models that are too small to have units by default"
    if not (request.module.__name__.startswith('test_shard_') or request.config.getoption('--shard')): return
    monkeypatch.setattr(import_module('fastdist.shard.wrap_policy').choose_units, '__defaults__', (1,))

@pytest.fixture(scope='session')
def warm():
    "Runs a launcher in a fork of a process that has torch and fastai, or starts one"
    res = Warm()
    yield res
    res.close()

def pytest_terminal_summary(terminalreporter, config):
    "The table of what a training survives: how it was ended, where, and how many of the pairs of numbers of ranks are as they should be"
    if config.getoption('--whole') is None: return
    from test_survive import table
    ended = {kind:[o.nodeid for o in terminalreporter.stats.get(kind, [])] for kind in ('passed','failed')}
    terminalreporter.write('\n'.join(table(ended))+'\n')
