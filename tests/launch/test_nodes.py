"Two torchrun agents on this host make a job of two nodes, and say so where they do not meet"
import pytest,time
from concurrent.futures import ThreadPoolExecutor
from procs import *

pytestmark = [pytest.mark.launcher, pytest.mark.timeout(180)]
script = examples/'slurm/train.py'

def agents(warm, *meets, rc=0):
    "What `torchrun` prints on each of two nodes, of which the second comes when the first has waited for three seconds"
    def agent(i):
        if i: time.sleep(3)
        args = '--nnodes',2,'--nproc_per_node',1,'--rdzv_id','here','--rdzv_backend','c10d','--rdzv_endpoint',meets[i][0],'--rdzv_conf',meets[i][1]
        return ''.join(warm(bin_/'torchrun', *args, script, rc=rc, timeout=60))
    with ThreadPoolExecutor(2) as pool: return list(pool.map(agent, range(2)))

def test_an_agent_may_come_late(warm): ends(''.join(agents(warm, *[(f'127.0.0.1:{free_port()}','join_timeout=60')]*2)), 2, 'torchrun')

@pytest.mark.whole
def test_agents_that_do_not_meet_say_so(warm):
    "Another port on this host is served by the agent itself, where nobody else comes; at a host that nobody knows there is none to serve it"
    unknown = 'nowhere.invalid:29522'
    alone,lost = agents(warm, (f'127.0.0.1:{free_port()}','join_timeout=3'), (unknown,'read_timeout=3'), rc=1)
    assert 'RendezvousTimeoutError' in alone
    assert 'RendezvousConnectionError' in lost and unknown in lost
