"""The site's search, typed: `python tests/helpers/site_search.py WORDS...`

Material's own worker searches in an engine for JavaScript, as in a browser. Its index is made as the build makes it, but from pages as they are written: without outputs, and without the signatures of `reference/names`."""
import json,sys
from pathlib import Path
from subprocess import run
from types import SimpleNamespace

top = Path(__file__).parents[2]
sys.path.append(str(top/'docs'))

_browser = '''
var answers = [], handlers = [], self = globalThis, console = {warn(){}, log(){}};
function postMessage(o) { answers.push(o); }
function addEventListener(kind, f) { handlers.push(f); }
'''

def answers(
    index:dict, # As the search plugin writes it: `config` and `docs`
    words:list # As somebody types them
)->dict: # For each of `words` the addresses of pages, best first
    "Return what the search in a browser shows for each of `words`"
    import material
    from py_mini_racer import MiniRacer
    js = MiniRacer()
    workers = Path(material.__file__).parent/'templates/assets/javascripts/workers'
    js.eval(_browser+next(workers.glob('search.*.js')).read_text())
    def send(type, data):
        js.eval(f'handlers[0]({{data:{json.dumps(dict(type=type, data=data))}}})')
        return json.loads(js.eval('JSON.stringify(answers.pop())'))
    send(0, index|dict(options={}))
    found = {o:send(2, o)['data']['items'] for o in words}
    return {k:[sections[0]['location'].partition('#')[0] for sections in v] for k,v in found.items()}

def sources():
    "Return the Markdown of each page, by its source's path in `nbs`"
    import hooks,pages
    from fastcore.nbio import read_nb
    def text(o): return o.source if o.cell_type=='markdown' else f'```\n{o.source}\n```'
    def page(path): return '\n\n'.join(text(o) for o in map(pages._cleaned, read_nb(path).cells) if o)
    nbs = top/'nbs'
    found = [o for o in nbs.rglob('*.ipynb') if '.ipynb_checkpoints' not in o.parts]
    return {o.relative_to(nbs).as_posix():page(o) for o in found} | hooks._others()

def index():
    "Return the index of the search for `sources`, as the plugin of `mkdocs.yml` makes it"
    import hooks
    from markdown import Markdown
    from mkdocs.config import load_config
    config = load_config(str(top/'mkdocs.yml'))
    search = config.plugins['material/search']
    search.on_config(config)
    md = Markdown(extensions=['tables','fenced_code','toc'])
    for uri,text in sources().items():
        page = SimpleNamespace(meta={}, content=md.reset().convert(text), toc=[], url=hooks.address(uri), title=uri)
        hooks.describe(page.meta, uri)
        search.search_index.add_entry_from_context(page)
    return json.loads(search.search_index.generate_search_index(None))

def found(words):
    "Return `answers` to `words` from a process of its own: one that forks ranks has no use for the engine's threads"
    p = run([sys.executable, __file__, *words], capture_output=True, text=True, timeout=300)
    assert p.returncode==0, p.stderr
    return json.loads(p.stdout)

if __name__=='__main__': print(json.dumps(answers(index(), sys.argv[1:])))
