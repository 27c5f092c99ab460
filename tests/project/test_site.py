"The documentation site: what its strict build calls an error"
import ast,builtins,re,sys
from importlib import import_module
from pathlib import Path
import pytest
from bs4 import BeautifulSoup
from fastcore.basics import AttrDict
from fastcore.nbio import read_nb
from procs import executed
from site_search import found

sys.path.append(str(Path(__file__).parents[2]/'docs'))
import pages
from hooks import boost,typed
from links import problems
from names import modules

def site(tmp_path, body, other='<h1 id="there">There</h1>', **kw):
    (tmp_path/'sub').mkdir()
    (tmp_path/'index.html').write_text(body)
    (tmp_path/'sub/other.html').write_text(other)
    return [what for _,what in problems(tmp_path, **kw)]

def test_links_that_lead_somewhere(tmp_path):
    assert not site(tmp_path, '<a href="sub/other.html#there">a</a> <a href=sub/other.html>b</a> <a href="#">c</a> <a href="https://pytorch.org">d</a> <img src="data:image/png;base64,AA">',
        '<h1 id="there"></h1><a href="../index.html">up</a>')

def test_a_link_that_leads_nowhere(tmp_path): assert site(tmp_path, '<a class="x" href="sub/gone.html">a</a>')==['sub/gone.html does not exist']

def test_an_anchor_that_is_gone(tmp_path): assert site(tmp_path, '<a href="sub/other.html#gone">a</a>')==['sub/other.html#gone has no such anchor']

def test_a_picture_that_is_gone(tmp_path): assert site(tmp_path, '<img alt="" src="images/gone.png">')==['images/gone.png does not exist']

def test_what_would_be_loaded_from_elsewhere(tmp_path):
    body = '<script src="https://unpkg.com/x"></script><link href="//fonts.googleapis.com/css"><img src="https://img.shields.io/x.svg">'
    assert [o.split('>')[0] for o in site(tmp_path, body)]==['<script','<link','<img']

def test_canonical_links_are_the_site_itself(tmp_path):
    "`mkdocs serve` has an address, and puts it into each page"
    body = '<link rel="canonical" href="http://127.0.0.1:8765/index.html"><link href="http://127.0.0.1:9000/x.css">'
    assert site(tmp_path, body, url='http://127.0.0.1:8765/')==['<link> loads http://127.0.0.1:9000/x.css']

def test_a_directive_that_shows(tmp_path): assert site(tmp_path, '<pre><code><span class="c1">\n<span>#| export</span>\n</code></pre>')==['a directive shows: <span>#| export</span>']

def test_a_table_of_figures_has_no_row_numbers_and_no_nan():
    html = '<table class="dataframe"><thead><tr><th></th><th>ms</th></tr></thead><tbody><tr><th>0</th><td>NaN</td></tr><tr><th>1</th><td>2</td></tr></tbody></table>'
    table = BeautifulSoup(html, 'html.parser').table
    pages._table(table)
    assert [[c.get_text() for c in row.find_all(['th','td'])] for row in table.find_all('tr')]==[['ms'],[''],['2']]

def test_a_table_with_a_named_index_keeps_it():
    html = '<table><thead><tr><th></th><th>ms</th></tr><tr><th>rank</th><th></th></tr></thead><tbody><tr><th>0</th><td>3</td></tr></tbody></table>'
    table = BeautifulSoup(html, 'html.parser').table
    pages._table(table)
    assert [o.get_text() for o in table.find_all('tr')]==['rankms','03']

def test_what_a_rank_that_is_interrupted_prints_is_on_no_page():
    kept,gone = dict(output_type='stream', name='stdout', text='a'),dict(output_type='stream', name='stderr', text='\n=== nbdev-test interrupted: x ===\n')
    cell = AttrDict(cell_type='code', source='f()', metadata={}, outputs=[kept,gone])
    assert pages._cleaned(cell).outputs==[kept]

def test_a_page_whose_build_was_broken_off_runs_again(tmp_path, monkeypatch):
    page = tmp_path/'guides/hangs.ipynb'
    page.parent.mkdir()
    monkeypatch.setattr(pages, 'made', tmp_path)
    monkeypatch.delenv('PAGES', raising=False) # `python tests` names those that are not green
    ran = lambda: page not in pages.stale().values()
    assert not ran()
    page.write_text('a copy that was not run to its end')
    assert not ran()
    pages._stamp(page).touch()
    assert ran()

shown = [pages.root/'nbs/index.ipynb', *(p for o in pages.folders for p in sorted((pages.root/'nbs'/o).glob('*.ipynb')))]

def visible(path): return [o for o in map(pages._cleaned, read_nb(path).cells) if o]

def _code(path): return [o.source for o in visible(path) if o.cell_type=='code']

def _scripts(path): return [o for c in visible(path) if c.cell_type=='markdown' for o in re.findall(r'^```\w+\n(.*?)^```', c.source, re.M|re.S)]

