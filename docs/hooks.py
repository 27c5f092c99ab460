"What mkdocs does besides: nav entries from patterns, notebooks as readers see them, the index of names, and a look at every link"
import logging
from fnmatch import fnmatch
from os.path import join,normpath,relpath
from pathlib import Path
from fastcore.nbio import read_nb
from jinja2 import FileSystemBytecodeCache
from mkdocs.structure.files import File
from mkdocs.structure.toc import get_toc
from nbconvert.exporters.templateexporter import TemplateExporter
import links,names,pages

log = logging.getLogger('mkdocs.hooks.fastdist')
for o in ('mkdocs.plugins.mkdocs_jupyter','mkdocs.mkdocs-jupyter'): logging.getLogger(o).setLevel(logging.WARNING)
shown = pages.root/'.cache/site' # cleaned copies, from which mkdocs-jupyter renders

def _expand(entry, left):
    "Replace the patterns in `entry` of the nav by those of `left` that match, which then are used up"
    if isinstance(entry, dict): return [{k:_flat(v, left) if isinstance(v, list) else v for k,v in entry.items()}]
    if '*' not in entry: return [entry]
    found = sorted(o for o in left if fnmatch(o, entry))
    left.difference_update(found)
    return found

def _flat(entries, left): return [o for e in entries for o in _expand(e, left)]

def _named(entries):
    for o in entries:
        if isinstance(o, str): yield o
        else: yield from _named(o.values() if isinstance(o, dict) else o)

made = {} # pages that no file in `nbs` is the source of: address and Markdown

def _script(path):
    "Return a page that shows the file at `path`"
    lang = dict(py='python', yaml='yaml').get(path.suffix[1:], 'bash')
    return f'# {path.name}\n\n`{path.relative_to(pages.root)}`\n\n```{lang}\n{path.read_text()}\n```\n'

def _notebook(path):
    "Return a page that shows the notebook at `path`, which is not run here"
    cells = [o.source if o.cell_type=='markdown' else f'```python\n{o.source}\n```' for o in read_nb(path).cells]
    return '\n\n'.join(cells)

def _others():
    "Return pages of what notebooks link to outside of `nbs`: the examples, and what is Markdown already"
    scripts = [o for o in sorted((pages.root/'examples').rglob('*')) if o.suffix in ('.py','.yaml','.sbatch') and '__pycache__' not in o.parts]
    res = {f'{o.relative_to(pages.root)}.md':_script(o) for o in scripts}
    listed = ''.join(f'- [{o.name}]({o.name}.md)\n' for o in scripts if o.parent.name=='slurm')
    res |= {f'examples/{o.stem}.md':_notebook(o) for o in sorted((pages.root/'examples').glob('*.ipynb'))}
    res['examples/slurm/index.md'] = f'# Scripts for SLURM\n\n{listed}'
    return res | {o:(pages.root/o).read_text().replace('](nbs/', '](') for o in ('benchmarks/README.md','CONTRIBUTING.md','CHANGELOG.md','ROADMAP.md','SECURITY.md')}

