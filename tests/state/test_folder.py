"States on disk as a training meets them: killed while it writes, a disk that is full or gone, files that were changed since, two jobs with one path"
import gc,json,os,pickle,pytest,random,resource,signal,socket,struct,subprocess,sys,threading,time
from collections import OrderedDict
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes,arrays,scalar_dtypes
from safetensors.torch import load,load_file,save,save_file
from torch.utils.data import DataLoader as TorchLoader
from fastai.vision.all import *
from fastcore.test import expect_fail,test_eq
from fastdist.base.errors import ResumeError
from fastdist.launch.fork import forked_workers,on_ranks
from fastdist.state import folder
from fastdist.state.folder import *
from fastdist.state.serialize import *
from fastdist.state.checkpoint import *

fork = get_context('fork')

def written(states, i, n=1000, **kw):
    v = dict(w=torch.full((n,), i), loss=[tensor(float(i))]*3, rng=dict(py=random.Random(i).getstate()))
    return states.write(dict(batch=i), v, f'batch{i}', **kw)

def is_right(state):
    i = state.about['batch']
    v = state.read()
    return bool((v['w']==i).all()) and v['loss']==[i]*3 and v['rng']==dict(py=random.Random(i).getstate())

def names(path): return sorted(o for o in os.listdir(path) if o!='.lock')

@contextmanager
def told(n=1):
    with warnings.catch_warnings(record=True) as ws:
        warnings.simplefilter('always')
        yield ws
    test_eq(len(ws), n)

# What goes through a file

def through(v):
    pack(v)
    tree,tensors = pack(v)
    return from_json(json.loads(json.dumps(tree, allow_nan=False)), load(save(tensors)).__getitem__)

def same(a, b):
    "Equal in type, content and bits"
    if type(a) is not type(b): return False
    if isinstance(a, Tensor): return a.dtype==b.dtype and a.shape==b.shape and a.data.numpy().tobytes()==b.data.numpy().tobytes()
    if isinstance(a, (np.ndarray,np.generic)): return a.dtype==b.dtype and a.shape==b.shape and a.tobytes()==b.tobytes()
    if isinstance(a, float): return struct.pack('d', a)==struct.pack('d', b) or a!=a and b!=b # a NaN in JSON is one of many
    if isinstance(a, complex): return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict): return list(a)==list(b) and all(same(a[k], b[k]) for k in a) and (type(a) is dict or same(vars(a), vars(b)))
    return len(a)==len(b) and all(map(same, a, b)) if isinstance(a, (list,tuple,L)) else a==b

def ordered(d):
    res = OrderedDict(d)
    res._metadata = dict(version=2)
    return res

floats = st.floats(width=32)
numbers = st.integers() | st.floats() | st.booleans() | st.none() | st.complex_numbers() | st.integers(2**990, 2**2100)
tensors = arrays(scalar_dtypes().filter(lambda o: o.kind in 'bif' and o.isnative and str(o)!='float128'), array_shapes(min_dims=0, max_side=3)).map(torch.from_numpy)
of_fastai = st.builds(lambda t, cls: torch.as_subclass(t, cls), tensors, st.sampled_from([TensorBase,TensorImage,TensorCategory]))
of_numpy = arrays(scalar_dtypes(), array_shapes(min_dims=0, max_side=3)) | floats.map(np.float32) | st.integers(0, 255).map(np.uint8)
texts = st.text(st.characters()) | st.binary() | st.builds(bytearray, st.binary()) | st.text('ab/.', min_size=1).map(Path)
scalars = floats,st.integers(),floats.map(tensor),floats.map(lambda o: TensorBase(tensor(o).half())),floats.map(np.float64)
alike = st.one_of(*(st.lists(o, min_size=1) for o in scalars))
keys = st.text() | st.integers(-9, 9) | st.none() | st.tuples(st.integers(), st.text()) | st.binary()
leaf = numbers | tensors | of_fastai | of_numpy | texts | alike | st.sets(st.integers() | st.text()) | st.frozensets(st.binary())
def boxes(o): return st.lists(o) | st.lists(o).map(tuple) | st.lists(o).map(L) | st.dictionaries(keys, o) | st.dictionaries(st.text(), o).map(ordered)
values = st.recursive(leaf, boxes, max_leaves=8)

