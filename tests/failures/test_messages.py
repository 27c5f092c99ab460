"What a user reads who did something odd: each message names the cause, comes from one rank, and shows the user's own line"
import re,sys,pytest
from textwrap import dedent
from fastai.basics import *
from fastcore.test import test_eq
from fastdist import *
from learners import digits
from procs import *

pytestmark = pytest.mark.timeout(300)

@pytest.fixture(scope='module')
def shown():
    "The script `code` on two ranks: what their terminal shows"
    warm = Warm(PYTHONWARNINGS='')
    yield lambda code: warm.ask(path='script.py', text=dedent(code), n=2).raw.replace('\r', '')
    warm.close()

begin = """
    import sys
    from fastai.vision.all import *
    from fastdist import *
    set_seed(1)
    data = list(zip(torch.randn(40,3), torch.randn(40,1)))
    class Odd(Callback):
        def after_batch(self):
            if this_world().rank==1: {odd}
    learn = Learner(DataLoaders.from_dsets(data, data, bs=4, device='cpu'), nn.Linear(3,1), loss_func=MSELossFlat(), cbs=Odd())
    {before}
    with learn.distrib_ctx(): learn.fit(1)
    """

@pytest.mark.whole
def test_a_rank_that_ends_the_program_in_a_callback_is_named_with_its_line(shown):
    err = shown(begin.format(odd='sys.exit(3)', before=''))
    assert re.search(r'rank 0 ends because rank 1 ended the program, with SystemExit: 3, in script.py, line 9', err), err
    assert 'shows its traceback itself' not in err

@pytest.mark.whole
def test_an_error_is_shown_once_under_the_hook_of_another_library(shown):
    hook = "sys.excepthook = lambda kind,e,tb: print('their hook:', kind.__name__, e, file=sys.stderr)"
    err = shown(begin.format(odd="raise ValueError('lost')", before=hook))
    test_eq((err.count('their hook: ValueError'), err.count('their hook'), len(re.findall('rank 0 ends because rank 1 failed', err))), (1,1,1))

def hooks(rank, fail):
    learn,hook = digits(n=40, bs=4),sys.excepthook
    theirs = sys.excepthook = lambda *args: None
    try:
        with learn.distrib_ctx(), learn.no_bar(), learn.no_logging():
            inside = sys.excepthook
            learn.fit(1)
            if fail: raise ValueError('lost')
    except Exception as e:
        caught = sys.excepthook
        learn.detach_distributed()
        with learn.distrib_ctx(), learn.no_bar(), learn.no_logging(): learn.fit(1)
    res = inside is theirs,sys.excepthook is theirs
    sys.excepthook = hook
    return res

@pytest.mark.parametrize('fail', [False,True])
def test_the_hook_is_put_back_after_the_context(fail): test_eq(on_ranks(lambda rank: hooks(rank, fail), 2, join=False), [(False,True)]*2)

class Reads(Callback):
    "Makes an array of a parameter between steps"
    def after_batch(self): self.model[0].weight.detach().numpy()

def in_shards(rank):
    learn = digits(n=40, bs=4, cbs=Reads())
    try:
        with learn.distrib_ctx(shard=True), learn.no_bar(), learn.no_logging(): learn.fit(1)
    except Exception as e: return '\n'.join([str(e), *getattr(e, '__notes__', [])])

def test_an_array_of_a_shard_has_a_hint():
    for o in on_ranks(in_shards, 2, join=False): assert 'HINT: t.full_tensor(), called on all ranks' in o, o

@pytest.mark.whole
@pytest.mark.launcher
def test_a_folder_that_is_gone():
    gone = "os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')"
    code = f"from fastdist import *\nimport os\nf = Accelerator(nprocs=2, compute_setup='cpu').distribute(lambda: 3)\n{gone}\nf()"
    _,err = run(sys.executable, '-c', code, rc=1)
    assert 'HINT: os.chdir' in err

@pytest.mark.whole
def test_a_warning_shows_the_user_s_line(shown):
    err = shown(begin.format(odd='pass', before='').replace('with learn.distrib_ctx(): ', ''))
    assert len(re.findall(r'script.py:\d+: UserWarning: You started 2 ranks', err))==1, err
    assert not re.search(r'fastdist/\S+\.py:\d+: UserWarning', err)

