"A look at the built site: links that lead nowhere, what would be loaded from elsewhere, and directives that show"
import re
from pathlib import Path
from urllib.parse import unquote,urlsplit

_tag = re.compile(r'<(\w+)(\s[^<>]*)>')
_attr = re.compile(r'''\b(id|href|src)=(?:"([^"]*)"|'([^']*)'|([^\s>]+))''')
_raw = re.compile(r'^(?:<[^>]*>)*#\|.*', re.M)

def attrs(
    text:str # HTML
)->list: # `(tag, attribute, value)`
    "Return the ids and addresses in `text`"
    return [(tag, k, a or b or c) for tag,rest in _tag.findall(text) for k,a,b,c in _attr.findall(rest)]

def _problem(page, tag, value, ids, url_of_site):
    "Return what is wrong with the address `value` in `page`, or `None`"
    url = urlsplit(value)
    if url_of_site and value.startswith(url_of_site): return
    if url.scheme=='data' or tag=='a' and url.scheme in ('http','https','mailto'): return
    if url.scheme or url.netloc: return f'<{tag}> loads {value}'
    path = (page.parent/unquote(url.path)).resolve() if url.path else page
    if path.is_dir(): path = path/'index.html'
    if not path.exists(): return f'{value} does not exist'
    if tag=='a' and url.fragment and path in ids and unquote(url.fragment) not in ids[path]: return f'{value} has no such anchor'

def problems(
    site:Path, # Folder of the built site
    url:str='' # Address of the site, with which canonical links begin
)->list: # Page and what is wrong
    "Return what is wrong in the pages of `site`"
    texts = {o.resolve():o.read_text(encoding='utf-8') for o in Path(site).rglob('*.html') if o.name!='404.html'}
    found = {p:attrs(t) for p,t in texts.items()}
    ids = {p:{v for _,k,v in o if k=='id'} | {'','__top'} for p,o in found.items()}
    res = [(p, w) for p,o in found.items() for tag,k,v in o if k!='id' and (w := _problem(p, tag, v, ids, url))]
    return res + [(p, f'a directive shows: {m[0][:80]}') for p,t in texts.items() for m in _raw.finditer(t)]
