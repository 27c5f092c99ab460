"A running job is asked where its ranks stand: by a signal, over a socket, from outside; nothing it does changes by that"
import io,os,pytest,re,signal,threading
from ctypes import PyDLL
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from functools import partial
from multiprocessing import active_children
from fastcore.test import test_eq
from fastai.basics import *
from torch import distributed as dist
from fastdist import *
from fastdist.check import main
from fastdist.comm.inquiry import Inquiry
from fastdist.comm.requests import *
from fastdist.base.errors import RankError
from fastdist.job.fork import on_ranks
from fastdist.job.spawn import *
from fastdist.observe.checks import small_learner
from procs import *

pytestmark = pytest.mark.timeout(300)
title = 'fastdist: where'

def mine(): return [o for o in running_ranks() if o.job==next(r.job for r in running_ranks() if r.pid==os.getpid())]
def report(i=0): return ask(mine()[i:i+1])[0]
def text(rank): return Path(f'err{rank}').read_text()
def awaited(find, said):
    "The report that `said` returns as soon as `find` is in it"
    got = []
    await_that(lambda: got.append(said()) or find in got[-1])
    return got[-1]

class At(Callback):
    "Calls `f` on `rank` before its batch 1 of the first training"
    def __init__(self, rank, f): self.rank,self.f = rank,f
    def before_batch(self):
        if this_rank()==self.rank and self.training and self.iter==1: self.f()

def this_rank(): return dist.get_rank() if dist.is_initialized() else 0

def trained(rank, f, folder='.'):
    "What a rank has after a training in which rank 2 calls `f`, and how its signal is handled then"
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    with open(f'err{rank}', 'w', buffering=1) as err, redirect_stderr(err):
        learn = small_learner(8, 60, cbs=At(2, f))
        with learn.no_logging(), learn.no_bar(), learn.distrib_ctx(): learn.fit(1)
    return L(learn.model.parameters())[0].sum().item(),signal.getsignal(signal.SIGUSR2),signal.set_wakeup_fd(-1)

def on_three(f, **kw):
    res = on_ranks(partial(trained, f=f, **kw), 3, join=False)
    test_eq([o[1:] for o in res], [(signal.SIG_DFL,-1)]*3)
    return [o[0] for o in res]

def test_a_rank_in_a_collective_is_signalled_and_names_the_one_that_computes():
    def f():
        await_that(lambda: len(re.findall(r'rank [01] \(.* waits for .* in the training step, for rank 2', report()))==2)
        os.kill(mine()[1].pid, signal.SIGUSR2) # its main thread is in C code, and does not come back before this one goes on
        awaited('stack of rank', lambda: text(1))
    test_eq(on_three(f), on_three(noop, folder='calm'))
    out = text(1)
    assert re.search(r'rank 0 \(pid \d+\) waits for \d+\.\d s in the training step, for rank 2: training, epoch 0, batch 1', out)
    assert re.search(r'rank 2 \(pid \d+\) .*: training, epoch 0, batch 1, At.before_batch', out)
    assert 'stack of rank 2, innermost call last' in out and 'self.f()' in out
    test_eq([text(0), text(2)], ['','']) # those that were not asked

def test_all_ranks_are_signalled_and_one_shows_the_report():
    def f():
        for o in mine(): os.kill(o.pid, signal.SIGUSR2)
        awaited(title, lambda: ''.join(text(r) for r in range(3)))
        assert title in report() # the next inquiry: by now all have heard of the first
    on_three(f)
    test_eq(sum(text(r).count(title) for r in range(3)), 1)

def hold(secs):
    Path('holds').touch()
    PyDLL(None).usleep(int(secs*1e6)) # with the interpreter's lock

@pytest.mark.parametrize('silent', [0,1])
def test_a_rank_that_holds_the_lock_is_silent(silent, monkeypatch):
    monkeypatch.setattr(Inquiry, 'answer_time', .4)
    class Holds(At):
        def before_batch(self):
            super().before_batch()
            if this_rank()==silent and self.training and self.iter==1: hold(2)
    def f():
        await_that(Path('holds').exists)
        Path('said').write_text(report(1 if silent==0 else 0))
    def run(rank):
        learn = small_learner(8, 60, cbs=Holds(2, f))
        with learn.no_logging(), learn.no_bar(), learn.distrib_ctx(): learn.fit(1)
    on_ranks(run, 3, join=False)
    said = Path('said').read_text()
    assert ('rank 1 is silent' if silent else 'rank 0, which gathers what all ranks say, is silent') in said and f'rank {1-silent} (' in said

def test_between_fits_and_after_an_error():
    def fail(): raise ValueError('disk full')
    def run(rank):
        learn,res = small_learner(8, 60, cbs=At(1, fail)),[]
        with learn.no_logging(), learn.no_bar(), learn.distrib_ctx():
            dist.barrier() # an inquiry that the other began, while this rank came, would answer for it
            res.append(report())
            try: learn.fit(1)
            except (RankError,ValueError): res.append(ask(mine()[:1])[0])
            learn.remove_cb(At)
            learn.fit(1)
        return res
    res = on_ranks(run, join=False)
    for r,(before,_) in enumerate(res): assert re.search(rf'rank {r} \(pid \d+\) .*between two fits', before)
    after = res[0][1]
    assert re.search(r'rank 1 \(.*; it failed: disk full', after)

