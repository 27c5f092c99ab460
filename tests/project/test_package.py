"The distribution: what is in its archives, what its metadata say, and what an editor sees of it"
import csv,os,re,shutil,subprocess,sys,tarfile,zipfile
from configparser import ConfigParser
from email import message_from_string
from inspect import getdoc,isfunction,signature
from pathlib import Path
import fastdist,pytest
from fastcore.nbio import mk_cell,new_nb,write_nb
from fastai.learner import Learner
from fastcore.docments import docments
from fastcore.test import test_eq
from fastdist.launch.options import accelerate_defaults
from fastdist.launch.world import newest_tried

top = Path(__file__).parents[2]
cfg = ConfigParser()
cfg.read(top/'settings.ini')
cfg = cfg['DEFAULT']

def build(kind, here, out):
    "Path of what the hook `kind` of setuptools makes of the folder `here`"
    code = f'from setuptools import build_meta as b; print(b.{kind}({str(out)!r}))'
    p = subprocess.run([sys.executable, '-c', code], cwd=here, capture_output=True, text=True, check=True, env=os.environ|dict(PYTHONPATH=''))
    return out/p.stdout.split()[-1]

@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
    "The wheel that is built of the source archive, as pip does"
    d = tmp_path_factory.mktemp('package')
    src,out = d/'src',d/'out'
    names = subprocess.run(['git','ls-files','-co','--exclude-standard','fastdist','*.py','*.md','*.in','*.ini','*.toml','LICENSE'], cwd=top, capture_output=True, text=True, check=True).stdout.split()
    for o in names:
        (src/o).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(top/o, src/o)
    out.mkdir()
    with tarfile.open(build('build_sdist', src, out)) as t: t.extractall(out, filter='data')
    return zipfile.ZipFile(build('build_wheel', next(o for o in out.iterdir() if o.is_dir()), out))

def read(wheel, name): return wheel.read(next(o for o in wheel.namelist() if o.endswith(f'.dist-info/{name}'))).decode()

def test_all_modules_and_types_are_in_it(wheel):
    found = {o for o in wheel.namelist() if '.dist-info/' not in o}
    test_eq(found, {str(o.relative_to(top)) for o in (top/'fastdist').rglob('*.py')}|{'fastdist/py.typed'})
    assert Path(wheel.filename).name.startswith(f'fastai_dist-{cfg["version"]}-py3')

def test_metadata(wheel):
    meta = message_from_string(read(wheel, 'METADATA'))
    test_eq([meta[k] for k in ('Name','Version','Requires-Python')], ['fastai-dist',cfg['version'],'>=3.10'])
    test_eq((meta['License-Expression'], meta.get_all('License-File')), ('Apache-2.0', ['LICENSE']))
    assert 'Apache License' in read(wheel, 'licenses/LICENSE') and 'Do not `pip install fastdist`' in meta.get_payload()
    test_eq({o.partition(';')[0].strip() for o in meta.get_all('Requires-Dist') if 'extra' not in o}, set(cfg['requirements'].split()))
    test_eq({*meta.get_all('Provides-Extra')}, {'dev','docs','bench','ssh','slurm','ray'})
    assert tuple(map(int, cfg['version'].split('.')))>(0,0,1) and f'## {cfg["version"]},' in (top/'CHANGELOG.md').read_text()

def addresses(meta): return [a or b for a,b in re.findall(r'\]\(([^)\s]+)\)|(?:src|href)="([^"]*)"', message_from_string(meta).get_payload())]

def test_the_page_on_pypi_leads_to_no_file_beside_it(wheel, tmp_path):
    "PyPI has none of the repository's files; links lead to the repository once `settings.ini` has its address"
    page = read(wheel, 'METADATA')
    assert not [o for o in addresses(page) if not o.startswith(('https://','#'))]
    assert 'The losses of four ranks lie on those of one process' in page and '[benchmarks]' not in page
    for o in ('setup.py','README.md','LICENSE'): shutil.copy(top/o, tmp_path)
    (tmp_path/'fastdist').mkdir()
    repo = 'https://example.org/fastdist'
    (tmp_path/'settings.ini').write_text((top/'settings.ini').read_text().replace('git_url =\n', f'git_url = {repo}\n'))
    found = addresses((build('prepare_metadata_for_build_wheel', tmp_path, tmp_path)/'METADATA').read_text())
    assert {f'{repo}/raw/main/nbs/images/{o}.png' for o in ('curves','survive','timeline')}|{f'{repo}/blob/main/CHANGELOG.md'}<=set(found)
    files = [o.partition('/main/')[2].partition('#')[0] for o in found if o.startswith(f'{repo}/')]
    test_eq(([o for o in found if not o.startswith(('https://','#'))], [o for o in files if not (top/o).exists()]), ([],[]))

