import os,pytest
from importlib import import_module

os.environ.setdefault('OMP_NUM_THREADS', '1')
import_module('torch._dynamo') # DDP imports it when it is made, for two seconds; forked ranks have it then

def pytest_collection_modifyitems(items):
    "fastai's stars bring functions named `test_...` that are no tests; whatever can hang gets a timeout"
    items[:] = [o for o in items if o.function.__module__==o.module.__name__]
    for o in items:
        if not o.get_closest_marker('timeout'): o.add_marker(pytest.mark.timeout(120))

@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch): monkeypatch.chdir(tmp_path)
