"Who goes first, who waits, and what the others hear of it, on real ranks"
import itertools,os,time,torch,pytest
from datetime import timedelta
from torch import distributed as dist
from fastcore.all import *
from fastcore.test import test_eq
from fastai.torch_core import distrib_barrier
from fastdist import *
from fastdist.comm.collectives import all_reduce
from fastdist.comm.rank0 import only_rank0,without_barrier
from procs import await_that

def ranks(f, n=2, **kw): return on_ranks(f, n, **({'join':False} | kw))

def note(rank, what):
    with open('log', 'a') as f: f.write(f'{what}{rank} ')

def slowly(rank, what='', secs=.2):
    note(rank, what+'in')
    time.sleep(secs)
    note(rank, what+'out')
    return rank

def meeting(rank, n):
    "Stays until `n` ranks are in"
    note(rank, 'in')
    await_that(lambda: sum(o.startswith('in') for o in log())>=n)
    note(rank, 'out')
    return rank

def log(): return Path('log').read_text().split()

def caught(f, *args, **kw):
    try: return f(*args, **kw)
    except Exception as e: return type(e).__name__,str(e)

def over_tcp():
    "The ranks meet at MASTER_ADDR and MASTER_PORT, as a launcher's do"
    os.environ.pop('FASTDIST_STORE')

def part(rank, size):
    "Rank 0, which serves the store, goes last"
    note(rank, 'bye')
    while rank==0 and sum(o.startswith('bye') for o in log())<size: time.sleep(.01)

