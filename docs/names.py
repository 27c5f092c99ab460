"The public names: where each is defined, and an index of them with signatures and docments"
import re
from html import escape
from importlib import import_module
from inspect import getdoc
from pathlib import Path
from nbdev.showdoc import BasicMarkdownRenderer,show_doc
from fastdist._modidx import d

nbs = Path(__file__).parent.parent/'nbs'
modules = {re.sub(r'^\d+_', '', p.stem):p.name for p in sorted(nbs.glob('[0-9]*.ipynb'))}

def anchor(name): return f'name-{name}'

def _public(mod, key):
    "Return the name below its module that `key` of nbdev's index stands for, `None` where it is private"
    name = key.removeprefix(f'{mod}.')
    return None if any(o.startswith('_') for o in name.split('.')) else name

def _defined(mod, name):
    "Return the name at the head of a cell: of a method its class, or itself where it is patched on a class from elsewhere"
    cls,_,method = name.partition('.')
    return method if method and f'{mod}.{cls}' not in d['syms'][mod] else cls

def names(
    module # Of a module: `launch.world`
)->list: # In the order of their cells as far as `__all__` has it, then methods
    "Return the public names of the module of `module`, with methods patched on other classes"
    mod = f'fastdist.{module}'
    syms = [o for k in d['syms'].get(mod, {}) if (o := _public(mod, k))]
    shown = import_module(mod).__all__
    return [o for o in shown if o in syms] + [o for o in syms if '.' in o and (_defined(mod, o)!=o.split('.')[0] or o.split('.')[0] in shown)]

all_names = {o:module for module in modules if f'fastdist.{module}' in d['syms'] for o in names(module)}

def place(
    code:str # Inline code: `learn.distrib_ctx(shard=True)`
)->tuple: # `(notebook, anchor)`, `None` where it does not name anything public, or only a word
    "Return where `code` is defined"
    name = re.sub(r'\(.*\)$', '', code.strip(), flags=re.S)
    name = re.sub(r'^learn\.', 'Learner.', re.sub(r'^fastdist\.', '', name))
    module = all_names.get(name)
    if module and re.search('[A-Z_]', name): return modules[module],anchor(_defined(f'fastdist.{module}', name))

def _find(mod, name):
    "Return the object called `name` in `mod`, or the method on the class that it is patched on"
    obj = import_module(mod)
    for o in name.split('.'): obj = getattr(obj, o)
    return obj

def _signature(obj):
    "Return nbdev's block of signature and docments, and the docstring"
    md = show_doc(obj, renderer=BasicMarkdownRenderer)._repr_markdown_()
    md = re.sub("<(?:class|built-in function) '?([^'>]+)'?>|(?:collections.abc|typing)[.]", r'\1', md[md.index('```python'):])
    return _folded(md.partition('\n\n- `')[0]) # the rest is what a docstring got from docments

def _folded(md):
    "Return `md` with the options of Accelerate below the signature, behind a line that opens them"
    own,star,rest = md.partition('    *, device_placement')
    if not star: return md
    options,_,text = rest.partition('\n):\n```')
    items = re.sub(r'\s*\n\s*', ' ', 'device_placement'+options)
    return f'{own}    **kwargs # Options of Accelerate\'s `Accelerator`\n):\n```\n\n<details><summary>Accelerate\'s options</summary><code>{escape(items)}</code></details>\n{text}'

def entry(
    module, # Where `name` is taught
    name # Below its module
)->str: # Markdown
    "Return signature, docments and docstring of `name` with a link to its cell"
    mod = f'fastdist.{module}'
    obj = _find(mod, name)
    if '.' in name and not getdoc(obj): return ''
    link = f'[{module}](../{modules[module]}#{anchor(_defined(mod, name))})'
    body = _signature(obj) if callable(obj) else getdoc(obj) or ''
    return f'### {name} {{ #{name} }}\n\n{body}\n\nTaught in {link}.\n'

titles = dict(base='Base', launch='Launch', comm='Comm', data='Data', evaluate='Evaluate', state='State', parallel='Parallel', shard='Shard', train='Train', tools='Tools')

def _page(title, about, entries): return f'# {title}\n\n{about}\n\n'+'\n'.join(o for o in entries if o)

def _module(module):
    "Return the part of a page for `module`: its one line and its names"
    found = [entry(module, o) for o in names(module)]
    if not any(found): return ''
    about = re.sub(r'\]\((\d+_)', r'](../\1', import_module(f'fastdist.{module}').__doc__)
    return f'## {module}\n\n{about}\n\n'+'\n'.join(found)

def front():
    "Return the page of what `from fastdist import *` gives: its names, and methods on the Learner"
    import fastdist
    both = [o for o in fastdist.__all__ if o in all_names] + sorted(o for o in all_names if o.startswith(('Learner.','Accelerator.','TextLearner.')))
    return _page('Public names', 'What `from fastdist import *` gives and patches, each with its signature, what its parameters mean, and the cell that defines it. '
        'The pages beside this one list the names of all modules, package by package.', [entry(all_names[o], o) for o in both])

def index():
    "Return the pages of the index: names of files below `reference`, and Markdown"
    public = [o for o in modules if '.' not in o and f'fastdist.{o}' in d['syms']]
    by_package = {o:[r for r in modules if r.startswith(f'{o}.')] for o in titles} | dict(public=public)
    pages = {f'names_{o}':_page(f'Names: {titles.get(o, "Public modules")}', 'Public names of each module, in the order of reading.', map(_module, rs))
        for o,rs in by_package.items()}
    return dict(names=front()) | pages
