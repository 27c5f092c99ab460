"All that a change has to pass: each room as a test, the site, and pytest. `python tests`"
import os,subprocess,sys
from pathlib import Path

os.environ['CUDA_VISIBLE_DEVICES'] = '' # ranks of tests are CPU ranks, also where there are GPUs
here = Path(__file__).parent.parent

def start(cmd, *args):
    print('+', cmd, *args, flush=True)
    return subprocess.Popen([Path(sys.executable).with_name(cmd), *args], cwd=here)

def end(*procs):
    "Wait for all of `procs`, and exit unless each has succeeded"
    if rc := next(filter(None, [p.wait() for p in procs]), 0): sys.exit(rc)

end(start('mkdocs', 'build', '--strict'), start('nbdev-test', '--n-workers', '2', '--file-re', r'^\d')) # the site, once its notebooks have run, keeps one core
end(start('pytest', '-n', '3', '--durations', '25', 'tests'))
