"Notebooks as pages: run by the build where their output is the point, and rendered as plain HTML that loads nothing from elsewhere"
import html,os,re,shutil,subprocess,sys
from pathlib import Path
from bs4 import BeautifulSoup
from fastcore.nbio import read_nb,write_nb
from latex2mathml.converter import convert
from names import anchor,place

root = Path(__file__).parent.parent
made = root/'_docs' # beside `nbs`, so that a copy finds `../../tests` where its notebook does
folders = 'tutorials','guides','reference'

def _mtime(paths): return max(p.stat().st_mtime for p in paths)

def _stamp(copy): return copy.with_suffix('.ran') # touched when a build has gone through: a copy alone may be one that it was broken off at

def _ran(copy): return _mtime([_stamp(copy)]) if copy.exists() and _stamp(copy).exists() else 0

def _asked(page):
    "Return whether `page` is to run: `python tests` names in `PAGES` those that are not green already"
    names = os.environ.get('PAGES')
    return names is None or page.relative_to(root/'nbs').as_posix() in names.split(',')

def stale():
    "Return the notebooks that have not run since they, or fastdist, changed"
    code = _mtime((root/'fastdist').rglob('*.py'))
    nbs = [root/'nbs/index.ipynb', *(p for o in folders for p in sorted((root/'nbs'/o).glob('*.ipynb')))]
    ran = {p:made/p.relative_to(root/'nbs') for p in nbs}
    return {p:o for p,o in ran.items() if _asked(p) and _ran(o)<max(code, p.stat().st_mtime)}

def run(
    workers=2 # Notebooks that run at a time
):
    "Run copies of all stale notebooks as `nbdev-test` does, and keep their outputs; raise an error if one fails"
    todo = stale()
    if not todo: return
    for src,dst in todo.items():
        dst.parent.mkdir(parents=True, exist_ok=True)
        _stamp(dst).unlink(missing_ok=True)
        shutil.copyfile(src, dst)
    names = '|'.join(re.escape(o.name) for o in todo.values())
    cmd = [str(Path(sys.executable).with_name('nbdev-test')), str(made), '--save', '--n-workers', str(workers), '--file-re', f'^({names})$']
    env = dict(OMP_WAIT_POLICY='passive')|os.environ # threads of notebooks side by side that spin take the cores from each other
    ran = subprocess.run(cmd, cwd=root, env=env, stderr=subprocess.PIPE, text=True)
    sys.stderr.write(ran.stderr)
    if not ran.returncode: return [_stamp(o).touch() for o in todo.values()]
    for o in todo.values(): o.unlink()
    raise RuntimeError('\n'.join(['A page failed in the build. HINT: run `nbdev-test` on it', *_failures(ran.stderr)]))

def _failures(
    said:str, # By `nbdev-test`: a notebook's error, its path, a line, the traceback and two empty lines
    lines:int=40 # Of each traceback; what torchrun says at its end is half of that
)->list:
    "Return the path of each notebook that failed, and the end of its traceback: CI shows the end of what was printed, and other pages' warnings follow an error"
    errs = re.findall(r'^\w+ in (\S+\.ipynb):\n=+\n(.*?)(?=\n\n\n|\Z)', said, re.M|re.S)
    return ['\n'.join([f'{path}:', *tb.splitlines()[-lines:]]) for path,tb in errs]

def _directives(cell): return set(re.findall(r'^#\|\s*([\w-]+)', cell.source, re.M))

def _of_run(out):
    "Return whether `out` is what `nbdev-test` prints in a rank that it has forked and that is interrupted"
    return out.get('name')=='stderr' and '=== nbdev-test interrupted' in ''.join(out['text'])

def _cleaned(cell):
    "Return `cell` without directives and what a progress bar wrote over, with `echo: false` without its code, with `code-fold` and `photo` as tags; `None` where a reader does not see it"
    if _directives(cell)&{'hide','default_exp'}: return
    silent = 'echo' in _directives(cell)
    tags = [v for k,v in {'code-fold':'folded', 'photo':'photo'}.items() if k in _directives(cell)]
    cell.metadata = dict(tags=tags) if tags else {} # without times, which nbformat refuses
    if 'outputs' in cell: cell.outputs = [o for o in cell.outputs if not _of_run(o)]
    for o in cell.get('outputs', []):
        if 'text' in o: o['text'] = re.sub(r'[^\n]*\r', '', ''.join(o['text']))
    cell.source = '' if silent else re.sub(r'^#\|.*\n?', '', cell.source, flags=re.M).strip()
    return cell if cell.source or silent else None

