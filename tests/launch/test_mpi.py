"What MPI launchers, LSF, Azure and Kubeflow tell their ranks, and two ranks of Open MPI as a user starts them"
import json,pytest
from fastcore.test import *
from fastdist import WorldError
from fastdist.launch.world import World,launch_token
from procs import *

# As printed by `mpirun -np 2 env` of Open MPI 4.1.4 and `mpiexec -np 2 env` of MPICH 4.0.2, but for what has nothing to do with ranks
open_mpi = dict(OMPI_COMM_WORLD_SIZE='2', OMPI_COMM_WORLD_LOCAL_SIZE='2', OMPI_UNIVERSE_SIZE='2', OMPI_MCA_orte_num_nodes='1', OMPI_MCA_ess_base_jobid='1325793281', PMIX_NAMESPACE='1325793281',
    PMIX_HOSTNAME='vm', PMIX_VERSION='4.2.2rc2')
mpich = dict(PMI_SIZE='2', MPI_LOCALNRANKS='2', HYDI_CONTROL_FD='7', MPIR_CVAR_CH3_INTERFACE_HOSTNAME='vm')
def of_open_mpi(r): return open_mpi | dict.fromkeys(['OMPI_COMM_WORLD_RANK','OMPI_COMM_WORLD_LOCAL_RANK','OMPI_COMM_WORLD_NODE_RANK','PMIX_RANK','OMPI_MCA_ess_base_vpid'], str(r))
def of_mpich(r): return mpich | dict(PMI_RANK=str(r), MPI_LOCALRANKID=str(r), PMI_FD=str(6+2*r))

# As their documentation has them, for two nodes with two ranks each
def of_mvapich(r):
    place = dict(MV2_COMM_WORLD_RANK=str(r), MV2_COMM_WORLD_SIZE='4', MV2_COMM_WORLD_LOCAL_RANK=str(r%2), MV2_COMM_WORLD_LOCAL_SIZE='2')
    return place | dict(MASTER_ADDR='n1', MASTER_PORT='29400')
def two_of_open_mpi(r): return of_open_mpi(r) | dict(OMPI_COMM_WORLD_SIZE='4', OMPI_COMM_WORLD_LOCAL_RANK=str(r%2), OMPI_MCA_orte_num_nodes='2')
def of_jsrun(r):
    own = dict(JSM_NAMESPACE_RANK=str(r), JSM_NAMESPACE_SIZE='4', JSM_NAMESPACE_LOCAL_RANK=str(r%2), JSM_NAMESPACE_LOCAL_SIZE='2')
    return two_of_open_mpi(r) | own | dict(LSB_JOBID='812', LSB_MCPU_HOSTS='batch5 1 h49n08 42 h49n09 42', CUDA_VISIBLE_DEVICES=str(r%2))