@pytest.mark.parametrize('path', shown, ids=lambda o: o.stem)
def test_examples_of_a_page_fit_beside_its_lists(path):
    wide = [o for code in _code(path)+_scripts(path) for o in code.splitlines() if len(o)>88]
    assert not wide, '\n'.join(wide)

def _links(path):
    "Return the files that the prose of a notebook links to; links of `index.ipynb` are the README's, from the top of the repository"
    at = pages.root if path.name=='index.ipynb' else path.parent
    found = [o for c in visible(path) if c.cell_type=='markdown' for o in re.findall(r'\]\(([^)#\s]+)', c.source)]
    return [at/o for o in found if '://' not in o and not o.startswith(('mailto:','attachment:'))]

@pytest.mark.parametrize('path', shown, ids=lambda o: o.stem)
def test_a_page_links_to_files_that_exist(path): assert not [o for o in _links(path) if not o.exists()]

def _given(name):
    "Return the names that `from name import *` gives"
    mod = import_module(name)
    return set(getattr(mod, '__all__', None) or [o for o in vars(mod) if o[0]!='_'])

def _binds(o):
    "Return the names that the node `o` of a syntax tree binds"
    if isinstance(o, ast.Name) and not isinstance(o.ctx, ast.Load): return {o.id}
    if isinstance(o, (ast.FunctionDef,ast.ClassDef,ast.ExceptHandler)): return {o.name}
    if isinstance(o, ast.arg): return {o.arg}
    if isinstance(o, ast.ImportFrom) and o.names[0].name=='*': return _given(o.module)
    return {(a.asname or a.name).split('.')[0] for a in o.names} if isinstance(o, (ast.Import,ast.ImportFrom)) else set()

def unbound(
    cells:list # Sources, in order
)->list: # Of a cell's number and a name
    "Return each name that a cell uses, and neither it, an earlier one nor Python binds"
    res,known = [],set(dir(builtins))|{'get_ipython'}
    for i,src in enumerate(cells):
        nodes = list(ast.walk(ast.parse(src)))
        known |= set().union(*map(_binds, nodes))
        res += [(i, o.id) for o in nodes if isinstance(o, ast.Name) and isinstance(o.ctx, ast.Load) and o.id not in known]
    return res

def test_a_name_that_no_visible_cell_binds_is_found():
    assert unbound(['from os.path import *\nimport a.b as c', 'for i in range(3): print(join(i, c))', 'def f(x, *y): return x,y,later', 'later = a']) == [(2,'later'), (3,'a')]

@pytest.mark.parametrize('path', shown, ids=lambda o: o.stem)
def test_what_a_page_shows_can_be_typed(path): assert not unbound(_code(path))

def test_the_title_of_a_module_is_its_name():
    for name,path in modules.items(): assert read_nb(pages.root/'nbs'/path).cells[1].source.startswith(f'# {name}\n'), path

def test_search_prefers_guides_to_modules_and_scripts():
    start,guide,tutorial,words,names,module,script = map(boost, ('index.ipynb','guides/hangs.ipynb','tutorials/costs.ipynb','reference/glossary.ipynb','reference/names_launch.md','005_launch.world.ipynb','examples/digits.py.md'))
    assert start>guide==tutorial>words>names>module==script

right = { # What somebody types, and the page that it is about
    'ctrl-c':'tutorials/start', 'progress bar':'tutorials/start', 'predict':'tutorials/start', 'distrib_ctx':'guides/launchers', 'two gpus':'guides/launchers',
    'slurm':'guides/slurm', 'kaggle':'examples/kaggle_two_t4', 'hang':'guides/hangs', 'nan':'guides/wrong', 'different results':'guides/wrong', 'slow':'guides/slow',
    'out of memory':'guides/memory', 'gradient accumulation':'guides/memory', 'seed':'tutorials/seeds', 'resume':'tutorials/survive', 'checkpoint':'tutorials/survive',
    'export':'tutorials/survive', 'batch size':'guides/batch_size', 'mixed precision':'guides/precision', 'wandb':'guides/trackers'}

def test_search_finds_the_right_page_first():
    first = {k:(v or ['nothing'])[0] for k,v in found(list(right)).items()}
    assert first=={k:f'{v}.html' for k,v in right.items()}

def test_a_word_is_typed_for_one_page():
    words = [o for v in typed.values() for o in v]
    assert len(set(words))==len(words)

drawn = ['index.ipynb','tutorials/timeline.ipynb']

@pytest.mark.whole
@pytest.mark.launcher
@pytest.mark.slow
@pytest.mark.parametrize('name', drawn+[f'guides/{o}.ipynb' for o in ('batch_size','callbacks','faq','precision','stuck','trackers')])
def test_visible_cells_run_by_themselves(name):
    path = pages.root/'nbs'/name
    cells = executed('\n# %%\n'.join(_code(path)), path.parent)
    assert name not in drawn or any('image/png' in o.get('data', {}) for c in cells for o in c.outputs)
