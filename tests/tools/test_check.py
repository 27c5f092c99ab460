"`fastdist-check` on real ranks: what it says where all is well, and that it finds what is not"
import io,os,pytest,re,signal,sys,time
from contextlib import redirect_stdout
from functools import partial
from torch import distributed as dist
from fastcore.test import test_eq
from fastai.basics import *
from fastdist import *
from fastdist.check import *
from fastdist.tools.checks import *
from fastdist.comm.collectives import grouped
from procs import *

pytestmark = pytest.mark.timeout(180)
titles = ['ranks','replicas','exactness']

def verdicts(text): return dict(o.split()[1::-1] for o in text.splitlines() if o.startswith(('ok ','FAILED ')))

def hints_of_failed(text):
    "Number of hints of each check that failed"
    return [o.count('HINT: ') for o in re.split(r'^(?=ok |FAILED |$)', text, flags=re.M) if o.startswith('FAILED ')]

def rank0_says(text, n, launcher):
    test_eq(verdicts(text), dict.fromkeys(titles, 'ok'))
    lines = text.splitlines()
    test_eq([o.split()[0]+' '+o.split('gloo')[1].strip() for o in lines[3:3+n]], [f'{i} {launcher}' for i in range(n)])
    test_eq([text.count('Python 3'), lines[-1]], [1,'All is well.'])

def checked(rank, **kw):
    err = ''
    with redirect_stdout(io.StringIO()) as out:
        try: ok = check_job(**kw)
        except Exception as e: ok,err = None,str(e)
    return ok,out.getvalue(),err

@pytest.mark.parametrize('n,join', [(2,False), (3,True)])
@pytest.mark.by_default('3-True')
def test_where_all_is_well(n, join):
    (ok,text,_),*others = on_ranks(partial(checked, nprocs=n), n, join=join)
    test_eq([ok, [o[:2] for o in others]], [True,[(True,'')]*(n-1)])
    rank0_says(text, n, 'fastdist')

def test_a_job_in_shards():
    res = on_ranks(partial(checked, nprocs=2, shard=True), join=False)
    test_eq([res[0][0], verdicts(res[0][1])], [True,{k:'ok' for k in titles if k!='replicas'}])

def test_one_process():
    ok,text,_ = checked(0)
    test_eq([ok, verdicts(text)], [True,dict.fromkeys(titles, 'ok')])
    assert dist.is_initialized() is False

def test_a_precision_that_the_launcher_asks_for_is_left_out(monkeypatch):
    monkeypatch.setenv('ACCELERATE_MIXED_PRECISION', 'bf16')
    monkeypatch.setenv('ACCELERATE_GRADIENT_ACCUMULATION_STEPS', '4')
    test_eq(on_ranks(lambda rank: checked(rank)[0], join=False), [True]*2)

class On1(Callback):
    "Calls `f` on rank 1 after the third step of a training on all ranks"
    order = 100
    def __init__(self, f): self.f = f
    def after_step(self):
        if grouped() and dist.get_rank()==1 and self.learn.model.training and self.train_iter==2: self.f(self.learn)

def nudge(learn): first(learn.model.parameters()).data += 1e-3
def other_lr(learn): learn.opt.set_hyper('lr', .5)
def stats(learn): learn.model[1].running_mean[3] += 1
def fail(learn): raise OSError('disk full')
def hang(learn): time.sleep(60)
def die(learn): os.kill(os.getpid(), signal.SIGKILL)
def lost(learn): learn.opt.step = noop

def faulty(rank, f, **kw): return checked(rank, make=partial(small_learner, cbs=On1(f)), **kw)

@pytest.mark.parametrize('f,what', [(nudge,'0.weight'), (other_lr,'lr of parameter group 0'), (stats,'1.running_mean'),
    (lost,'optimizer state of 0.weight: grad_avg')])
@pytest.mark.by_default('nudge', 'stats')
def test_a_rank_that_parts_is_found(f, what):
    (ok,text,_),(ok1,silent,_) = on_ranks(partial(faulty, f=f), join=False)
    test_eq([ok,ok1,silent], [False,False,''])
    test_eq(verdicts(text), dict(ranks='ok', replicas='FAILED', exactness='FAILED'))
    assert f'FAILED  replicas     {what} of ranks [1] is not that of rank 0' in text and hints_of_failed(text)==[1]*2, text
    test_eq(text.splitlines()[-1], 'Something is wrong, see the hints.')

