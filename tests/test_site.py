"The documentation site: what its strict build calls an error"
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent/'docs'))
import pages
from links import problems

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

def test_a_page_whose_build_was_broken_off_runs_again(tmp_path, monkeypatch):
    page = tmp_path/'guides/hangs.ipynb'
    page.parent.mkdir()
    monkeypatch.setattr(pages, 'made', tmp_path)
    ran = lambda: page not in pages.stale().values()
    assert not ran()
    page.write_text('a copy that was not run to its end')
    assert not ran()
    pages._stamp(page).touch()
    assert ran()
