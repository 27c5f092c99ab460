import os,pytest,sys
from importlib import import_module
from hypothesis import settings
from procs import Warm

os.environ.setdefault('OMP_NUM_THREADS', '1')
os.environ.pop('PYTHONDONTWRITEBYTECODE', None) # or each new process compiles fastdist again
sys.dont_write_bytecode = False
for o in ('_dynamo','distributed.algorithms.ddp_comm_hooks'): import_module(f'torch.{o}') # DDP imports them when it is made, for two seconds; forked ranks have them then

settings.register_profile('same', max_examples=40, deadline=None, derandomize=True, database=None)
settings.register_profile('search', settings.get_profile('same'), max_examples=5000, derandomize=False) # `pytest --hypothesis-profile search`
settings.load_profile('same')

def pytest_configure(config):
    for o in ('launcher: starts processes as a person does', 'slow: takes more than ten seconds'): config.addinivalue_line('markers', o)

def pytest_collection_modifyitems(items):
    "fastai's stars bring functions named `test_...` that are no tests; whatever can hang gets a timeout; what one worker has to do alone comes first"
    items[:] = sorted([o for o in items if o.function.__module__==o.module.__name__], key=lambda o: not o.get_closest_marker('xdist_group'))
    for o in items:
        if 'warm' in o.fixturenames: o.add_marker('launcher')
        if not o.get_closest_marker('timeout'): o.add_marker(pytest.mark.timeout(120))

@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch): monkeypatch.chdir(tmp_path)

@pytest.fixture(scope='session')
def warm():
    "Runs a launcher in a fork of a process that has torch and fastai"
    res = Warm()
    yield res.run
    res.close()
