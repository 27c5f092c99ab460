"All that a change has to pass: each room as a test, the site, and pytest. `python tests`"
import subprocess,sys
from pathlib import Path

here = Path(__file__).parent.parent
steps = (['nbdev-test', '--n-workers', '3', '--file-re', r'^\d'],['mkdocs', 'build', '--strict'],['pytest', '-n', '3', '--durations', '25', 'tests'])

for cmd,*args in steps:
    print('+', cmd, *args, flush=True)
    if rc := subprocess.run([Path(sys.executable).with_name(cmd), *args], cwd=here).returncode: sys.exit(rc)
