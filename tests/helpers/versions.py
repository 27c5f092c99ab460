"""Which versions run: `python tests/helpers/versions.py` makes an environment for each of `pairs` and runs `version_checks.py` in it; `python tests/helpers/versions.py 3.12/2.10` does one

Each row goes into `nbs/reference/versions.csv`, in the place of an older one for the same Python and torch. An interpreter that this machine lacks is named. An environment is removed before the next is made."""
import csv,json,os,re,shutil,subprocess,sys,tempfile
from datetime import date
from pathlib import Path

pairs = '3.10/2.10', '3.10/2.11', '3.11/2.12', '3.12/2.13', '3.13/2.14', '3.10/2.14', '3.12/2.15', '3.13/2.15', '3.14/2.15' # Python and torch
with_it = 'scikit-learn','ipykernel','nbclient' # for the checks
root = Path(__file__).resolve().parents[2]
table,cache = root/'nbs/reference/versions.csv',root/'.cache/versions'
packages = 'torch','fastai','fastcore','accelerate'
env = {k:v for k,v in os.environ.items() if k!='PYTHONPATH'} | dict(OMP_NUM_THREADS='1', PYTHONWARNINGS='ignore')

def interpreter(python):
    "Return the path of Python `python` of this machine, `None` where there is none"
    found = sorted(Path.home().glob(f'.pyenv/versions/{python}.*/bin/python'))
    return str(found[-1]) if found else shutil.which(f'python{python}') # a shim of pyenv's is there also where it runs nothing

def make(python, torch, wheel, at):
    "Make an environment at `at`, and return its interpreter; pip chooses what belongs to this torch"
    subprocess.run([python, '-m', 'venv', at], check=True)
    pip = [at/'bin/pip', 'install', '-q', '--no-compile', f'torch=={torch}.*', *with_it, wheel]
    subprocess.run(pip, check=True, env=env|dict(PIP_CACHE_DIR=str(cache/'pip')))
    return at/'bin/python'

def tried(python, d):
    "Return a row of the table: versions, and what ran; run in the folder `d`, from where the checkout cannot be imported"
    said = 'import json,platform; from importlib.metadata import version as v; print(json.dumps([platform.python_version(), *map(v, {!r})]))'.format(packages)
    versions = json.loads(subprocess.run([python, '-c', said], env=env, cwd=d, check=True, stdout=subprocess.PIPE, text=True).stdout)
    log = subprocess.run([python, root/'tests/helpers/version_checks.py'], env=env, cwd=d, stdout=subprocess.PIPE, text=True, timeout=1800).stdout
    print(log)
    ran = dict(re.findall(r'^(\w+): (ran|did not) \(', log, re.M))
    return dict(date=str(date.today()), **dict(zip(('python',*packages), versions)), on='CPU') | {k:ran.get(k, 'did not') for k in names()}

def names(): return re.findall(r'\w+', re.search(r'^checks = \[(.*)\]', (root/'tests/helpers/version_checks.py').read_text(), re.M)[1])

def note(row):
    "Write `row` into the table"
    with table.open() as f: old = [o for o in csv.DictReader(f) if (o['python'],o['torch'])!=(row['python'],row['torch']) and o.keys()==row.keys()]
    rows = sorted([*old, row], key=lambda o: [list(map(int, re.findall(r'\d+', o[k])[:3])) for k in ('torch','python')])
    with table.open('w', newline='') as f:
        w = csv.DictWriter(f, row, lineterminator='\n')
        w.writeheader()
        w.writerows(rows)

def main(chosen):
    at = cache/f'{os.getpid()}'
    with tempfile.TemporaryDirectory() as d:
        subprocess.run([sys.executable, '-m', 'pip', 'wheel', '-q', '--no-deps', '-w', d, root], check=True)
        wheel, = Path(d).glob('*.whl')
        for pair in chosen:
            python,torch = pair.split('/')
            here = interpreter(python)
            print(f'{pair}: {here or "no such Python on this machine"}', flush=True)
            try:
                if here: note(tried(make(here, torch, wheel, at), d))
            except subprocess.SubprocessError as e: print(f'{pair}: {e}')
            finally: shutil.rmtree(at, ignore_errors=True)

if __name__=='__main__': main(sys.argv[1:] or pairs)