@given(values)
def test_what_is_packed_comes_back_from_a_file(v): assert same(through(v), v), v

@pytest.mark.whole
@pytest.mark.parametrize('of', [tensor, lambda o: torch.as_subclass(tensor(o), TensorCategory), lambda o: tensor(o).half(), float, np.float32])
def test_a_hundred_thousand_scalars_are_written_together(of):
    losses = L(of(float(i%2000)) for i in range(100_000))
    start = time.thread_time()
    res = through(dict(losses=losses))['losses']
    assert time.thread_time()-start<10
    test_eq((type(res), len(res), {*map(type, res)}), (L,len(losses),{type(losses[0])}))
    assert all(same(res[i], losses[i]) for i in range(0, 100_000, 999))

def test_a_view_is_written_without_the_rest_and_a_copy_stays():
    t = torch.arange(1e6)
    test_eq(len(save(pack(dict(t=t[3:5]))[1]))<4000, True)
    _,tensors = pack(dict(t=t, same=t, l=[t[0],t[1]]))
    t.zero_()
    test_eq(({*tensors}, tensors['t'][5], tensors['l']), ({'t','l'},5.,tensor([0.,1.])))

class Mine(Tensor): pass

@pytest.mark.parametrize('v', [lambda: 0, Mine([1.]), np.array([{}]), nn.Linear(1,1), defaultdict(lambda: 0), threading.Lock()], ids=lambda o: type(o).__name__)
def test_what_cannot_be_stored_is_named_by_its_place(v):
    with expect_fail(TypeError, 'callbacks.MyCb.hist[3][0] is of type'): pack(dict(model={}, callbacks=dict(MyCb=dict(hist=(1, 2., 'a', [v])))))

# A kill while a state is written

def write_next(path, kill_at=0, n=1000):
    "Write the state after the newest one, and kill this process at line number `kill_at` of it; return the number of lines"
    states,lines = States(path),0
    i = states.newest().about['batch']+1
    def trace(frame, event, arg):
        nonlocal lines
        if not frame.f_code.co_filename.endswith(('folder.py','files.py','serialize.py','shutil.py')): return
        lines += event=='line'
        if event=='line' and lines==kill_at: os.kill(os.getpid(), signal.SIGKILL)
        return trace
    sys.settrace(trace)
    try: written(states, i, n, pinned=i%3==0)
    finally: sys.settrace(None)
    return lines

def test_a_kill_at_any_line_leaves_a_complete_state(tmp_path):
    for i in range(4): written(States(tmp_path), i, pinned=i%3==0)
    last,lines,ends = 3,on_ranks(lambda _: write_next(tmp_path), n=1, join=False)[0],[]
    for at in random.sample(range(1, lines), 20):
        last = States(tmp_path).newest().about['batch']
        p = fork.Process(target=write_next, args=(tmp_path,at))
        p.start()
        p.join()
        ends.append(p.exitcode)
        assert checked(tmp_path).about['batch'] in ([last+1] if p.exitcode==0 else [last,last+1]), at
    assert {*ends}<={0,-signal.SIGKILL} and ends.count(0)<10, ends # a write that removes fewer states has fewer lines than the one that was counted
    written(States(tmp_path), last+2)
    assert all(o[0]!='.' for o in names(tmp_path)) and all(int(o.partition('batch')[2])%3==0 for o in names(tmp_path)[:-2]) # the newest two and those that are pinned

def checked(path):
    "The newest state in `path`, after it has been checked that each that is there is complete and right"
    states = States(path)
    with told(0): assert all(is_right(states.find(lambda o: o['batch']==int(n.partition('batch')[2]))) for n in names(path) if n[0]!='.')
    return states.newest()

def keep_writing(path, ready):
    states,writer = States(path),Writer()
    i = states.newest().about['batch']
    while True:
        i += 1
        writer.start(lambda: written(states, i, 3_000_000))
        ready.set()
        writer.wait()

