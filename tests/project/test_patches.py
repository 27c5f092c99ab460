"The table of patches in the reference, held against what importing fastdist, and a fit in a context, change in other packages"
import json,re,signal,subprocess,sys
from fnmatch import fnmatch
from pathlib import Path
from functools import partial
import pytest
from fastcore.test import test_eq
from fastai.basics import Callback
from fastdist import *
from module_state import *
from learners import digits

table = ''.join(json.loads((Path(__file__).parents[2]/'nbs/reference/patches.ipynb').read_text())['cells'][0]['source'])

def rows():
    "Pairs of what is changed, names in full, and where"
    for what,where in re.findall(r'^\| (.+?) \| (.+?) \| .+? \| .+? \|$', table, re.M)[1:]:
        names,owner = [],''
        for n in re.findall('`([^`]+)`', what):
            owner = n.rpartition('.')[0] or owner
            names.append(n.replace('…', '*') if '.' in n or not owner else f'{owner}.{n}')
        yield names,where

code = '''
import importlib,json,os,sys
sys.path.insert(0, {here!r})
from module_state import *
into,out = os.pipe()
if not os.fork(): # finds out what fastdist imports
    import fastdist
    os.write(out, json.dumps([k for k in sys.modules if k.partition('.')[0]!='fastdist']).encode())
    os._exit(0)
os.close(out)
with os.fdopen(into) as f: mods = json.load(f)
for k in mods:
    try: importlib.import_module(k)
    except ImportError: pass
forks,register = [],os.register_at_fork
os.register_at_fork = lambda **kw: forks.append(kw) or register(**kw)
before = held()
import fastdist
print(json.dumps((changed(before, held()), len(forks), mods)))
'''

@pytest.fixture(scope='module')
def imported():
    "What importing fastdist changes in the modules that it imports, how often it asks to be called at a fork, and these modules"
    res = subprocess.run([sys.executable, '-W', 'ignore', '-c', code.format(here=str(Path(__file__).parents[1]/'helpers'))], capture_output=True, text=True, timeout=120, check=True)
    return json.loads(res.stdout.splitlines()[-1])

def covers(name, change): return fnmatch(change, name) or fnmatch(change, f'*.{name}') or change.startswith(f'{name}.')

def test_what_importing_changes_is_in_the_table(imported):
    names = [n for ns,_ in rows() for n in ns]
    assert not (odd := [o for o in imported[0] if not any(covers(n, o) for n in names)]), '\n'.join(odd)
    assert f'`os.register_at_fork` ({imported[1]} times)' in table

def test_what_only_shards_need_is_not_imported(imported):
    assert len(imported[2])>1000 and not (early := [o for o in imported[2] if o.startswith(('torch.distributed.fsdp','torch.distributed.tensor','torch._dynamo','sympy'))]), early

@pytest.mark.whole
def test_what_the_table_says_of_importing_is_so(imported):
    at_import = [n for ns,where in rows() for n in ns if re.fullmatch(r'(`[\w.]+`(, )?)+', where) and n!='os.register_at_fork']
    assert len(at_import)>20, at_import
    assert not (gone := [n for n in at_import if not any(covers(n, o) for o in imported[0])]), gone

def is_ours(v):
    "Return whether `v` is code of fastdist, or runs it"
    if isinstance(v, partial): return is_ours(v.func)
    return any(str(getattr(o, '__module__', '')).partition('.')[0]=='fastdist' for o in (v, type(v), type(getattr(v, '__self__', None))))

def during(rank, **kw):
    "Return what of ours a fit in a context sets where something else was, and what is there afterwards"
    learn,seen = digits(n=60, bs=8, path='.'),[]
    before,own = held(),dict(vars(learn))
    def ours():
        at = held()|{f'learn.{k}':v for k,v in vars(learn).items() if not isinstance(v, Callback)}
        return [k for k in changed(before|{f'learn.{k}':v for k,v in own.items()}, at) if is_ours(at[k]) and (k in before or k.startswith('learn.'))]
    class Look(Callback):
        def before_step(self): seen.append(ours())
    with learn.distrib_ctx(**kw), learn.no_bar(), learn.no_logging(): learn.fit(1, cbs=Look())
    return seen[0],ours()

@pytest.mark.parametrize('shard', [False,True])
@pytest.mark.by_default('False')
def test_what_a_fit_changes_is_in_the_table_and_put_back(shard):
    names = [n for ns,where in rows() for n in ns]+[f'signal {signal.SIGURG.value}']
    for inside,after in on_ranks(partial(during, shard=shard), 2, join=False):
        test_eq(after, [])
        assert len(inside)>8 and not (odd := [o for o in inside if not any(covers(n, o) for n in names)]), odd
