"A job whose control threads cannot start says so"
import threading,pytest
from unittest.mock import patch
from fastcore.test import test_eq
from fastdist.comm.job import Job
from fastdist.launch.fork import on_ranks
from fastdist.launch.group import this_world

def opened(rank, kind):
    "Return the error of rank 0 of a job, of whose control threads `kind` cannot start; the other rank comes too late"
    if rank: return
    start = threading.Thread.start
    def fails(self):
        if self.name==f'fastdist {kind}': raise RuntimeError("can't start new thread")
        start(self)
    with patch.object(threading.Thread, 'start', fails):
        try: Job(this_world()).open(10)
        except RuntimeError as e: return str(e)

@pytest.mark.parametrize('kind', ('listener','watchdog'))
def test_the_cause_is_raised(kind): test_eq(on_ranks(lambda rank: opened(rank, kind), 2, join=False), ["can't start new thread",None])