def test_a_kill_from_outside_while_a_thread_writes(tmp_path):
    written(States(tmp_path), 0)
    for _ in range(10):
        ready,last = fork.Event(),States(tmp_path).newest().about['batch']
        p = fork.Process(target=keep_writing, args=(tmp_path,ready))
        p.start()
        assert ready.wait(20)
        time.sleep(random.uniform(0, .1)) # where in the write it is killed
        p.kill()
        p.join()
        assert checked(tmp_path).about['batch']>=last

# Torn, foreign, malicious

def flip(file):
    b = bytearray(file.read_bytes())
    b[len(b)//2] ^= 1
    file.write_bytes(b)

harms = dict(truncated=(lambda d: os.truncate(d/'tensors.safetensors', 100), 'tensors.safetensors has 100 bytes'), flipped=(lambda d: flip(d/'tensors.safetensors'), 'tensors.safetensors was changed'),
    missing=(lambda d: (d/'values.json').unlink(), 'values.json: No such file'), empty_json=(lambda d: (d/'state.json').write_text(''), 'state.json is empty'),
    edited_json=(lambda d: (d/'state.json').write_text((d/'state.json').read_text().replace('"batch": 2', '"batch": 5')), 'state.json was changed'),
    no_json=(lambda d: (d/'state.json').unlink(), 'state.json is missing'), flipped_json=(lambda d: flip(d/'state.json'), 'state.json'))

@pytest.mark.parametrize('harm', harms)
def test_a_torn_state_is_named_once_and_the_one_before_is_used(harm, tmp_path):
    do,what = harms[harm]
    for i in range(3): s = written(States(tmp_path), i)
    do(s.path)
    states = States(tmp_path)
    with told() as ws:
        for _ in range(2): assert is_right(states.newest())
    test_eq(states.newest().about['batch'], 1)
    assert str(s.path) in str(ws[0].message) and what in str(ws[0].message), ws[0].message
    with told(0): written(states, 7)
    test_eq(names(tmp_path), ['000002-batch1','000004-batch7'])

def test_what_is_not_ours_is_named_and_stays(tmp_path):
    for i in range(3): s = written(States(tmp_path), i)
    (s.path/'state.json').write_text('[1]')
    with told() as ws: test_eq(States(tmp_path).newest().about['batch'], 1)
    assert str(s.path) in str(ws[0].message) and 'is not of fastdist' in str(ws[0].message)
    (tmp_path/'000007-photos').mkdir()
    (tmp_path/'000007-photos/a.jpg').write_text('a')
    with told(2): written(States(tmp_path), 7)
    test_eq(names(tmp_path), ['000002-batch1','000003-batch2','000007-photos','000008-batch7'])

def test_a_state_of_another_version_is_refused_and_stays(tmp_path):
    for i in range(3): s = written(States(tmp_path), i)
    (s.path/'state.json').write_text('{"format": 1, "fastdist": "0.0.1", "about": {}}')
    with expect_fail(ResumeError, f'The state in {s.path} has format 1, written by fastdist 0.0.1'): States(tmp_path).newest()
    for i in range(3,7): written(States(tmp_path), i)
    test_eq(names(tmp_path), ['000003-batch2','000006-batch5','000007-batch6'])
    test_eq(States(tmp_path).newest().about['batch'], 6)

class Bad:
    def __reduce__(self): return os.system,('touch pwned',)

def pickled(path): torch.save(dict(w=Bad()), path/'tensors.safetensors')
def asks(path): (path/'values.json').write_text('{"w": {"$system": "touch pwned"}}')
def tensor_of_pickle(path): save_file(dict(w=torch.frombuffer(bytearray(pickle.dumps(Bad())), dtype=torch.uint8)), path/'tensors.safetensors') or (path/'values.json').write_text('{"w": {"$torch": {"$tensor": "w"}}}')

@pytest.mark.parametrize('harm', [pickled,asks,tensor_of_pickle])
def test_what_would_run_code_is_refused(harm, tmp_path):
    s = written(States(tmp_path), 0)
    harm(s.path)
    js = json.loads((s.path/'state.json').read_text())
    for f,o in js['files'].items(): o |= record(s.path/f)
    del js['checksum']
    (s.path/'state.json').write_text(folder._json(js))
    with told(0): s = States(tmp_path).newest()
    with expect_fail(ValueError, f'{s.path} has files that fastdist does not write'): s.read()
    assert not Path('pwned').exists()

def test_a_state_is_read_without_fastdist(tmp_path):
    s = written(States(tmp_path), 3)
    values,tensors = json.loads((s.path/'values.json').read_text()),load_file(s.path/'tensors.safetensors')
    test_eq(values['w'], {'$tensor':'w'})
    test_eq(tensors['w'], torch.full((1000,), 3))
    test_eq({o.suffix for o in s.path.iterdir()}, {'.json','.safetensors'})
    test_eq(len({o.stat().st_mode for o in s.path.iterdir()}), 1)

def test_ends_of_ten_fits_stay(tmp_path):
    states = States(tmp_path, keep=2)
    for i in range(14): written(states, i, 10, pinned=i<12)
    test_eq([int(o.rpartition('batch')[2]) for o in names(tmp_path)], range(2, 14))

def test_newest_and_pinned_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(States, 'pins', 2)
    states = States(tmp_path/'a/b', keep=2)
    test_eq(states.newest(), None)
    for i in range(10): written(states, i, pinned=i in (1,3,4))
    test_eq(names(states.path), ['000004-batch3','000005-batch4','000009-batch8','000010-batch9'])
    test_eq(states.find(lambda o: o['batch']<9).about['batch'], 8)
    test_eq(states.find(lambda o: o['batch']>9), None)
    js = json.loads((states.newest().path/'state.json').read_text())
    test_eq({k:v for k,v in js['files']['tensors.safetensors']['holds'].items() if k in ('w','loss')}, {'w':'int64 [1000]', 'loss':'float32 [3]'})

# Disks that are full, read-only or gone

def tries(path, n=300_000):
    "Two states in a thread, of which no error comes; what was warned, and what is in `path`"
    writer = Writer()
    with warnings.catch_warnings(record=True) as ws:
        warnings.simplefilter('always')
        for i in (1,2):
            writer.start(lambda: written(States(path), i, n))
            test_eq(writer.wait(), None)
    return [str(o.message) for o in ws],names(path) if Path(path).is_dir() else None

def limited(path):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000,)*2)
    return tries(path)