broken = """
from fastai.basics import *
from fastdist import *
class Numbers:
    def __len__(self): return 40
    def __getitem__(self, i):
        if i==21: raise ValueError('number 21 is broken')
        return torch.full((3,), float(i)),i%2
class Odd(Transform):
    def encodes(self, i:int):
        if i==21: raise ValueError('number 21 is broken')
        return torch.full((3,), float(i))
"""
broken_fits = {
    'data set': 'dls = DataLoaders.from_dsets(Numbers(), Numbers(), bs=4, num_workers=2, device="cpu")',
    'transform': 'dls = Datasets(list(range(40)), [[Odd],[lambda i: i%2]]).dataloaders(bs=4, num_workers=2, device="cpu")'}

@pytest.mark.parametrize('how', ['nprocs','torchrun'])
@pytest.mark.parametrize('where', list(broken_fits))
def test_an_error_in_a_data_worker_has_at_most_15_lines_and_the_user_s_last(warm, tmp_path, how, where):
    fit = f'with learn.distrib_ctx({"nprocs=2" if how=="nprocs" else ""}): learn.fit(1)'
    learn = 'learn = Learner(dls, nn.Linear(3,2), loss_func=CrossEntropyLossFlat())'
    path = tmp_path/'broken.py'
    path.write_text('\n'.join([broken, broken_fits[where], learn, fit, '']))
    _,err = warm(*(torchrun(path) if how=='torchrun' else [sys.executable,path]), rc=1)
    lines = [re.sub(r'^\[rank\d\]: ?', '', o) for o in err.splitlines() if o.strip()]
    begin,end = lines.index('Traceback (most recent call last):'),lines.index('ValueError: number 21 is broken')
    shown = lines[begin:end+1]
    assert len(shown)<=15 and shown[-4].endswith('in encodes' if where=='transform' else 'in __getitem__'), err
    assert not [o for o in shown if 'File' in o and str(path) not in o], err
    if how=='nprocs': test_eq(lines, shown)
    else: assert sum('rank 0 ends' in o or 'rank 1 ends' in o for o in lines)<=1 and err.count('Original Traceback')==1, err # torchrun may end the other rank first

launched = """
import time
from accelerate import notebook_launcher
def train():
    {dls}
    {learn}
    try:
        with learn.distrib_ctx(): learn.fit(1{cbs})
    except ValueError:
        time.sleep({late})
        raise
notebook_launcher(train, num_processes=2, use_port={port!r})
"""
odd_layer = "cbs=type('Odd', (Callback,), dict(before_batch=lambda self: self.model(torch.ones(2,5))))()"

@pytest.mark.launcher
@pytest.mark.parametrize('where,late', [('data set',0), ('data set',3), ('callback',0)])
def test_what_notebook_launcher_prints_has_no_frames_of_libraries(warm, tmp_path, where, late):
    "The launcher prints the traceback twice, with frames of its own before and after, that of the rank which ends first; a library's last two frames say where an error arose there"
    path = tmp_path/'broken.py'
    dls,cbs,last = broken_fits['data set'],'','ValueError: number 21 is broken'
    if where=='callback': dls,cbs,last = dls.replace('Numbers(), Numbers()', 'xs, xs'),f', {odd_layer}','mat1 and mat2 shapes cannot be multiplied (2x5 and 3x2)'
    learn = 'learn = Learner(dls, nn.Linear(3,2), loss_func=CrossEntropyLossFlat())'
    path.write_text(broken+'xs = [(torch.ones(3), 1)]*40\n'+launched.format(dls=dls, learn=learn, cbs=cbs, late=late, port=str(free_port())))
    _,err = warm(sys.executable, path, rc=1)
    lines = [re.sub(r'^E.*api\.py:\d+\] ?', '', o).strip() for o in err.splitlines()]
    begins,ends = [[i for i,o in enumerate(lines) if is_one(o)] for is_one in (lambda o: o.startswith(f'File "{path}"') and o.endswith('in train'), lambda o: o==last)]
    assert len(begins)==len(ends)==2, err
    for begin,end in zip(begins, ends):
        files = [o for o in lines[begin:end] if o.startswith('File ')]
        assert end-begin<=15 and not [o for o in files if '/fastdist/' in o or '/fastai/' in o], err
        test_eq(sum(str(path) in o for o in files), 2)
