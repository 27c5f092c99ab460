"Scripts without a seed: ranks of one launch begin with one random state, those of the next with another, and nobody's seed is taken"
import json,random,sys
import numpy as np,pytest,torch
from fastcore.test import test_eq
from procs import *

pytestmark = pytest.mark.launcher

script = '''import json,os,random,sys,torch,numpy as np
from pathlib import Path
before,after,out = sys.argv[1:]
def numbers(): return random.random(),np.random.rand(),torch.rand(1).item(),random.random()
exec(before)
from fastdist import *
exec(after)
Path(out+os.environ.get('RANK', '0')).write_text(json.dumps(numbers()))
'''

@pytest.fixture
def drawn(warm, tmp_path):
    "What each of `n` ranks of a launch draws, where the script does `before` before it imports fastdist, and `after` behind it"
    path = tmp_path/'script.py'
    path.write_text(script)
    def f(before='', after='', n=2):
        args = path,before or 'pass',after or 'pass',tmp_path/'drawn'
        warm(*(torchrun(*args, n=n) if n>1 else (sys.executable,*args)))
        return [json.loads((tmp_path/f'drawn{i}').read_text()) for i in range(n)]
    return f

def test_each_launch_draws_anew(drawn):
    a,b = drawn(n=3),drawn(n=3)
    test_eq((a,b), ([a[0]]*3,[b[0]]*3))
    assert len({*a[0],*b[0]})==8

def numbers(): return random.random(),np.random.rand(),torch.rand(1).item(),random.random()

def numbers_of(seed):
    "What one process draws after the line `seed`"
    old = random.getstate(),np.random.get_state(),torch.get_rng_state()
    try:
        exec(seed)
        return numbers()
    finally: random.setstate(old[0]),np.random.set_state(old[1]),torch.set_rng_state(old[2])

seeds = dict(random=('random.seed(5)',(0,3)), text=('random.seed("five")',(0,3)), numpy=('np.random.seed(5)',(1,)), list=('np.random.seed([5,6])',(1,)), torch=('torch.manual_seed(5)',(2,)))

@pytest.mark.parametrize('line,own', seeds.values(), ids=seeds)
@pytest.mark.by_default('torch', 'text')
def test_seeds_stay(drawn, line, own):
    before,after = drawn(line),drawn(after=line)
    for i in own: test_eq([o[i] for o in before+after], [numbers_of(line)[i]]*4)
    test_eq((before[0],after[0]), (before[1],after[1]))

def test_a_script_that_has_drawn_goes_on(drawn):
    line = 'random.seed(5),np.random.seed(5),torch.manual_seed(5);[numbers() for _ in range(400)]'
    for o in drawn(line): test_eq(o, [*numbers_of(line)])

def test_ranks_that_drew_before_differ(drawn):
    a,b = drawn('numbers(),[random.random() for _ in range(9)]')
    assert not {*a}&{*b}

def test_one_process_draws_what_it_did(drawn):
    line = 'state = random.getstate(),np.random.get_state()[1].tolist(),torch.get_rng_state().tolist()'
    drawn(line, 'assert state==(random.getstate(),np.random.get_state()[1].tolist(),torch.get_rng_state().tolist())', n=1)