def clean(
    src, # A notebook of `nbs`
    dst # Its copy for the site
):
    "Write the notebook that readers see to `dst`, from the copy that the build ran or else from `src`"
    ran = made/Path(src).relative_to(root/'nbs')
    nb = read_nb(ran if ran.exists() else src)
    nb.cells = [o for o in map(_cleaned, nb.cells) if o]
    dst.parent.mkdir(parents=True, exist_ok=True)
    write_nb(nb, dst)
    return dst

def _math(soup):
    "Formulas become MathML, which browsers draw without a script"
    for s in soup.find_all(string=re.compile(r'\$')):
        if s.find_parent(['code','pre']): continue
        parts = re.split(r'\$\$(.+?)\$\$|\$(.+?)\$', str(s), flags=re.S)
        new = [html.escape(o, quote=False) if i%3==0 else convert(o, display='block' if i%3==1 else 'inline') for i,o in enumerate(parts) if o]
        s.replace_with(BeautifulSoup(''.join(new), 'html.parser'))

def link_symbols(soup, uri):
    "Inline code that names something public becomes a link to the cell that defines it"
    for o in soup.find_all('code'):
        to = place(o.get_text())
        if not to or to[0]==uri or o.find_parent(['a','pre','h1','h2','h3','h4']): continue
        o.wrap(soup.new_tag('a', href=f'{os.path.relpath(to[0].replace(".ipynb", ".html"), Path(uri).parent)}#{to[1]}'))

_coloured = re.compile(r'<div class="highlight-ipynb[^"]*"><pre>(.*?)</pre>', re.S)

def _input(m):
    "Return the code of a cell as the theme shows code, with an anchor for each name that it defines"
    code = re.sub('<[^>]*>', '', m[1])
    if not code.strip(): return ''
    names = re.findall(r'^(?:def|class) (\w+)', code, re.M)
    return ''.join(f'<span id="{anchor(o)}"></span>' for o in names) + f'<div class="language-python highlight"><pre><code>{m[1].strip()}</code></pre></div>'

def _output(o):
    "Return one output of a cell without the notebook's boxes"
    return f'<div class="output">{o.decode_contents().strip()}</div>'

_setup = '<details><summary>Setup of this page</summary>'

def _cell(cell):
    "Return prose, or code and its outputs"
    if md := cell.select_one('.jp-MarkdownOutput'): return md.decode_contents()
    code = str(cell.select_one('code-cell') or '')
    if 'celltag_folded' in cell['class']: code = f'{_setup}{code}</details>'
    shown = ''.join(map(_output, cell.select('.jp-OutputArea-output')))
    return code+(shown.replace('class="output"', 'class="output photo"') if 'celltag_photo' in cell['class'] else shown)

def _table(table):
    "Leave out of a table of pandas the numbers of its rows, and `NaN`; the name of the index goes to its column"
    head,rows = table.thead.find_all('tr'),table.tbody.find_all('tr')
    for o in table.find_all('td', string='NaN'): o.string = ''
    if len(head)==2:
        head[0].th.string = head[1].th.get_text()
        head[1].decompose()
    elif [o.th.get_text() for o in rows if o.th]==[str(i) for i in range(len(rows))]:
        for o in (*head,*rows): o.th.decompose()

def tidy(
    body:str # HTML of mkdocs-jupyter, half a megabyte of styles and scripts before it
)->tuple: # What the notebook says, in the theme's own elements, and the code of its cells
    "Return the cells of a page; their code, nine tenths of all tags, is not parsed, and `whole` puts it in"
    body = re.sub('<clipboard-copy.*?</clipboard-copy>|<div class="clipboard-copy-txt".*?</div>', '', body[body.index('<div class="jupyter-wrapper"'):], flags=re.S)
    codes = [_input(m) for m in _coloured.finditer(body)]
    number = iter(range(len(codes)))
    soup = BeautifulSoup(_coloured.sub(lambda m: f'<div><code-cell>{next(number)}</code-cell>', body), 'html.parser')
    cells = '\n'.join(_cell(o) for o in soup.select('.jp-Cell[id]')).replace(f'</details>\n{_setup}', '')
    soup = BeautifulSoup(cells, 'html.parser')
    for o in soup.select('table.dataframe'): _table(o)
    for o in soup.select('.output img'): o['alt'] = 'Drawn by the code above'
    for o in soup.select('a.anchor-link'): o['class'],o.string = 'headerlink','¶'
    for o in soup.select('.highlight > pre:not(:has(code))'):
        o.wrap(soup.new_tag('pre'))
        o.name = 'code'
    _math(soup)
    return soup,codes

def whole(
    soup:BeautifulSoup, # From `tidy`
    codes:list # Too
)->str:
    "Return the HTML of a page with the code of its cells"
    return re.sub(r'<code-cell>(\d+)</code-cell>', lambda m: codes[int(m[1])], str(soup))