def test_commands_lead_somewhere(wheel):
    entries = ConfigParser()
    entries.read_string(read(wheel, 'entry_points.txt'))
    test_eq({k:dict(v) for k,v in entries.items() if v}, dict(console_scripts={'fastdist-check':'fastdist.check:main'}, nbdev={'fastdist':'fastdist._modidx:d'}))

def test_help_is_a_screen(): assert 10<len(fastdist.__doc__.splitlines())<25 and fastdist.__doc__.rstrip().endswith('|')

def test_what_was_tried_is_what_the_table_says():
    "Newer versions are named when a training begins; the oldest that the package asks for was tried too"
    with (top/'nbs/reference/versions.csv').open() as f: rows = list(csv.DictReader(f))
    minor = lambda s: tuple(map(int, s.split('.')[:2]))
    test_eq({k:max(minor(o[k]) for o in rows) for k in newest_tried}, {k:minor(v) for k,v in newest_tried.items()})
    asked = dict(re.findall(r'(\w+)>=([\d.]+)', cfg['requirements']))
    test_eq(min(minor(o['torch']) for o in rows), minor(asked['torch']))

def test_notebooks_run_again_where_they_or_their_modules_changed(tmp_path, monkeypatch):
    import notebooks
    monkeypatch.setattr(notebooks, 'root', tmp_path)
    write = lambda path,code: (tmp_path/path).parent.mkdir(parents=True, exist_ok=True) or (tmp_path/path).write_text(code)
    def digest():
        notebooks._leads_to.cache_clear()
        return notebooks.digest(tmp_path/'000_a.ipynb')
    write('fastdist/__init__.py', '')
    write('fastdist/comm/__init__.py', '')
    write('fastdist/base/first.py', 'one = 1')
    write('fastdist/comm/second.py', 'def f(): from ..base import first')
    write('fastdist/comm/other.py', '')
    write_nb(new_nb([mk_cell('from fastdist.comm.second import *\n%time one'), mk_cell('words', 'markdown')]), tmp_path/'000_a.ipynb')
    was = digest()
    write('fastdist/comm/other.py', 'two = 2')
    test_eq(digest(), was)
    write('fastdist/base/first.py', 'one = 2')
    assert digest()!=was

def test_a_page_runs_again_where_anything_changed_that_it_may_use(tmp_path, monkeypatch):
    import notebooks
    monkeypatch.setattr(notebooks, 'root', tmp_path)
    write = lambda path,code: (tmp_path/path).parent.mkdir(parents=True, exist_ok=True) or (tmp_path/path).write_text(code)
    def digest():
        notebooks._around_pages.cache_clear()
        return notebooks.digests()['guides/a.ipynb']
    for o in ('nbs/index.ipynb','nbs/guides/a.ipynb'):
        (tmp_path/o).parent.mkdir(parents=True, exist_ok=True)
        write_nb(new_nb([mk_cell('1+1')]), tmp_path/o)
    was = digest()
    write('tests/data/test_x.py', 'one = 1')
    test_eq(digest(), was)
    for o in ('fastdist/base/first.py','examples/slurm/train.py','benchmarks/costs.csv'):
        write(o, 'one = 1')
        assert digest()!=was
        was = digest()

def test_help_shows_what_each_parameter_means():
    "Of each public name and its methods; where a comment explains a parameter, the docstring does"
    of_learner = {k:o for k,o in vars(Learner).items() if getattr(o, '__module__', '').startswith('fastdist') and not k.startswith('_')}
    public = {k:getattr(fastdist, k) for k in fastdist.__all__} | of_learner
    assert {'distrib_ctx','lean','Accelerator'}<=set(public)
    for k,o in public.items():
        if not getattr(o, '__module__', '').startswith('fastdist'): continue
        names = [n for n in dir(o) if not n.startswith('_')] if isinstance(o, type) else []
        methods = [f for n in names if isfunction(f := getattr(o, n)) and f.__module__.startswith('fastdist')]
        own = isfunction(o.__init__ if isinstance(o, type) else o) # Python's own exceptions have no signature
        for f in ([o] if own else [])+methods:
            assert '<object object' not in f'{signature(f)}', f
            missing = [p for p,doc in docments(f, returns=False).items() if doc and p not in accelerate_defaults and f'- `{p}`: {doc}' not in getdoc(f)]
            assert not missing or missing==['self'], (f, missing)

def test_importing_it_warns_of_nothing():
    p = subprocess.run([sys.executable, '-c', 'from fastdist import *'], capture_output=True, text=True, check=True)
    assert not p.stderr, p.stderr
