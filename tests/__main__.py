"All that a change has to pass: the site, the notebooks that changed or whose modules did, and pytest. `python tests`; with `--record` it notes that the notebooks are green"
import os,re,subprocess,sys,time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import notebooks

os.environ['CUDA_VISIBLE_DEVICES'] = '' # ranks of tests are CPU ranks, also where there are GPUs

def part(cmd, *args, kept=False):
    "Run `cmd`, print how long it took, and return its exit code; what it says comes at the end if it is to be `kept`"
    print('+', cmd, *args, flush=True)
    began,out = time.monotonic(),subprocess.PIPE if kept else None
    p = subprocess.run([Path(sys.executable).with_name(cmd), *args], cwd=notebooks.root, stdout=out, stderr=out and subprocess.STDOUT, text=True)
    print(p.stdout or '', f'+ {cmd}: {time.monotonic()-began:.0f} s', sep='\n', flush=True)
    return p.returncode

def notebook_tests():
    "Run the notebooks that have to run, if any"
    names = notebooks.changed()
    return part('nbdev-test', '--n-workers', '2', '--file-re', f"^({'|'.join(map(re.escape, names))})$") if names else 0

with ThreadPoolExecutor() as pool:
    site = pool.submit(part, 'mkdocs', 'build', '--strict', kept=True) # it keeps one core, and tests wait for half of their time
    code = notebook_tests()
    if not code and '--record' in sys.argv: notebooks.write()
    code = code or part('pytest', '-n', '3', '--durations', '25', 'tests')
sys.exit(code or site.result())