def test_a_users_handler_stays():
    def run(rank):
        got = []
        signal.signal(signal.SIGUSR2, lambda *_: got.append(rank))
        learn = small_learner(8, 60)
        with learn.no_logging(), learn.no_bar(), learn.distrib_ctx():
            os.kill(os.getpid(), signal.SIGUSR2)
            said = report()
            learn.fit(1)
        signal.raise_signal(signal.SIGUSR2)
        return got,title in said
    test_eq(on_ranks(run, join=False), [([r,r],True) for r in range(2)])

@pytest.mark.parametrize('ctx', ['distrib_ctx','lean_ctx'])
def test_one_process(ctx):
    def run(_):
        def f():
            os.kill(os.getpid(), signal.SIGUSR2)
            got.append(report())
        got,learn = [],small_learner(8, 60, cbs=At(0, f))
        with redirect_stderr(io.StringIO()) as err, learn.no_logging(), learn.no_bar(), getattr(learn, ctx)(): learn.fit(1)
        return err.getvalue(),got[0],signal.getsignal(signal.SIGUSR2),signal.getsignal(signal.SIGURG),[o for o in running_ranks() if o.pid==os.getpid()]
    shown,said,*rest = on_ranks(run, 1, join=False)[0]
    for o in (shown,said): assert re.search(r'rank 0 \(pid \d+\) computes: training, epoch 0, batch 1, At.before_batch', o)
    test_eq(rest, [signal.SIG_DFL,signal.SIG_DFL,[]])

def test_data_workers_survive_the_signal():
    def run(rank):
        def f():
            for o in active_children(): os.kill(o.pid, signal.SIGUSR2)
            n.append(len(active_children()))
        n,learn = [],small_learner(8, 200, cbs=[At(0, f),At(1, f)])
        for dl in learn.dls.loaders: dl.fake_l.num_workers = 1
        with learn.no_logging(), learn.no_bar(), learn.distrib_ctx(): learn.fit(1)
        return n
    test_eq(on_ranks(run, join=False), [[1],[1]])

def test_a_head_asks_its_ranks():
    def f():
        os.kill(os.getppid(), signal.SIGUSR2)
        awaited(title, lambda: Path('head').read_text())
    def head(_):
        with open('head', 'w', buffering=1) as err, redirect_stderr(err): return start_ranks(train, 2, start='fork')
    def train(rank):
        learn = small_learner(8, 60, cbs=At(1, f))
        with learn.no_logging(), learn.no_bar(), learn.distrib_ctx(): learn.fit(1)
    on_ranks(head, 1, join=False)
    assert 'where 2 ranks stand' in Path('head').read_text()

def test_nothing_is_done_and_no_thread_is_there_for_it_until_somebody_asks():
    def run(rank):
        learn,done,threads = small_learner(8, 60, cbs=At(rank, lambda: threads.append([o.name for o in threading.enumerate() if 'fastdist' in o.name]))),[],[]
        for k in ('_take_requests','_go_on','_own_answer'): setattr(Inquiry, k, lambda *args: done.append(k))
        with learn.no_logging(), learn.no_bar(), learn.distrib_ctx(): learn.fit(1)
        return done,threads
    test_eq(on_ranks(run, join=False), [([],[['fastdist control']])]*2)

script = """from fastai.basics import *
from fastdist import *
from fastdist.observe.checks import small_learner
class Waits(Callback):
    def before_batch(self):
        if rank_distrib()==1 and self.iter==1:
            Path('waits.part').write_text(f'{os.getppid()}')
            Path('waits.part').rename('waits')
            while not Path('go').exists(): time.sleep(.05)
learn = small_learner(8, 60, cbs=Waits())
with learn.distrib_ctx(): learn.fit(1)
"""

def test_torchrun_is_asked_from_outside(warm, tmp_path):
    (tmp_path/'train.py').write_text(script)
    with ThreadPoolExecutor() as pool:
        job = pool.submit(warm, *torchrun(tmp_path/'train.py'), timeout=50)
        try:
            await_that(lambda: Path('waits').exists() or job.done())
            out,_ = run(bin_/'fastdist-check', '--job', Path('waits').read_text())
        finally: Path('go').touch()
        assert title not in ''.join(job.result())
    assert 'where 2 ranks stand' in out and 'for rank 1: training, epoch 0, batch 1' in out and "while not Path('go').exists()" in out, out
    pids = set(map(int, re.findall(r'pid (\d+)', out)))
    test_eq((len(pids), [o for o in running_ranks() if o.pid in pids]), (2,[]))

def test_a_job_that_is_not_there(capsys):
    with pytest.raises(SystemExit): main(job=2**22+1)
    assert 'no job of yours' in capsys.readouterr().err