def of_azure(r): return two_of_open_mpi(r) | dict(AZ_BATCH_MASTER_NODE='10.0.0.4:6000', AZ_BATCHAI_MPI_MASTER_NODE='10.0.0.4')
def within_slurm(r): return two_of_open_mpi(r) | dict(SLURM_PROCID=str(r//2), SLURM_NTASKS='2', SLURM_STEP_ID='0', SLURM_JOB_NODELIST='n[1-2]', MASTER_ADDR='n1')
def of_pods(r): return dict(KUBERNETES_SERVICE_HOST='10.96.0.1', RANK=str(r), WORLD_SIZE='4', MASTER_ADDR='digits-master-0' if r else 'localhost', MASTER_PORT='23456', HOSTNAME=f'digits-{"worker" if r else "master"}-{max(0, r-1)}')

def standings(of, n=4): return [(w.rank, w.size, w.local_rank, w.local_size, w.node_rank, w.num_nodes) for w in map(World.from_env, map(of, range(n)))]

@pytest.mark.parametrize('of,source', [(of_open_mpi,'mpirun of Open MPI'), (of_mpich,'mpiexec of MPICH')])
def test_one_node(of, source):
    test_eq(standings(of, 2), [(0,2,0,2,0,1),(1,2,1,2,0,1)])
    worlds = [World.from_env(of(r)) for r in range(2)]
    test_eq({(w.source, w.master_addr) for w in worlds}, {(source,'127.0.0.1')})
    assert len({w.master_port for w in worlds})==1 and 10000<=worlds[0].master_port<30000

@pytest.mark.parametrize('of,addr', [(of_mvapich,'n1'), (of_jsrun,'h49n08'), (of_azure,'10.0.0.4'), (within_slurm,'n1')])
def test_two_nodes(of, addr):
    test_eq(standings(of), [(0,4,0,2,0,2),(1,4,1,2,0,2),(2,4,0,2,1,2),(3,4,1,2,1,2)])
    test_eq({World.from_env(of(r)).master_addr for r in range(4)}, {addr})
    test_eq(len({World.from_env(of(r)).master_port for r in range(4)}), 1)

def test_a_rank_that_sees_one_gpu_uses_it(): test_eq([World.from_env(of_jsrun(r)).gpu for r in range(4)], [0]*4)

def test_a_pod_is_a_node_with_one_rank():
    test_eq(standings(of_pods), [(r,4,0,1,r,4) for r in range(4)])
    test_eq({World.from_env(of_pods(r)).master_addr for r in range(4)}, {'digits-master-0'})

@pytest.mark.parametrize('launcher', [dict(LOCAL_RANK='1', LOCAL_WORLD_SIZE='2', TORCHELASTIC_RUN_ID='none'), dict(NPROC='2', NODE_RANK='0', LOCAL_RANK='1')])
def test_a_launcher_within_a_pod_or_under_mpirun_says_more(launcher):
    for env in (of_pods(1),of_open_mpi(0)): test_eq(World.from_env(env | dict(RANK='1', WORLD_SIZE='2') | launcher).local_size, 2)

def test_another_job_has_another_port_and_token():
    envs = [of_open_mpi(0), of_open_mpi(0) | dict(PMIX_NAMESPACE='1325793282')]
    assert len({World.from_env(o).master_port for o in envs})==len({launch_token(o) for o in envs})==2

@pytest.mark.parametrize('env,said', [(two_of_open_mpi(3), 'does not say where rank 0 is. HINT: set MASTER_ADDR'),
    (two_of_open_mpi(1) | dict(OMPI_COMM_WORLD_LOCAL_RANK='0', MASTER_ADDR='n1'), 'numbered node by node'), (dict(PMI_RANK='1', PMI_SIZE='4'), 'local rank None of None'),
    (dict(PET_NNODES='1:3', PET_NODE_RANK='1'), 'You set PET_NNODES=3'), (dict(SM_HOSTS='["algo-1","algo-2"]'), 'on each of 2 hosts of SageMaker')])
def test_what_is_missing_is_said(env, said):
    with expect_fail(WorldError, said): World.from_env(env)

def mpirun(*cmd, n=2, **kw):
    if why := why_missing('mpirun', 'openmpi-bin'): pytest.skip(why)
    as_root = dict(OMPI_ALLOW_RUN_AS_ROOT='1', OMPI_ALLOW_RUN_AS_ROOT_CONFIRM='1', OMP_NUM_THREADS='1')
    return run('mpirun', '--oversubscribe', '-np', n, sys.executable, *cmd, timeout=150, **as_root, **kw)

@pytest.mark.whole
@pytest.mark.launcher
@pytest.mark.timeout(400)
def test_mpirun(tmp_path):
    out,_ = mpirun(here/'report.py', tmp_path)
    assert out.count('fastdist: 2 ranks on 1 node, cpu over gloo, from mpirun of Open MPI')==1
    res = [json.loads((tmp_path/f'{i}.json').read_text()) for i in range(2)]
    test_eq([(o['rank'],o['size'],o['source'],o['left']) for o in res], [(i,2,'mpirun of Open MPI',0) for i in range(2)])
    test_eq([o['weights'] for o in res], [res[0]['weights']]*2)
    assert len({o['start'] for o in res})==1, 'an unseeded state'

fails = """from fastai.basics import *
from fastdist import *
class Fails(Callback):
    def before_step(self):
        if this_world().rank==1 and self.iter==1: raise ValueError('a step that fails')
data = list(zip(torch.randn(64,8), torch.arange(64)%2))
learn = Learner(DataLoaders.from_dsets(data, data, bs=4), nn.Linear(8,2), loss_func=CrossEntropyLossFlat())
with learn.distrib_ctx(): learn.fit(2, cbs=Fails())
"""

@pytest.mark.whole
@pytest.mark.launcher
@pytest.mark.timeout(400)
def test_a_rank_of_mpirun_that_fails_ends_all(tmp_path):
    (tmp_path/'fails.py').write_text(fails)
    out,err = mpirun(tmp_path/'fails.py', rc=1)
    assert err.count('Traceback')==1 and 'ValueError: Exception occured in `Fails`' in err and 'rank 0 ends because rank 1 failed' in err, err
    await_that(lambda: not processes(str(tmp_path/'fails.py')))
