"Ranks on a Ray cluster of two nodes on this machine, each with two CPUs, and a context in a function of Ray Train"
import importlib.util,json,pytest
from fastcore.test import *
from fastdist.launch.world import World
from procs import *

needs = 'ray>=2.40','msgpack','pyarrow' # all else that Ray imports is among the requirements for development

def test_a_worker_of_ray_train_is_a_rank():
    w = World.from_env(dict(RANK='3', WORLD_SIZE='4', LOCAL_RANK='1', LOCAL_WORLD_SIZE='2', NODE_RANK='1', RAY_RAYLET_PID='7', MASTER_ADDR='10.0.0.1', MASTER_PORT='4000'))
    test_eq((w.rank,w.size,w.local_rank,w.local_size,w.node_rank,w.source), (3,4,1,2,1,'Ray'))

@pytest.fixture(scope='module')
def path(tmp_path_factory):
    "A `PYTHONPATH` with Ray, which is installed into a folder where it is missing: with pyarrow 370 MB, and few wheels for new versions of Python it is no requirement for development"
    path = [str(top), *filter(None, [os.environ.get('PYTHONPATH')])]
    if not importlib.util.find_spec('ray'):
        d = tmp_path_factory.mktemp('ray')
        p = start(sys.executable, '-m', 'pip', 'install', '-q', '--no-deps', '--no-compile', '--target', d, *needs)
        (out,_), = said(p, timeout=240)
        if p.returncode: pytest.skip(f'Ray is missing, and pip did not install it: {out[-500:]}')
        path.append(str(d))
    return os.pathsep.join(path)

@pytest.fixture(scope='module')
def cluster(path):
    "The address of a cluster, how to kill its second node, and its environment"
    with TemporaryDirectory(prefix='ray', dir='/tmp') as d: # its sockets have long names
        vars = dict(PYTHONPATH=path, RAY_AUTH_MODE='disabled', RAY_USAGE_STATS_ENABLED='0', TMPDIR=d, MARK_OF_TEST=d)
        for _ in range(3): # Ray gives a node 30 s to start, which are few beside other tests
            p = subprocess.Popen([sys.executable, here/'on_ray.py', 'cluster', d], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env|vars)
            address = p.stdout.readline().strip()
            if address: break
            p.communicate(timeout=60)
        assert address, 'Ray has not started a cluster'
        try: yield SimpleNamespace(vars=vars|dict(RAY_ADDRESS=address), p=p, d=Path(d))
        finally:
            p.stdin.close()
            p.wait(60)

def agents(mark):
    "Agents of the cluster, and their ranks"
    def ours(pid):
        try: return 'be_agent' in Path(f'/proc/{pid}/cmdline').read_text() and f'MARK_OF_TEST={mark}' in Path(f'/proc/{pid}/environ').read_text()
        except OSError: return False
    return [pid for pid in filter(str.isdigit, os.listdir('/proc')) if ours(pid)]

def nothing_is_left(cluster):
    await_that(lambda: not agents(cluster.d))
    await_that(lambda: not list(cluster.d.glob('fastdist*')))

@pytest.mark.whole
@pytest.mark.launcher
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_head_that_is_killed(cluster, tmp_path):
    p = start(sys.executable, here/'on_ray.py', 'killed', tmp_path, env=env|cluster.vars)
    try:
        await_that(lambda: len(list(tmp_path.glob('rank*')))==2, 100)
        assert len(agents(cluster.d))==3, 'an agent and two ranks'
    finally: p.kill()
    p.communicate()
    nothing_is_left(cluster)

@pytest.mark.whole
@pytest.mark.launcher
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_context_in_a_function_of_ray_train(cluster, tmp_path):
    run(sys.executable, here/'on_ray.py', 'trainer', tmp_path, timeout=200, **cluster.vars)
    res = [json.loads((tmp_path/f'{i}.json').read_text()) for i in range(2)]
    test_eq([(o['rank'],o['local'],o['source'],o['group']) for o in res], [(i,i,'Ray',True) for i in range(2)])
    test_eq(res[0]['weights'], res[1]['weights'])
    text = (tmp_path/'said0').read_text()
    assert text.count('this is not the main thread')==1 and '2 ranks on 1 node, cpu over gloo, from Ray' in text, text
    assert list((tmp_path/'checkpoint').iterdir())

@pytest.mark.whole
@pytest.mark.launcher
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_detached_jobs(cluster, tmp_path):
    vars = cluster.vars|dict(FASTDIST_JOBS=str(tmp_path/'jobs'))
    run(sys.executable, here/'on_ray.py', 'detached', tmp_path, **vars)
    ended_and_home(**vars)
    nothing_is_left(cluster)

@pytest.mark.launcher
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_cell_on_a_cluster(cluster, tmp_path):
    "Last, since it kills a node"
    lines,vars = [],cluster.vars|dict(WANDB_NAME='of the driver', WANDB_API_KEY='a'*40, OMP_NUM_THREADS='1')
    with open(tmp_path/'err', 'w') as err: p = start(sys.executable, here/'on_ray.py', 'head', tmp_path, env=env|vars, err=err)
    try:
        for line in p.stdout:
            lines.append(line)
            if line=='kill\n':
                cluster.p.stdin.write('\n')
                cluster.p.stdin.flush()
    finally:
        if p.poll() is None: p.kill()
    assert p.wait()==0, ''.join(lines)[-2000:]+(tmp_path/'err').read_text()[-3000:]
    res = json.loads((tmp_path/'res.json').read_text())
    assert res['apart']<1e-6 and res['once']<1e-6 and '4 ranks on 2 nodes, cpu over gloo, from fastdist over ray' in ''.join(lines), res
    test_eq(res['where'], [os.getcwd(),'of the driver'])
    assert res['epochs']==2 and res['handler']
    assert res['error'].startswith('RankError: rank 1 on ') and 'ValueError: of the script' in res['error'], res['error']
    assert res['died'].startswith('RankError: rank 1 on ') and 'it died without an error message, killed by SIGKILL' in res['died'], res['died']
    test_eq(res['shown'], [['a'*40,False]]*2)
    assert not [o for o in cluster.d.rglob('*.*') if o.is_file() and o.suffix in ('.log','.out','.err') and b'a'*40 in o.read_bytes()]
    assert res['interrupt'][0].startswith('KeyboardInterrupt') and res['interrupt'][1]-res['pressed'][0]<60 and res['free']==4
    assert ' on two failed' in res['lost'][0] and 'its machine was lost' in res['lost'][0] and res['lost'][1]-res['asked'][0]<60, res
    assert set(res['groups'])=={'REMOVED'}
    nothing_is_left(cluster)
