"No name that a module imports is replaced by another object of that name from an import of all"
import ast,collections.abc,dataclasses,pytest,typing,fastcore.all
from importlib import import_module
from pathlib import Path
import fastdist
from fastdist.comm.progress import Heartbeat
from fastdist.launch.agent import RunRequest

root = Path(fastdist.__file__).parent
sources = [o for o in sorted(root.rglob('*.py')) if o.name!='_modidx.py']

alike = {'asdict','Callable'} # what comes by `*` does the same here, as the test below shows

def exported(module): return getattr(module, '__all__', None) or [k for k in vars(module) if k[0]!='_']

def shadowed(code, package):
    "Return the names that imports of `code`, a module of `package`, give by name first and then, as another object, by `*`"
    named,res = {},[]
    for o in ast.parse(code).body:
        if not isinstance(o, ast.ImportFrom): continue
        module = import_module('.'*o.level+(o.module or ''), package)
        if [a.name for a in o.names]!=['*']:
            named.update({a.asname or a.name:getattr(module, a.name, None) for a in o.names})
            continue
        res += [k for k in exported(module) if k in named and named[k] is not getattr(module, k)]
    return res

def test_it_finds_one(): assert shadowed('from operator import attrgetter,is_not\nfrom fastcore.all import *', 'fastdist')==['is_not']

@pytest.mark.parametrize('path', sources, ids=lambda o: o.relative_to(root).as_posix())
def test_no_import_is_shadowed(path):
    package = '.'.join(path.parent.relative_to(root.parent).parts)
    assert set(shadowed(path.read_text(), package))<=alike

@pytest.mark.parametrize('value', (Heartbeat(1, position=[0,3], stack=None), RunRequest({0:dict(RANK='0')}, results=[0])), ids=('heartbeat','request'))
def test_fastcores_asdict_is_dataclasses(value): assert fastcore.all.asdict(value)==dataclasses.asdict(value)

def test_both_are_callable(): assert typing.get_origin(typing.Callable) is collections.abc.Callable
