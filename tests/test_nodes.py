"Two torchrun agents on this host make a job of two nodes, and say so where they do not meet"
import re,time
import pytest
from test_launchers import bin_,env,free_port,here,output,printed,start

pytestmark = pytest.mark.timeout(180)
script = here.parent/'examples/slurm/train.py'
env = env | dict(PYTHONUNBUFFERED='', OMP_NUM_THREADS='1') # a line of a rank is one write

def agent(endpoint, conf):
    "`torchrun` on one of two nodes"
    meet = '--rdzv_id','here','--rdzv_backend','c10d','--rdzv_endpoint',endpoint,'--rdzv_conf',conf
    return start(bin_/'torchrun', '--nnodes', 2, '--nproc_per_node', 1, *meet, script, env=env)

def ends(out, size, source):
    "Check that `out` tells of a job of two nodes, whose ranks stand where they should and have the same weights, which have learnt something"
    assert f'fastdist: {size} ranks on 2 nodes, cpu over gloo, from {source};' in out, out[-3000:]
    n = size//2
    said = sorted(re.findall(rf'rank (\d) of {size} \(local (\d) of {n} on node (\d) of 2, [^)]*\) on cpu over gloo, from {source}: weights ([0-9a-f]{{8}})', out))
    assert [tuple(map(int, o[:3])) for o in said]==[(i,i%n,i//n) for i in range(size)], out[-3000:]
    assert float(re.search(r'accuracy: ([\d.]+)', out)[1])>.85
    assert len({o[3] for o in said})==1 and out.count('accuracy: ')==1

def failures(*procs, secs=40):
    "What `procs` say, each of which must end in an error within `secs`"
    outs = printed(*procs, timeout=secs)
    assert all(p.returncode for p in procs), outs
    return outs

def test_an_agent_may_come_late():
    endpoint = f'127.0.0.1:{free_port()}'
    first = agent(endpoint, 'join_timeout=60')
    time.sleep(3)
    ends(output(first, agent(endpoint, 'join_timeout=60')), 2, 'torchrun')

def test_agents_that_do_not_meet_say_so():
    "Another port on this host is served by the agent itself, where nobody else comes; at a host that nobody knows there is none to serve it"
    unknown = 'nowhere.invalid:29522'
    alone,lost = failures(agent(f'127.0.0.1:{free_port()}', 'join_timeout=3'), agent(unknown, 'read_timeout=3'))
    assert 'RendezvousTimeoutError' in alone
    assert 'RendezvousConnectionError' in lost and unknown in lost
