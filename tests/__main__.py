"All that a change has to pass: the site, the notebooks that changed or whose modules did, and pytest. `python tests`; with `--record` it notes that the notebooks are green"
import os,re,subprocess,sys
from pathlib import Path
import notebooks

os.environ['CUDA_VISIBLE_DEVICES'] = '' # ranks of tests are CPU ranks, also where there are GPUs

def start(cmd, *args):
    print('+', cmd, *args, flush=True)
    return subprocess.Popen([Path(sys.executable).with_name(cmd), *args], cwd=notebooks.root)

def end(*procs):
    "Wait for all of `procs`, and exit unless each has succeeded"
    if rc := next(filter(None, [p.wait() for p in procs]), 0): sys.exit(rc)

def notebook_tests():
    "Start the notebooks that have to run, if any"
    names = notebooks.changed()
    return [start('nbdev-test', '--n-workers', '2', '--file-re', f"^({'|'.join(map(re.escape, names))})$")] if names else []

end(start('mkdocs', 'build', '--strict'), *notebook_tests()) # the site, once its notebooks have run, keeps one core
if '--record' in sys.argv: notebooks.write()
end(start('pytest', '-n', '3', '--durations', '25', 'tests'))