def test_a_disk_that_takes_no_more_is_one_warning_and_the_state_before_stays(tmp_path):
    written(States(tmp_path), 0)
    (said,left), = on_ranks(lambda _: limited(tmp_path), n=1, join=False)
    test_eq((len(said), left), (1,['000001-batch0']))
    assert f'{tmp_path}: File too large' in said[0], said
    assert is_right(States(tmp_path).newest())

def test_a_full_disk_is_told_also_where_warnings_are_ignored_meanwhile(tmp_path):
    writer = Writer()
    (tmp_path/'file').write_text('a')
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        writer.start(lambda: written(States(tmp_path/'file'), 0))
        writer.thread.join()
    with pytest.warns(UserWarning, match='A state could not be written'): writer.wait()

@contextmanager
def mounted(path, opts):
    path.mkdir()
    if subprocess.run(['mount','-t','tmpfs','-o',opts,'none',path], capture_output=True).returncode: pytest.skip('may not mount')
    try: yield path
    finally: subprocess.run(['umount','-l',path], check=True)

def test_a_full_and_a_read_only_disk(tmp_path):
    with mounted(tmp_path/'small', 'size=1m') as d:
        written(States(d), 0)
        said,left = tries(d)
        test_eq((len(said), left), (1,['000001-batch0']))
        assert f'{d}: No space left on device' in said[0]
        written(States(d), 3)
        subprocess.run(['mount','-o','remount,ro',d], check=True)
        said,left = tries(d)
        test_eq((len(said), left), (1,['000001-batch0','000002-batch3']))
        assert f'{d}: Read-only file system' in said[0]
        with in_use(d): assert is_right(States(d).newest())