def _share_templates(folder):
    "Compile each template of nbconvert once, not for each notebook anew"
    make,kept = TemplateExporter._create_environment,FileSystemBytecodeCache(str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    def _with_kept(self):
        env = make(self)
        env.bytecode_cache = kept
        return env
    TemplateExporter._create_environment = _with_kept

def on_startup(command, dirty): _share_templates(pages.root/'.cache/templates')

def on_config(config):
    "Make the index of names, and nav entries of patterns"
    made.update({f'reference/{k}.md':v for k,v in names.index().items()} | _others())
    nbs = Path(config.docs_dir)
    uris = {o.relative_to(nbs).as_posix() for o in nbs.rglob('*.ipynb') if '.ipynb_checkpoints' not in o.parts} | made.keys()
    config.nav = _flat(config.nav, uris-set(_named(config.nav)))

def on_files(files, config):
    "Run pages whose output is the point, and hand mkdocs-jupyter what readers see of each notebook"
    pages.run()
    for f in files:
        if f.src_uri.endswith('.ipynb'): f.abs_src_path = str(pages.clean(Path(config.docs_dir)/f.src_uri, shown/f.src_uri))
    for uri,md in made.items(): files.append(File.generated(config, uri, content=md))

def _toc(soup):
    "Return the headings of `soup` as a tree, with their names as text"
    open_ = [dict(level=0, children=[])]
    for h in soup.find_all(['h1','h2','h3']):
        o = dict(level=int(h.name[1]), id=h.get('id'), name=h.get_text().rstrip('¶'), children=[])
        while open_[-1]['level']>=o['level']: open_.pop()
        open_[-1]['children'].append(o)
        open_.append(o)
    return get_toc(open_[0]['children'])

def _target(link, uri):
    "Return the page for `link` in notebook `uri`; links in `index.ipynb` are the README's, from the top of the repository"
    path,hash,anchor = link.partition('#')
    if not path or '://' in link: return link
    at = normpath(join('' if uri=='index.ipynb' else Path('nbs',uri).parent, path))
    if (pages.root/at).is_dir(): at += '/index.html'
    elif at.endswith('/README.md'): at = at.replace('README.md', 'index.html') # as mkdocs does
    elif not at.startswith('nbs/images/'): at = at.removesuffix('.ipynb').removesuffix('.md')+'.html'
    return relpath(at.removeprefix('nbs/'), Path(uri).parent)+hash+anchor

def _cards(soup, table):
    "Put a card for each column in place of `table`, so that they stand below each other on a small screen"
    rows = [o.find_all(['th','td']) for o in table.find_all('tr')]
    cards = soup.new_tag('div', attrs={'class':'cards'})
    for head,*cells in zip(*rows):
        card = soup.new_tag('div')
        for o in (head,*cells):
            o.name = 'strong' if o is head else 'p'
            card.append(o.extract())
        cards.append(card)
    table.replace_with(cards)

_boosts = {'index.ipynb':8, 'tutorials/start*':8, 'tutorials/*':4, 'guides/*':4, 'reference/names*':.5, 'reference/*':2} # the first that matches

typed = { # page -> what somebody types who needs it
    'tutorials/start.ipynb': ['ctrl-c','progress bar','predict'],
    'guides/launchers.ipynb': ['distrib_ctx','two gpus','multi gpu','ddp'],
    'guides/slurm.ipynb': ['slurm','sbatch'],
    'guides/hangs.ipynb': ['hang','stuck','deadlock','timeout'],
    'guides/wrong.ipynb': ['nan','different results'],
    'guides/slow.ipynb': ['slow','speed'],
    'guides/memory.ipynb': ['out of memory','oom','gradient accumulation'],
    'guides/batch_size.ipynb': ['batch size','learning rate'],
    'guides/precision.ipynb': ['mixed precision','fp16','bf16','amp'],
    'guides/trackers.ipynb': ['wandb','tensorboard','mlflow','csvlogger'],
    'tutorials/seeds.ipynb': ['seed','reproducible'],
    'tutorials/survive.ipynb': ['resume','checkpoint','save','export','preemption'],
    'tutorials/shards.ipynb': ['shard','fsdp'],
    'examples/kaggle_two_t4.md': ['kaggle','colab']}

def boost(
    uri:str # Of a page's source: `guides/hangs.ipynb`
)->float: # Factor of a match on it
    "Return how much search prefers a page: modules and scripts come after guides"
    return next((v for k,v in _boosts.items() if fnmatch(uri, k)), .25)

def address(uri:str)->str: # Of a page's source
    "Return the address of the page made from `uri`"
    return uri.removesuffix('.ipynb').removesuffix('.md').replace('README', 'index')+'.html'

def describe(
    meta:dict, # Of a page
    uri:str # Of its source
):
    "Put in `meta` what the search reads of it: the factor of a match, and words that its readers type"
    meta.setdefault('search', {})['boost'] = boost(uri)
    if uri in typed: meta['tags'] = typed[uri]

def on_page_content(html, page, config, files):
    "Return the page of a notebook without what its boxes, scripts and styles would add; tables of reasons and visitors on the first page are cards"
    uri = page.file.src_uri
    describe(page.meta, uri)
    if not uri.endswith('.ipynb'): return html
    soup,codes = pages.tidy(html)
    for o in soup.find_all(['a','img']):
        k = 'href' if o.name=='a' else 'src'
        if o.get(k) and not o[k].startswith('data:'): o[k] = _target(o[k], uri)
    pages.link_symbols(soup, uri)
    if uri=='index.ipynb':
        for o in soup.find_all('table')[:2]: _cards(soup, o)
    page.toc = _toc(soup)
    if soup.h1: page.title = soup.h1.get_text().rstrip('¶')
    return pages.whole(soup, codes)

def on_post_build(config):
    "Warn of each link that leads nowhere, of what would be loaded from elsewhere, and of directives; `--strict` makes errors of it"
    for page,what in links.problems(Path(config.site_dir), config.site_url or ''): log.warning(f'{page.relative_to(Path(config.site_dir).resolve())}: {what}')
