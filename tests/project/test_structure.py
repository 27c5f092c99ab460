"How the code lies: what imports what, and names that are there once"
import ast,json,re,sys
from collections import Counter
from pathlib import Path
from fastcore.test import *
import fastdist

package = Path(fastdist.__file__).parent
trees = {str(f.relative_to(package).with_suffix('')).replace('/', '.'):ast.parse(f.read_text()) for f in package.rglob('*.py') if f.name not in ('__init__.py','_modidx.py')}
place = {m[2]:m[1] for f in (package.parent/'nbs').glob('*.ipynb') if (m := re.match(r'(\d{3})_(.*)\.ipynb', f.name))} # name -> number

def imported(module, node):
    "Return the module that `node` imports from, as `module` names it; `None` where it is none of ours"
    if not isinstance(node, ast.ImportFrom): return
    if node.level: return '.'.join([*module.split('.')[:-node.level], *filter(None, [node.module])])
    return node.module.removeprefix('fastdist.') if node.module.startswith('fastdist.') else None

def test_modules_import_from_below():
    "Also inside of functions; a public module may be above its user only there"
    pairs = [(k,o) for k,t in trees.items() for n in ast.walk(t) if (o := imported(k, n)) in place]
    assert len(pairs)>300
    test_eq([(k,o) for k,o in pairs if place[o]>=place[k]], [])

def test_private_names_of_others_are_looked_for():
    "Or a release without one of them would stop the import; shards have many, and are imported when they are asked for"
    theirs = 'torch','fastai','fastcore','accelerate'
    froms = [(k,n) for k,t in trees.items() if not k.startswith('shard.') for n in ast.walk(t) if isinstance(n, ast.ImportFrom) and not n.level]
    from_them = [(k,n) for k,n in froms if n.module.partition('.')[0] in theirs]
    test_eq([(k,a.name) for k,n in from_them for a in n.names if a.name.startswith('_') or '._' in n.module], [])
    assert sum('private(' in Path(package/f'{k.replace(".", "/")}.py').read_text() for k in trees)>8

def newer(tree):
    "Return the lines of `tree` that only Python 3.11 reads, which `feature_version` does not find: `a[*b, c]` and `*args: *T`"
    tuples = [n for n in ast.walk(tree) if isinstance(n, ast.Subscript) and isinstance(n.slice, ast.Tuple) and n.slice.elts]
    stars = [n for n in tuples if any(isinstance(o, ast.Starred) for o in n.slice.elts) and n.slice.col_offset==n.slice.elts[0].col_offset]
    return [n.lineno for n in stars+[n for n in ast.walk(tree) if isinstance(n, ast.arg) and isinstance(n.annotation, ast.Starred)]]

def test_python_3_10_reads_every_file():
    "The oldest version that is promised; examples and scripts too"
    top = package.parent
    code = {f:f.read_text() for d in ('fastdist','tests','benchmarks','examples','docs') for f in (top/d).rglob('*.py')} | {top/'setup.py':(top/'setup.py').read_text()}
    for f in (top/'nbs').rglob('*.ipynb'): code |= {f'{f} {c["id"]}':''.join(c['source']) for c in json.loads(f.read_text())['cells'] if c['cell_type']=='code'}
    assert len(code)>1000
    test_eq([(str(k),o) for k,s in code.items() if not re.search(r'^\s*[%!]', s, re.M) for o in newer(ast.parse(s, feature_version=(3,10)))], [])
    if sys.version_info>=(3,11): test_eq([newer(ast.parse(o)) for o in ('a[*b, 1]','a[(*b, 1)]','def f(*a: *T): ...')], [[1],[],[1]])

def test_no_text_in_code_names_a_module():
    "An arrow that nobody sees: it would point to where a module was"
    texts = [(k,o.value) for k,t in trees.items() for o in ast.walk(t) if isinstance(o, ast.Constant) and isinstance(o.value, str)]
    folders = '|'.join({k.partition('.')[0] for k in trees if '.' in k}-{'comm'}) # whose own name stands there: its code waits
    test_eq([(k,o) for k,o in texts if re.search(rf'fastdist[./](?:{folders})\b', o)], [])

def test_a_public_name_is_there_once():
    names = Counter(o for t in trees.values() for n in t.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0])=='__all__' for o in ast.literal_eval(n.value))
    assert len(names)>300
    test_eq([k for k,n in names.items() if n>1], [])

def defined(n):
    "Return the names that the statement `n` of a module defines; a method put on a class has the class before it"
    if isinstance(n, ast.Assign): return [o.id for t in n.targets for o in ast.walk(t) if isinstance(o, ast.Name) and isinstance(o.ctx, ast.Store)]
    if not isinstance(n, (ast.FunctionDef,ast.ClassDef)): return []
    how = [ast.unparse(o) for o in n.decorator_list]
    if any(o.endswith('.register') for o in how): return []
    return [f'{ast.unparse(n.args.args[0].annotation)}.{n.name}' if any(o.startswith('patch') for o in how) else n.name]

def test_a_name_is_defined_once_in_its_module():
    "Also a private one: where two modules become one, the later would take the place of the earlier"
    names = Counter((k,o) for k,t in trees.items() for n in t.body for o in defined(n))
    assert len(names)>1500
    test_eq([k for k,n in names.items() if n>1], [])

def test_a_module_that_a_text_names_is_there():
    "In notebooks, their committed outputs apart, and in CONTRIBUTING"
    folders = '|'.join({k.partition('.')[0] for k in trees if '.' in k})
    pages = {f:''.join(''.join(c['source']) for c in json.loads(f.read_text())['cells']) for f in (package.parent/'nbs').rglob('*.ipynb')}
    pages |= {f:f.read_text() for f in [package.parent/'CONTRIBUTING.md']}
    named = [(f.name,o) for f,t in pages.items() for o in re.findall(rf'`((?:{folders})\.[a-z_0-9]+)`', t) if not o.endswith(('.py','.json'))]
    assert len(named)>150
    test_eq([(f,o) for f,o in named if o not in trees], [])

def test_tests_that_the_documents_name_are_there():
    named = set(re.findall(r'`(test_\w+)`', (package.parent/'tests/launch/README.md').read_text()))
    defined = {o for f in (package.parent/'tests').rglob('*.py') for o in re.findall(r'^def (test_\w+)', f.read_text(), re.M)}
    assert len(named)>15
    test_eq(named-defined, set())
