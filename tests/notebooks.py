"Notebooks that have to run as tests: those whose code, or what it leads to, is not as at the last green run that is committed"
import ast,json
from functools import cache
from hashlib import sha256
from pathlib import Path
from fastcore.nbio import read_nb

root = Path(__file__).parent.parent
record = root/'tests/notebooks.json' # digests of that run by notebook; `python tests --record` writes it

def _source(path): return root.joinpath(*path).with_suffix('.py')

def _modules(code, package=('fastdist',)):
    "Paths of the modules of fastdist that `code`, a module in `package`, imports"
    found = set()
    for o in ast.walk(ast.parse(code)):
        if isinstance(o, ast.Import): found |= {tuple(a.name.split('.')) for a in o.names}
        if not isinstance(o, ast.ImportFrom): continue
        base = package[:len(package)-o.level+1] if o.level else ()
        base += tuple(o.module.split('.')) if o.module else ()
        found |= {base} | {base+(a.name,) for a in o.names}
    return {o if _source(o).exists() else (*o,'__init__') for o in found if _source(o).exists() or _source((*o,'__init__')).exists()}

@cache
def _leads_to(path):
    "The modules that module `path` imports directly"
    return _modules(_source(path).read_text(), path[:-1])

def _reached(code):
    "All modules that `code` imports, directly or through others"
    found,todo = set(),_modules(code)
    while todo:
        found |= todo
        todo = {m for o in todo for m in _leads_to(o)}-found
    return sorted(found)

def _code(path):
    "The code of the notebook at `path`, without magics"
    cells = [o.source for o in read_nb(path).cells if o.cell_type=='code']
    return '\n'.join(line for o in cells for line in o.splitlines() if not line.lstrip().startswith(('%','!')))

def digest(path):
    "SHA-256 of the code of the notebook at `path` and of all modules that it leads to"
    code = _code(path)
    return sha256('\0'.join([code, *(_source(o).read_text() for o in _reached(code))]).encode()).hexdigest()[:16]

def pages(): return [root/'nbs/index.ipynb',*sorted(p for o in ('tutorials','guides','reference') for p in (root/'nbs'/o).glob('*.ipynb'))]

@cache
def _around_pages():
    "What a page may use, also in a script that it writes: the package, examples, helpers, and what was measured"
    files = sorted(p for o in ('fastdist','examples','benchmarks','tests/helpers') for p in (root/o).rglob('*') if p.suffix in ('.py','.json','.csv'))
    return [o.read_text() for o in files]

def page_digest(path):
    "SHA-256 of the code of the page at `path`, and of what any page may use"
    return sha256('\0'.join([_code(path), *_around_pages()]).encode()).hexdigest()[:16]

def digests():
    res = {o.name:digest(o) for o in sorted((root/'nbs').glob('[0-9]*.ipynb'))}
    return res|{o.relative_to(root/'nbs').as_posix():page_digest(o) for o in pages()}

def changed():
    "Names of the notebooks, and paths of the pages, that are not as they are recorded"
    old = json.loads(record.read_text())
    return [k for k,v in digests().items() if old.get(k)!=v]

def write(): record.write_text(json.dumps(digests(), indent=0)+'\n')
