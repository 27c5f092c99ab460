"All that a change has to pass: the site, the notebooks and pages that changed or whose modules did, and pytest. `python tests`; with `--record` all pages run, and it notes that notebooks and pages are green"
import os,re,subprocess,sys,time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import notebooks

os.environ['CUDA_VISIBLE_DEVICES'] = '' # ranks of tests are CPU ranks, also where there are GPUs

def part(cmd, *args):
    "Run `cmd`, print how long it took, and return its exit code"
    print('+', cmd, *args, flush=True)
    began = time.monotonic()
    code = subprocess.run([Path(sys.executable).with_name(cmd), *args], cwd=notebooks.root).returncode
    print(f'+ {cmd}: {time.monotonic()-began:.0f} s', flush=True)
    return code

changed,record = notebooks.changed(),'--record' in sys.argv
if not record: os.environ['PAGES'] = ','.join(o for o in changed if not o[0].isdigit()) # those that the site's build runs; else all

def notebook_tests():
    "Run the notebooks that have to run, if any"
    names = [o for o in changed if o[0].isdigit()]
    return part('nbdev-test', '--n-workers', '2', '--file-re', f"^({'|'.join(map(re.escape, names))})$") if names else 0

with ThreadPoolExecutor() as pool: # the site, once its notebooks have run, keeps one core
    site = pool.submit(part, 'mkdocs', 'build', '--strict')
    code = notebook_tests() or part('pytest', '-n', '3', '--durations', '25', 'tests') or site.result()
if not code and record: notebooks.write()
sys.exit(code)
