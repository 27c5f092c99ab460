"`parent_cases.py` in a process of its own: a worker of pytest leads to all tests, and each call would look through them"
import os,subprocess,sys,pytest
from pathlib import Path
from compare import whole_tables

@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_cases_of_a_script_that_runs_once():
    env = {k:v for k,v in os.environ.items() if not k.startswith('PYTEST_')}
    cmd = [sys.executable,'-m','pytest','-q','--tb=short',*['--whole']*whole_tables,str(Path(__file__).parent/'parent_cases.py')]
    p = subprocess.run(cmd, env=env, capture_output=True, text=True, timeout=980)
    assert p.returncode==0, p.stdout[-5000:]+p.stderr[-2000:]
