"Three users' scripts with `nprocs=` on hosts, in SLURM and on Ray print what one process prints"
import json,os,re,subprocess,sys
from pathlib import Path
import pytest
import test_engines_slurm,test_hosts,test_ray

users = Path(__file__).parents[1]/'users'
pytestmark = [pytest.mark.launcher, pytest.mark.slow, pytest.mark.whole, pytest.mark.timeout(400)]
scripts = pytest.mark.parametrize('name', ['regression','kfold','weighted'])
hosts,cluster,here_is_parent = test_hosts.hosts,test_engines_slurm.cluster,test_engines_slurm.here_is_parent
path,on_ray = test_ray.path,test_ray.cluster

def played(tmp_path, name, options='', before='', env={}):
    "The result of the script `name` whose contexts have `options`"
    path = tmp_path/f'{name}.py'
    path.write_text(before+(users/f'{name}.py').read_text().replace('distrib_ctx()', f'distrib_ctx({options})'))
    paths = os.pathsep.join([str(users),str(users.parent/'helpers'),env.get('PYTHONPATH', os.environ.get('PYTHONPATH', ''))])
    ran = subprocess.run([sys.executable, path], cwd=tmp_path, capture_output=True, text=True, timeout=180, env=os.environ|env|dict(PYTHONPATH=paths))
    assert ran.returncode==0, ran.stderr[-3000:]
    return json.loads(re.search(r'RESULT (\{.*\})', ran.stdout)[1])

def numbers(o):
    if isinstance(o, dict): o = [*o.values()]
    return [x for v in o for x in numbers(v)] if isinstance(o, list) else [o]

def check(tmp_path, name, *args, **kw):
    one,two = played(tmp_path, name),played(tmp_path, name, *args, **kw)
    assert numbers(two)==pytest.approx(numbers(one), rel=1e-4, abs=1e-4, nan_ok=True)

@scripts
def test_on_hosts(hosts, tmp_path, name): check(tmp_path, name, f"nprocs=2, hosts={hosts.names}, compute_setup='cpu'")

@scripts
def test_in_slurm(here_is_parent, tmp_path, name):
    check(tmp_path, name, "nprocs=2, engine=slurm_parent.engine('slurm', 'jobs'), compute_setup='cpu'", 'import slurm_parent\n')

@scripts
def test_on_ray(on_ray, tmp_path, name): check(tmp_path, name, "nprocs=2, engine='ray', compute_setup='cpu'", env=on_ray.vars)
