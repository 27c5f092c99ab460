"Ranks leave a job one after the other, and its store ends with rank 0: nobody waits there then, so torch has nothing to print"
import time,pytest
from fastcore.all import *
from fastcore.test import test_eq
from fastdist import *
from fastdist.comm.failures import Failures,RankFailure
from fastdist.comm.job import Job,Listener

pytestmark = pytest.mark.timeout(60)

class Slow:
    "A connection whose thread is held up before it reads what it was told of"
    def __init__(self, client): self.client = client
    def __getattr__(self, k): return getattr(self.client, k)
    def get(self, key):
        time.sleep(1)
        return self.client.get(key)

def leaves_slowly(rank):
    init = Listener.__init__
    Listener.__init__ = lambda self, state, client: init(self, state, Slow(client) if rank else client)
    with Job(this_world()).open(): pass

def leaves_late(rank):
    with Job(this_world()).open(): time.sleep(7*rank) # rank 0 ends after five seconds

@pytest.mark.by_default('leaves_slowly')
@pytest.mark.parametrize('f', [leaves_slowly,leaves_late])
@pytest.mark.parametrize('n', [2,3])
def test_nothing_is_printed(capfd, f, n):
    on_ranks(f, n, join=False, timeout=50)
    test_eq(capfd.readouterr().err, '')

def test_an_error_that_was_received_after_a_suspension_is_not_late():
    f = Failures()
    f.receive(0, RankFailure(1, 'ValueError: a broken file'))
    f.delay(600.)
    time.sleep(Failures.grace)
    test_eq(f.due().rank, 1)