def on_nodes(rank, per_node=2, nodes=2):
    env = dict(LOCAL_RANK=rank%per_node, LOCAL_WORLD_SIZE=per_node, GROUP_RANK=rank//per_node, GROUP_WORLD_SIZE=nodes)
    os.environ.update({k:str(v) for k,v in env.items()})

@pytest.mark.parametrize('size', [2,3])
@pytest.mark.parametrize('before', [noop,over_tcp,setup_distrib], ids=['file','tcp','group'])
def test_rank_0_goes_first(size, before):
    def f(rank):
        before() if before is over_tcp else before(None)
        had = dist.is_initialized()
        res = rank0_first(partial(meeting, n=size) if rank else slowly, rank),dist.is_initialized()==had
        part(rank, size)
        return res
    test_eq(ranks(f, size), [(i,True) for i in range(size)])
    calls = [o for o in log() if 'bye' not in o]
    test_eq(calls[:2], ['in0','out0'])
    test_eq(sorted(calls[2:1+size]), [f'in{i}' for i in range(1,size)])

@pytest.mark.parametrize('call', [rank0_first,only_rank0])
def test_longer_than_the_groups_timeout(call):
    def f(rank):
        dist.init_process_group('gloo', timeout=timedelta(seconds=1))
        call(slowly, rank, secs=0 if rank else 2.5)
        return bool(all_reduce(torch.tensor([rank]), 'max'))
    test_eq(ranks(f), [True]*2)
    test_eq(log()[:2], ['in0','out0'])

@pytest.mark.parametrize('size', [2,3])
@pytest.mark.parametrize('call', [rank0_first,only_rank0])
def test_an_error_is_raised_on_all(size, call):
    def f(rank): return caught(call, lambda: [][7]),caught(call, str, rank)
    (a,_),*others = ranks(f, size)
    test_eq(a, ('IndexError','list index out of range'))
    for (name,msg),_ in others: assert name=='RankError' and 'rank 0 failed' in msg and 'IndexError: list index out of range' in msg
    test_eq(others[-1][1], None if call is only_rank0 else str(size-1))

def test_an_error_of_another_rank_is_its_own():
    res = ranks(lambda rank: caught(rank0_first, lambda: 'ab'.index('bxa'[rank])), 3)
    test_eq(res, [1, ('ValueError','substring not found'), 0])

def deep(n, rank, top): return rank0_first(deep, n-1, rank, top) if n else slowly(rank, str(top), .05)

def test_nested():
    test_eq(ranks(lambda rank: [deep(n, rank, n) for n in range(1,4)], 3), [[i]*3 for i in range(3)])
    for n in range(1,4): test_eq([o for o in log() if o[0]==str(n)][:2], [f'{n}in0',f'{n}out0'])

def out_of_step(rank):
    "Calls inside a call that not all ranks make, or that fail in between"
    res = [caught(rank0_first, lambda: rank0_first(str, rank) + rank0_first(lambda: 1))]
    rank0_first(lambda: rank or [rank0_first(str) for _ in range(3)])
    only_rank0(lambda: [rank0_first(str) for _ in range(3)])
    only_rank0(lambda: only_rank0(lambda: only_rank0(str)))
    return res,rank0_first(slowly, rank),rank0_first(slowly, rank, 'then')

@pytest.mark.parametrize('size', [2,3])
def test_ranks_stay_in_step(size):
    res = ranks(out_of_step, size)
    test_eq([(o[1],o[2]) for o in res], [(i,i) for i in range(size)])
    test_eq(log()[:2], ['in0','out0'])
    then = [o for o in log() if 'then' in o]
    test_eq(then[:2], ['thenin0','thenout0'])

def test_a_caught_error_inside():
    def either(rank): return rank0_first(slowly, rank) if isinstance(caught(rank0_first, lambda: 1/0), tuple) else 'no error'
    test_eq(ranks(lambda rank: rank0_first(either, rank), 3), [0,1,2])
    test_eq(log()[:2], ['in0','out0'])

def both_nodes(rank):
    "Comes to an end only if the first of both nodes are here at the same time"
    note(rank, 'in')
    while not {'in0','in2'} <= set(log()): time.sleep(.01)
    note(rank, 'out')
    return rank

def test_first_of_each_node():
    def f(rank):
        on_nodes(rank)
        return rank0_first(both_nodes, rank, local=True)
    test_eq(ranks(f, 4), [0,1,2,3])
    for a,b in ((0,1),(2,3)): assert log().index(f'out{a}')<log().index(f'in{b}')

def test_an_error_stays_on_its_node():
    def f(rank):
        on_nodes(rank)
        return caught(rank0_first, lambda: 1//(rank-2), local=True)
    res = ranks(f, 4)
    test_eq(res[:2]+[res[2][0],res[3][0]], [-1, -1, 'ZeroDivisionError', 'RankError'])
    assert 'rank 2 failed' in res[3][1] and 'ZeroDivisionError' in res[3][1]

@pytest.mark.parametrize('outer', [False,True])
def test_nodes_and_all_nested(outer):
    def f(rank):
        on_nodes(rank)
        inner = lambda what, local: rank0_first(slowly, rank, what, .05, local=local)
        for what in 'ab': rank0_first(inner, what, not outer, local=outer)
        return rank0_first(str, rank),rank0_first(str, rank, local=True)
    test_eq(ranks(f, 4), [(str(i),)*2 for i in range(4)])
    for what,(a,b) in itertools.product('ab', [(0,1),(0,2),(2,3)]): assert log().index(f'{what}out{a}')<log().index(f'{what}in{b}')

def test_one_rank_a_node():
    def f(rank):
        on_nodes(rank, 1, 3)
        return rank0_first(meeting, rank, 3, local=True)
    test_eq(ranks(f, 3), [0,1,2])
    test_eq(sorted(log()[:3]), ['in0','in1','in2'])

@pytest.mark.parametrize('size', [2,3])
@pytest.mark.parametrize('before', [noop,over_tcp], ids=['file','tcp'])
def test_rank_0_alone(size, before):
    def f(rank):
        if before is over_tcp: over_tcp()
        res = only_rank0(slowly, rank, name='x'),log()[:2]
        part(rank, size)
        return *res,dist.is_initialized()
    test_eq(ranks(f, size), [(None if i else 0,['in0','out0'],False) for i in range(size)])

def test_rank_0_never_waits():
    def f(rank):
        if rank==0: return only_rank0(slowly, rank),only_rank0(slowly, rank, name='x')
    test_eq(ranks(f, 3), [(0,0), None, None])

def test_names_are_counted_for_themselves():
    def f(rank):
        if rank==0: [only_rank0(note, rank, 'early', name='a') for _ in range(3)]
        only_rank0(slowly, rank, name='b')
        return log()[-1]
    test_eq(ranks(f, 3), ['out0']*3)

def test_no_barrier_inside():
    def f(rank):
        only_rank0(distrib_barrier)
        rank0_first(lambda: only_rank0(distrib_barrier))
        if rank==1: without_barrier(distrib_barrier)
        distrib_barrier()
        return True
    test_eq(ranks(f, 3, join=True), [True]*3)

def test_one_process():
    test_eq((rank0_first(max, 1, 2), rank0_first(max, 1, 2, local=True), only_rank0(max, 1, 2, name='m')), (2,2,2))
    with pytest.raises(ZeroDivisionError): only_rank0(lambda: 1/0)