def test_a_broken_law_is_found_where_replicas_agree():
    (ok,text,_),_ = on_ranks(lambda rank: checked(rank, make=partial(small_learner, seed=rank*10)), join=False)
    test_eq([ok, verdicts(text)], [False,dict(ranks='ok', replicas='ok', exactness='FAILED')])
    assert 'HINT: see that all ranks read the same data' in text

def test_batch_norm_of_each_rank_breaks_the_law():
    def own_stats(learn): learn.model[1].__class__ = torch.nn.BatchNorm1d
    class Own(Callback):
        order = 100
        def before_train(self): own_stats(self.learn)
    (ok,text,_),_ = on_ranks(lambda rank: checked(rank, make=partial(small_learner, cbs=Own())), join=False)
    test_eq([ok, verdicts(text)['exactness']], [False,'FAILED'])

@pytest.mark.by_default('fail')
@pytest.mark.parametrize('f,what', [(fail,'disk full'), (hang,'it did not move for')])
def test_an_error_and_a_rank_that_is_stuck_are_in_the_report(f, what):
    (ok,text,err),(_,silent,_) = on_ranks(partial(faulty, f=f, timeout=5 if f is hang else 60), join=False)
    test_eq([ok,silent], [None,''])
    assert 'FAILED  replicas     rank 1 failed: ' in text and what in text and what in err and 'HINT: ' in text

def test_main_exits_with_1(monkeypatch):
    class Nudged(On1):
        def __init__(self): super().__init__(nudge)
    monkeypatch.setattr(defaults, 'callbacks', defaults.callbacks+[Nudged])
    def code(rank):
        with redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as e: main(nprocs=2)
        return e.value.code,verdicts(out.getvalue()).get('replicas')
    test_eq(on_ranks(code, join=False), [(1,'FAILED'),(1,None)])

def test_ranks_that_are_fewer_than_wanted():
    (ok,text,_),_ = on_ranks(partial(checked, nprocs=4), join=False)
    test_eq([ok, verdicts(text)], [False,dict(ranks='FAILED')])
    assert '2 where --nprocs 4 asked for another number' in text and 'HINT: let the launcher start as many' in text

@pytest.mark.whole
@pytest.mark.launcher
def test_the_console_script_in_one_process():
    out,_ = run(bin_/'fastdist-check', rc=1, ACCELERATE_USE_CPU='True', MASTER_PORT='29500')
    test_eq(verdicts(out), dict(ranks='FAILED'))
    assert 'HINT: add --multi_gpu' in out

def test_torchrun(warm):
    out,err = warm(*torchrun('-m', 'fastdist.check'))
    rank0_says(out, 2, 'torchrun')
    assert 'Traceback' not in err

script = """from fastai.basics import *
from fastdist.check import main
from procs import *
class Fault(Callback):
    def after_step(self):
        if torch.distributed.get_rank()==0: return
        self.model[0].weight.data += 1e-3
        if len(self.x)>8: raise OSError('disk full') # in the fit of one process, with which ranks are compared
defaults.callbacks.append(Fault)
if __name__=='__main__': main()"""

@pytest.mark.whole
def test_torchrun_with_faults(warm, tmp_path):
    (tmp_path/'faulty.py').write_text(script)
    out,_ = warm(*torchrun(tmp_path/'faulty.py'), rc=1)
    test_eq(verdicts(out), dict(ranks='ok', replicas='FAILED', exactness='FAILED'))
    assert '0.weight of ranks [1] is not that of rank 0' in out and 'rank 1 failed: OSError: Exception occured in `Fault`' in out
    test_eq(hints_of_failed(out), [1]*2)

@pytest.mark.launcher
@pytest.mark.whole
def test_nprocs():
    out,_ = run(sys.executable, '-m', 'fastdist.check', '--nprocs', 2)
    rank0_says(out, 2, 'fastdist')