def test_a_path_that_cannot_be_a_folder_is_one_warning(tmp_path):
    (tmp_path/'file').write_text('a')
    for path in (tmp_path/'file', tmp_path/'file/run'):
        said,_ = tries(path)
        assert len(said)==1 and str(path) in said[0]
        test_eq(States(path).newest(), None)
        with in_use(path): pass

def test_other_errors_come_to_the_main_thread(tmp_path):
    writer = Writer()
    writer.start(lambda: States(tmp_path).write({}, dict(a=object()), 'a'))
    with expect_fail(TypeError): writer.wait()
    writer.start(lambda: States(tmp_path).write(dict(a=object()), {}, 'a'))
    writer.thread.join()
    with expect_fail(TypeError, 'JSON'): writer.start(noop)
    with expect_fail(ValueError, 'a/b'): States(tmp_path).write({}, {}, 'a/b')
    test_eq(names(tmp_path), [])

# Processes beside and after

def begin(path, fails):
    Writer().start(lambda: written(States(path), 1, 10_000_000))
    if fails: raise SystemExit(3)

@pytest.mark.parametrize('fails', [False,True])
def test_a_process_that_ends_while_it_writes_has_written(fails, tmp_path):
    p = fork.Process(target=begin, args=(tmp_path,fails))
    p.start()
    p.join(60)
    test_eq(p.exitcode, 3 if fails else 0)
    assert is_right(States(tmp_path).newest())

class Items:
    "A data set whose workers write states of their own"
    def __init__(self, path, writer): store_attr()
    def __len__(self): return 4
    def collect(self):
        gc.unfreeze()
        gc.collect()
    def __getitem__(self, i):
        if i%2==0: self.collect() # once in a worker
        assert not self.writer.busy
        self.writer.start(lambda: written(States(self.path/str(i)), i))
        return self.writer.wait().about['batch']

@pytest.mark.whole
@forked_workers()
def test_data_workers_that_are_forked_while_it_writes(tmp_path):
    writer,n = Writer(),0
    for k in range(2):
        writer.start(lambda: written(States(tmp_path/'run'), k, 10_000_000))
        while writer.busy:
            test_eq(sorted(torch.cat(list(TorchLoader(Items(tmp_path, writer), batch_size=2, num_workers=2, timeout=120))).tolist()), [0,1,2,3])
            n += 1
        assert is_right(writer.wait())
    assert n>=2

def hold(path, conn, child=False):
    "Have `path` in use, with a data worker that outlives this process if `child`"
    with in_use(path):
        pid = os.fork() if child else 0
        if child and not pid: signal.pause()
        conn.send(pid)
        signal.pause()

@pytest.mark.parametrize('child', [False,True])
def test_a_second_job_on_one_path_is_told_who_has_it(child, tmp_path):
    mine,its = fork.Pipe()
    p = fork.Process(target=hold, args=(tmp_path/'run',its,child))
    p.start()
    assert mine.poll(20)
    pid = mine.recv()
    try:
        with expect_fail(RuntimeError, f'process {p.pid} on {socket.gethostname()}'), in_use(tmp_path/'run', 0): pass
        with expect_fail(RuntimeError, str(tmp_path/'run')), in_use(str(tmp_path/'run'), 0): pass
        p.kill()
        p.join()
        with in_use(tmp_path/'run'): pass
        if pid: os.kill(pid, 0)
    finally:
        p.kill()
        if pid: os.kill(pid, signal.SIGKILL)

def test_a_child_does_not_end_the_use_of_its_parent(tmp_path):
    use = in_use(tmp_path)
    with use:
        p = fork.Process(target=use.__exit__, args=(None,None,None))
        p.start()
        p.join()
        test_eq(p.exitcode, 0)
        with expect_fail(RuntimeError, f'process {os.getpid()} on'), in_use(tmp_path, 0): pass
    with in_use(tmp_path): pass
