"Files that survive, and that plain fastai reads, from Learners on real ranks"
import inspect,io,itertools,os,random,resource,signal,sys,time,warnings,pytest
from functools import cache
from multiprocessing import get_context
from torch import distributed as dist
from torch.nn.parallel import DataParallel
from fastai.basics import *
from fastai.callback.all import *
from fastai.text.learner import TextLearner
from fastdist import *
import fastdist.saving
from fastcore.test import test_eq
from learners import digits,tabular,language_model,vision
from procs import await_that,here

def quiet(learn): return learn.no_logging(),learn.no_bar()

def ctx(learn):
    "Inside, `learn` is in a job and says nothing"
    a,b = quiet(learn)
    return ContextManagers([learn.distrib_ctx(), a, b])

def wide(**kw):
    "A Learner whose weights take some 150 kB"
    learn = digits(n=90, **kw)
    learn.model = nn.Sequential(nn.Linear(64,512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512,10))
    return learn

def weights(learn): return [o.detach().clone() for o in learn.model.state_dict().values()]

def shaken(learn):
    "`learn` with other weights"
    with torch.no_grad():
        for p in learn.model.parameters(): p.add_(torch.rand_like(p)+1)
    return learn

def files(path='.'): return sorted(o.name for o in Path(path).ls())

def caught(f, *args, **kw):
    try: f(*args, **kw)
    except Exception as e: return type(e).__name__,str(e)

def fit(learn, n=1, **kw):
    a,b = quiet(learn)
    with a,b: learn.fit(n, 0.01, **kw)

@pytest.fixture(autouse=True)
def no_warnings():
    warnings.filterwarnings('ignore')
    yield

class SlowFile:
    "An object that takes its time when it is pickled"
    def __reduce__(self):
        time.sleep(.5)
        return SlowFile,()

@pytest.mark.parametrize('size', [2,3])
def test_the_others_wait(size):
    def f(rank):
        learn = tabular()
        learn.path,learn.slow = Path('.'),SlowFile()
        with ctx(learn):
            learn.export('a.pkl')
            there = Path('a.pkl').exists()
            path = learn.save('m')
            state = torch.load(path)
            return there,str(path),len(state)>0
    test_eq(on_ranks(f, size, join=False), [(True,'models/m.pth',True)]*size)
    test_eq((files('models'), [o for o in files() if 'pkl' in o]), (['m.pth'],['a.pkl']))

def test_round_trip_on_ranks():
    def f(rank):
        learn = digits(path='.')
        with ctx(learn):
            learn.fit(1)
            old,opt = weights(learn),learn.opt.state_dict()
            for with_opt in (True,False):
                file = learn.save(Path('p'), with_opt=with_opt)
                shaken(learn).load('p', with_opt=with_opt)
                test_eq(weights(learn), old)
            shaken(learn).load('p', 'cpu', with_opt=False, strict=True)
            test_eq(weights(learn), old)
            learn.fit(1)
        return weights(learn)
    a,b,c = on_ranks(f, 3, join=False)
    test_eq(a, b)
    test_eq(a, c)

def saver(how, ready):
    "Saves for ever, each time all parameters with another number"
    learn = tabular()
    learn.path,learn.model.extra = Path('.'),nn.Linear(300,300)
    for i in range(10**6):
        with torch.no_grad(): [p.fill_(i) for p in learn.model.parameters()]
        learn.save('m') if how=='save' else learn.export('m.pkl')
        if i==1: ready.set()

def last_saved(how):
    "The number in a file, which must be the same throughout"
    params = torch.load('models/m.pth') if how=='save' else dict(load_learner('m.pkl').model.named_parameters())
    nums = {o for k,v in params.items() if 'running' not in k and 'num_batches' not in k for o in v.unique().tolist()}
    test_eq(len(nums), 1)
    return nums.pop()

@pytest.mark.parametrize('how', ['save','export'])
@pytest.mark.by_default('save')
def test_killed_at_any_instant(how):
    fork,rng = get_context('fork'),random.Random(how)
    for _ in range(20):
        ready = fork.Event()
        p = fork.Process(target=saver, args=(how,ready), daemon=True)
        p.start()
        assert ready.wait(60)
        time.sleep(rng.random()*.06)
        os.kill(p.pid, signal.SIGKILL)
        p.join(30)
        assert last_saved(how)>=1
    names = files('models' if how=='save' else '.')
    test_eq([o for o in names if o.endswith(('.pth','.pkl'))], ['m.pth' if how=='save' else 'm.pkl'])

def small_disk(size=60_000):
    "From now on no file of this process gets larger than `size`"
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size,resource.RLIM_INFINITY))

def large_disk(): resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,)*2)

@pytest.mark.parametrize('size', [2,3])
def test_a_full_disk_is_everybodys_error(size):
    def f(rank):
        learn = wide(path='.')
        with ctx(learn):
            learn.save('m')
            old = weights(learn)
            small_disk()
            err = caught(shaken(learn).save, 'm')
            large_disk()
            names = files('models')
            learn.load('m', with_opt=False)
            test_eq(weights(learn), old)
            learn.fit(1)
            learn.save('then')
        return err,names,files('models')
    res = on_ranks(f, size, join=False)
    test_eq([o[0][0] for o in res], ['OSError']+['RankError']*(size-1))
    for (_,msg),*names in res:
        assert 'File too large' in msg
        test_eq(names, [['m.pth'],['m.pth','then.pth']])
    assert 'rank 0 failed' in res[1][0][1]

def on_own_disk(rank):
    "A Learner whose files lie in a folder of this rank, where another training has left its own"
    learn = tabular()
    learn.path = Path(f'node{rank}')
    (learn.path/'models').mkdir(parents=True)
    for name in ('models/best.pth','models/a.pth','m.pkl'): (learn.path/name).write_text('old')
    return learn

@pytest.mark.whole
@pytest.mark.parametrize('size', [2,3])
def test_nodes_without_a_shared_disk(size):
    "What is saved inside the context lies on each node, and is loaded there"
    def f(rank):
        learn = on_own_disk(rank)
        with ctx(learn):
            learn.fit(3, 0.1, cbs=SaveModelCallback(monitor='valid_loss', comp=np.greater, fname='best'))
            best = weights(learn)
            learn.save('a')
            learn.fit(1)
            learn.load('a')
            learn.export('m.pkl')
            other = load_learner(learn.path/'m.pkl')
        return best,weights(learn),weights(other)
    res = on_ranks(f, size, join=False)
    for o in res: test_eq(o, [res[0][0]]*3)

@pytest.mark.whole
def test_nodes_without_a_shared_disk_behind_the_context():
    "Nobody waits to write there, so the rank that does not see the file is named by the load"
    def f(rank):
        learn = on_own_disk(rank)
        with ctx(learn): learn.fit(1)
        learn.save('a')
        learn.export('m.pkl')
        return caught(learn.load, 'a'),caught(load_learner, learn.path/'m.pkl')
    mine,*others = on_ranks(f, 3, join=False, timeout=60)
    test_eq(mine, (None,None))
    for kind,msg in (o for two in others for o in two): assert kind=='FileNotFoundError' and 'does not see what rank 0 wrote' in msg and 'disk' in msg

@pytest.mark.whole
def test_nodes_without_a_shared_disk_in_shards():
    "A rank has no whole model to write there, and says so at once"
    def f(rank):
        learn = on_own_disk(rank)
        with warnings.catch_warnings(record=True) as said,learn.distrib_ctx(shard=True),learn.no_bar(),learn.no_logging():
            warnings.simplefilter('always')
            learn.save('a')
            told = [str(o.message) for o in said if 'does not see' in str(o.message)]
            return len(told)
    test_eq(on_ranks(f, 2, join=False), [0,1])

@pytest.mark.whole
def test_files_of_one_name_in_two_folders_behind_the_context():
    "Each is awaited by its own path"
    def f(rank):
        learn = tabular()
        learn.path = Path('.')
        with ctx(learn): learn.fit(1)
        for o in 'ab': (learn.path/'models'/o).mkdir(parents=True, exist_ok=True)
        learn.save('a/m')
        was = weights(learn)
        if rank==0: time.sleep(.05)
        shaken(learn).save('b/m')
        learn.load('a/m')
        test_eq(weights(learn), was)
        return True
    test_eq(on_ranks(f, 3, join=False, timeout=60), [True]*3)

def test_a_rank_that_looks_late_leaves_a_newer_file():
    "Rank 0 does not wait, so it may write again before another rank has looked whether it sees the file"
    def f(rank):
        learn = wide(path='.')
        if rank:
            see = fastdist.saving._modified
            fastdist.saving._modified = lambda file: await_that(Path('newer').exists, 30) or see(file)
        with ctx(learn):
            path = learn.save('m')
            if not rank:
                torch.save('newer', path)
                Path('newer').touch()
        return True
    test_eq(on_ranks(f, 2, join=False, timeout=60), [True]*2)
    test_eq(torch.load('models/m.pth'), 'newer')

def test_export_to_an_open_file():
    def f(rank):
        learn,file = tabular(),io.BytesIO()
        with ctx(learn): learn.export(file)
        if rank: return len(file.getvalue())
        file.seek(0)
        test_eq(weights(load_learner(file)), weights(learn))
        return 0
    test_eq(on_ranks(f, 2, join=False, timeout=60), [0,0])

@pytest.mark.whole
@pytest.mark.parametrize('size', [2,3])
def test_export_and_load_behind_the_context(size):
    "Ranks read what rank 0 has written, however long that takes"
    def f(rank):
        learn = tabular()
        learn.path,learn.slow = Path('.'),SlowFile()
        with ctx(learn):
            learn.fit(1)
            learn.get_preds()
        learn.get_preds()
        learn.export('m.pkl')
        test_eq(weights(load_learner('m.pkl')), weights(learn))
        return True
    test_eq(on_ranks(f, size, join=False, timeout=60), [True]*size)

def exported_in_vain(rank, fname, dir):
    learn = wide() if fname=='m.pkl' else tabular()
    learn.path = Path(dir)
    with ctx(learn):
        learn.fit(1)
        before,old = dict(vars(learn)),weights(learn)
        err = caught(learn.export, fname)
        assert all(before[k] is v for k,v in vars(learn).items()) and before.keys()==vars(learn).keys()
        learn.fit(1)
    return err

@pytest.mark.whole
@pytest.mark.parametrize('fname,dir,why', [('full','/dev','No space left'), ('x.pkl','a_file','Not a directory'), ('x.pkl','missing','No such file'), ('a_dir','.','Is a directory')])
@pytest.mark.by_default('full', 'missing')
def test_an_export_that_fails_is_everybodys_error(fname, dir, why):
    Path('a_file').touch()
    Path('a_dir').mkdir()
    a,b = on_ranks(lambda rank: exported_in_vain(rank, fname, dir), join=False)
    test_eq(b[0], 'RankError')
    for _,msg in (a,b): assert why in msg
    test_eq(files(), ['a_dir','a_file'])
    assert not Path('/dev/full').is_file()

def test_no_folder_for_models():
    def f(rank):
        learn = digits(path='.', model_dir='a_file')
        with ctx(learn): return caught(learn.save, 'm')
    Path('a_file').touch()
    (a,x),(b,y) = on_ranks(f, join=False)
    test_eq((a,b), ('FileExistsError','RankError'))
    assert 'a_file' in x and 'a_file' in y

@pytest.mark.whole
def test_a_full_disk_in_a_fit():
    def f(rank):
        learn = wide(path='.')
        small_disk()
        with learn.no_bar(), learn.no_logging(): err = caught(fit_in_ctx, learn, SaveModelCallback())
        large_disk()
        with ctx(learn): learn.fit(1)
        return err,files('models'),dist.is_initialized()
    a,b = on_ranks(f, join=False)
    test_eq((a[0][0],b[0][0]), ('OSError','RankError'))
    for (_,msg),*rest in (a,b):
        assert 'File too large' in msg
        test_eq(rest, [[],False])

def fit_in_ctx(learn, *cbs):
    with learn.distrib_ctx(): learn.fit(1, cbs=list(cbs))

def test_one_process_with_a_full_disk():
    learn = wide(path='.')
    learn.save('m')
    small_disk()
    try:
        with pytest.raises(OSError, match='File too large'): shaken(learn).save('m')
    finally: large_disk()
    test_eq(files('models'), ['m.pth'])
    learn.load('m', with_opt=False)

def tracked(rank, **kw):
    set_seed(2)
    learn = digits(n=90, path='.')
    cb = SaveModelCallback(monitor='accuracy', **kw)
    with ctx(learn): learn.fit(3, 0.05, cbs=cb)
    return learn,str(cb.last_saved_path)

@pytest.mark.parametrize('size', [2,3])
def test_the_best_model(size):
    def f(rank):
        learn,path = tracked(rank, with_opt=True)
        return weights(learn),path
    (ws,path),*others = on_ranks(f, size, join=False)
    test_eq((path,files('models')), ('models/model.pth',['model.pth']))
    for o in others: test_eq(o, (ws,path))
    saved = torch.load(path, weights_only=False)
    test_eq(set(saved), {'model','opt'})
    test_eq(list(saved['model'].values()), ws)

@pytest.mark.whole
@pytest.mark.parametrize('kw,names', [(dict(every_epoch=True),['model_0.pth','model_1.pth','model_2.pth']), (dict(every_epoch=2, fname='e'),['e_0.pth','e_2.pth']),
    (dict(at_end=True, fname='end'),['end.pth'])])
@pytest.mark.by_default('kw0')
def test_each_epoch_and_the_end(kw, names):
    res = on_ranks(lambda rank: (tracked(rank, **kw)[1],files('models')), join=False)
    test_eq(res, [(f'models/{names[-1]}',names)]*2)

@pytest.mark.whole
def test_outside_a_context_nobody_waits():
    def f(rank):
        learn = tabular()
        learn.path = Path('.')
        if rank==0: learn.export('zero.pkl')
        if rank==1:
            learn.export('one.pkl')
            path = learn.save('one')
        else: path = learn.save('zero')
        return str(path)
    for join in (True,False): test_eq(on_ranks(f, 3, join=join), ['models/zero.pth','models/one.pth','models/zero.pth'])
    test_eq((files(),files('models')), (['models','zero.pkl'],['zero.pth']))

def over_tcp():
    "The ranks meet at MASTER_ADDR and MASTER_PORT, where rank 0 serves the store, as a launcher's do"
    os.environ.pop('FASTDIST_STORE')

def slowest_on_0(rank, f, *args):
    if rank==0: time.sleep(.2)
    f(*args)

def written_after(rank, n=2):
    "The first weights in files that are written and read after a context, `n` times"
    over_tcp()
    learn,tab,res = language_model(),tabular(),[]
    learn.path = tab.path = Path('.')
    with ctx(learn): learn.fit(1)
    for i in range(n):
        with torch.no_grad(): [p.fill_(i+1) for o in (learn,tab) for p in o.model.parameters()]
        for f,name in ((tab.export,'e.pkl'), (learn.save,'m'), (learn.save_encoder,'enc')): slowest_on_0(rank, f, name)
        for get in (lambda: load_learner('e.pkl'), lambda: shaken(learn).load_encoder('enc'), lambda: shaken(learn).load('m')):
            res.append(L(get().model.parameters())[0].unique().tolist())
    if rank: Path(f'done/{rank}').touch()
    else: await_that(lambda: len(files('done'))==2) # it serves the store
    return res

def test_after_a_context_ranks_read_what_rank_0_has_written():
    learn,tab = language_model(),tabular()
    learn.path = tab.path = Path('.')
    Path('done').mkdir()
    for f,name in ((tab.export,'e.pkl'), (learn.save,'m'), (learn.save_encoder,'enc')): f(name)
    test_eq(on_ranks(written_after, 3, join=False), [[[1.]]*3+[[2.]]*3]*3)

def read_in_vain(rank, how):
    "What a rank hears that reads after a context what rank 0 could not write"
    over_tcp()
    learn = wide(path='.')
    with ctx(learn): learn.fit(1)
    if rank==0 and how=='ended': return
    if rank==0: small_disk()
    err = caught(learn.save, 'm')
    large_disk()
    if rank:
        err = caught(learn.load, 'm')
        Path('done').touch()
    await_that(Path('done').exists)
    return err

@pytest.mark.parametrize('how,why', [('ended','ended before it wrote models/m.pth'), ('failed','File too large')])
@pytest.mark.by_default('failed')
def test_what_rank_0_could_not_write_is_read_by_nobody(how, why):
    digits(path='.').save('m')
    os.utime('models/m.pth', (0,0))
    _,(kind,msg) = on_ranks(lambda rank: read_in_vain(rank, how), join=False)
    test_eq(kind, 'RankError')
    assert why in msg, msg

def guarded(rank):
    "The first weights in files that rank 0 alone has written in a context, twice each, and all read"
    learn,tab,res = language_model(),tabular(),[]
    learn.path = tab.path = Path('.')
    with ctx(learn):
        for i,o in itertools.product(range(2), range(3)):
            with torch.no_grad(): [p.fill_(i+1) for o in (learn,tab) for p in o.model.parameters()]
            if rank==0: slowest_on_0(rank, *((tab.export,'e.pkl'), (learn.save,'m'), (learn.save_encoder,'enc'))[o])
            get = (lambda: load_learner('e.pkl'), lambda: shaken(learn).load('m'), lambda: shaken(learn).load_encoder('enc'))[o]
            res.append(L(get().model.parameters())[0].unique().tolist())
    return res

@pytest.mark.whole
@pytest.mark.replicas # one rank alone cannot write what is in shards
@pytest.mark.parametrize('size', [2,3,4])
def test_behind_a_guard(size):
    "A file that rank 0 alone writes in a context is what all ranks read, and not the one that was there before"
    learn,tab = language_model(),tabular()
    learn.path = tab.path = Path('.')
    for f,name in ((tab.export,'e.pkl'), (learn.save,'m'), (learn.save_encoder,'enc')): f(name)
    test_eq(on_ranks(guarded, size, join=False), [[[1.]]*3+[[2.]]*3]*size)

@pytest.mark.replicas # one rank alone cannot do it in shards
def test_rank_0_alone_inside():
    def f(rank):
        learn = digits(path='.')
        with ctx(learn):
            for _ in range(3):
                if rank==0: learn.save('mine')
            learn.save('ours')
            return Path('models/ours.pth').exists()
    test_eq(on_ranks(f, 3, join=False), [True]*3)

class Keeper(Callback):
    "Saves and loads on rank 0 alone"
    rank0_only = True
    def after_epoch(self): self.learn.save('kept')
    def after_fit(self): self.learn.load('kept')

@pytest.mark.whole
@pytest.mark.replicas # one rank alone cannot do it in shards
def test_a_callback_of_rank_0():
    def f(rank):
        learn = digits(n=90, path='.')
        with ctx(learn):
            learn.fit(2, 0.01, cbs=Keeper())
            learn.save('kept')
            learn.load('kept')
        return weights(learn)
    a,b = on_ranks(f, join=False)
    test_eq(a, b)

@pytest.mark.replicas # one rank alone cannot do it in shards
def test_loading_on_one_rank_does_not_wait():
    def f(rank):
        learn,text = digits(path='.'),language_model()
        text.path = Path('.')
        with ctx(learn), ctx(text):
            learn.save('m')
            text.save('t')
            text.save_encoder('enc')
            learn2 = tabular()
            learn2.path = Path('.')
            with ctx(learn2): learn2.export('e.pkl')
            if rank==1:
                old = weights(text)
                learn.load('m', with_opt=False)
                test_eq(weights(shaken(text).load('t')), old)
                test_eq(weights(shaken(text).load_encoder('enc'))[0], old[0])
                load_learner('e.pkl')
            dist.barrier()
            return True
    test_eq(on_ranks(f, join=False, timeout=100), [True]*2)

def test_loading_outside_waits_as_in_fastai():
    def f(rank):
        learn = digits(path='.')
        if rank==0:
            time.sleep(.5)
            learn.save('m')
        learn.load('m', with_opt=False)
        if rank==0: tabular().export(Path('e.pkl').absolute())
        load_learner('e.pkl')
        return True
    test_eq(on_ranks(f, 3), [True]*3)

class Own(nn.Module):
    "Has a part that is called `module`, which has one too"
    def __init__(self):
        super().__init__()
        self.module = nn.Sequential(nn.Linear(64,10), nn.BatchNorm1d(10))
        self.module.module = nn.Identity()
    def forward(self, x): return self.module[:2](x)

@pytest.mark.parametrize('model', [lambda: digits().model, Own], ids=['plain','own'])
@pytest.mark.parametrize('with_opt', [True,False])
def test_names_with_the_wrappers_prefix(model, with_opt):
    learn = digits(path='.')
    learn.model = model()
    fit(learn)
    old = weights(learn)
    state = DataParallel(learn.model).state_dict()
    assert all(k.startswith('module.') for k in state)
    Path('models').mkdir()
    torch.save({'model':state, 'opt':learn.opt.state_dict()} if with_opt else state, 'models/wrapped.pth')
    torch.save({'model':learn.model.state_dict(), 'opt':learn.opt.state_dict()} if with_opt else learn.model.state_dict(), 'models/bare.pth')
    for name in ('wrapped','bare'):
        test_eq(weights(shaken(learn).load(name, with_opt=with_opt, weights_only=False)), old)
        bare,learn.model = learn.model,DataParallel(shaken(learn).model)
        learn.load(name, with_opt=with_opt, weights_only=False)
        learn.save(f'{name}_again')
        learn.model = bare
        test_eq(weights(learn), old)
        test_eq(list(torch.load(f'models/{name}_again.pth', weights_only=False)['model']), list(bare.state_dict()))

def test_a_part_of_a_model():
    "`strict=False` goes on taking what fits, with the prefix and without"
    learn = digits(path='.')
    old = learn.model.state_dict()
    Path('models').mkdir()
    for name,prefix in (('bare',''),('wrapped','module.')):
        torch.save({prefix+k:v.clone() for k,v in old.items() if k.startswith('0.')} | {prefix+'other':tensor(1)}, f'models/{name}.pth')
        first = weights(learn)[0]
        shaken(learn).load(name, with_opt=False, strict=False)
        test_eq(weights(learn)[0], first)
        with pytest.raises(RuntimeError, match='Missing key'): learn.load(name, with_opt=False)

def test_text_with_the_prefix():
    learn = language_model()
    learn.path,old = Path('.'),weights(learn)
    Path('models').mkdir()
    torch.save(DataParallel(learn.model).state_dict(), 'models/t.pth')
    test_eq(weights(shaken(learn).load('t')), old)

def test_scripted_models():
    learn = digits(path='.')
    learn.model = torch.jit.script(learn.model)
    old = weights(learn)
    learn.save('m')
    test_eq(weights(shaken(learn).load('m', with_opt=False)), old)

plain = '''
import sys,warnings
warnings.filterwarnings('ignore')
sys.modules['fastdist'] = None
sys.path.insert(0, sys.argv[1])
from learners import *

def quiet(learn): return learn.no_logging(),learn.no_bar()

for name in ('after','during'):
    learn = load_learner(f'{name}.pkl')
    df = pd.DataFrame(dict(size=range(60), kind=list('xyz')*20, y=[0,1]*30))
    learn.dls = tabular().dls
    with learn.no_bar(): print(name, *learn.validate())
    a,b = quiet(learn)
    with a,b: learn.fit(1)
    assert learn.predict(df.iloc[0])[2].shape==(2,)
load_learner('vision.pkl').predict(PILImage.create(np.zeros((32,32,3), dtype=np.uint8)))
load_learner('text.pkl').predict('the movie', 2)

learn = digits(path='.')
learn.load('ours')
with learn.no_bar(): print('digits', *learn.validate())
learn.save('plain')
torch.save(nn.DataParallel(learn.model).state_dict(), 'models/wrapped.pth')
learn = tabular()
learn.path = Path('.')
a,b = quiet(learn)
with a,b: learn.fit(1)
learn.export('plain.pkl')
with learn.no_bar(): print('plain', *learn.validate())
'''

def to_be_read(rank):
    learn,tab,img,text = digits(path='.'),tabular(),vision(),language_model()
    learn.path = tab.path = img.path = text.path = Path('.')
    with ctx(learn), ctx(tab), ctx(img), ctx(text):
        learn.fit(1)
        learn.save('ours')
        tab.fit(1, cbs=Callback(after_epoch=lambda self: self.learn.export('during.pkl')))
        tab.export('after.pkl')
        img.export('vision.pkl')
        text.fit(1)
        text.export('text.pkl')
        return learn.validate(),tab.validate()

@pytest.mark.timeout(300)
def test_plain_fastai_reads_ours_and_we_read_its_own(warm):
    (digs,tab),_ = on_ranks(to_be_read, join=False, timeout=100)
    out,_ = warm(sys.executable, '-c', plain, here)
    told = {k:list(map(float, vals)) for k,*vals in map(str.split, filter(str.strip, out.splitlines())) if k in ('after','during','digits','plain')}
    for name,val in dict(after=tab, during=tab, digits=digs).items(): np.testing.assert_allclose(told[name], val, rtol=1e-4)
    def f(rank):
        learn = digits(path='.')
        with ctx(learn):
            for name in ('plain','wrapped'): np.testing.assert_allclose(shaken(learn).load(name, with_opt=name=='plain').validate(), digs, rtol=1e-4)
            return load_learner('plain.pkl').validate(dl=tabular().dls.valid)
    for o in on_ranks(f, join=False, timeout=100): np.testing.assert_allclose(o, told['plain'], rtol=1e-4)

@pytest.mark.whole
def test_the_same_bytes_as_fastai():
    learn = digits(path='.')
    fit(learn)
    for kw in (dict(), dict(with_opt=False), dict(pickle_protocol=4), dict(_use_new_zipfile_serialization=False)):
        a,b = io.BytesIO(),io.BytesIO()
        save_model(a, learn.model, learn.opt, **kw)
        assert learn.save(b, **kw) is b
        test_eq(a.getvalue(), b.getvalue())
        test_eq(learn.save('m', **kw).read_bytes(), a.getvalue())
        a.seek(0)
        old = weights(learn)
        test_eq(weights(shaken(learn).load(a, with_opt=False, weights_only=False)), old)

def test_open_files_on_ranks():
    def f(rank):
        learn,b = digits(path='.'),io.BytesIO()
        with ctx(learn):
            assert learn.save(b) is b
            return len(b.getvalue())>0
    test_eq(on_ranks(f, 3, join=False), [True,False,False])

def largest(p, y): return p.max()

def exported(rank, when):
    "A Learner that exports itself in the midst of a fit; one of its metrics is put together for each batch"
    set_seed(4)
    learn = tabular()
    learn.path,learn.metrics = Path('.'),[accuracy,largest]
    def save(self):
        before = dict(vars(self.learn))
        self.learn.export('e.pkl')
        assert all(before[k] is v for k,v in vars(self.learn).items()) and before.keys()==vars(self.learn).keys()
    with ctx(learn): learn.fit(2, 0.05, cbs=Callback(**{when:save}) if when else None)
    return weights(learn),learn.recorder.values

@cache
def not_exported(): return on_ranks(lambda rank: exported(rank, None), join=False)

@pytest.mark.whole
@pytest.mark.parametrize('when', ['before_fit','before_batch','after_pred','after_step','after_batch','after_train','before_validate','after_epoch','after_fit'])
@pytest.mark.by_default('before_batch')
def test_training_goes_on_after_an_export(when):
    for a,b in zip(not_exported(), on_ranks(lambda rank: exported(rank, when), join=False)): test_eq(a, b)
    assert b'fastdist' not in Path('e.pkl').read_bytes()
    learn = load_learner('e.pkl')
    test_eq((type(learn.model).__name__, learn.opt, learn.dl), ('TabularModel',None,None))
    assert not [m for m in learn.model.modules() if 'fastdist' in type(m).__module__]
    assert not [m for m in learn.metrics if 'accumulate' in vars(m)]
    learn.dls = tabular().dls
    fit(learn)

def test_export_keeps_the_optimizer():
    learn = tabular()
    learn.path = Path('.')
    learn.export()
    assert learn.opt is None
    fit(learn)
    opt,cbs,dls = learn.opt,learn.cbs,learn.dls
    learn.export(fname=Path('b.pkl'), pickle_protocol=4)
    assert learn.opt is opt and learn.cbs is cbs and learn.dls is dls
    assert load_learner('b.pkl').opt is None

def test_an_added_trainer_is_no_part_of_the_file():
    learn = tabular()
    learn.path = Path('.')
    learn.to_distributed(cpu=True).to_parallel()
    learn.export()
    assert b'fastdist' not in Path('export.pkl').read_bytes()
    test_eq(len(learn._grab_cbs(DistributedTrainer)), 1)
    learn.detach_distributed()

def test_links_and_modes_are_kept():
    learn = digits(path='.')
    Path('models').mkdir()
    Path('real.pth').touch()
    Path('real.pth').chmod(0o640)
    Path('models/link.pth').symlink_to(Path('real.pth').absolute())
    learn.save('link')
    assert Path('models/link.pth').is_symlink()
    test_eq(Path('real.pth').stat().st_mode & 0o777, 0o640)
    learn.load('link', with_opt=False)
    test_eq(learn.save('a.b').name, 'a.b.pth')
    mask = os.umask(0)
    os.umask(mask)
    test_eq(Path('models/a.b.pth').stat().st_mode & 0o777, 0o666 & ~mask)

def test_signatures_are_fastais():
    for cls,name in ((Learner,'save'),(Learner,'export'),(TextLearner,'save_encoder')):
        test_eq(*[list(inspect.signature(getattr(cls, o)).parameters) for o in (name,'_orig_'+name)])
    test_eq(list(inspect.signature(Learner.load).parameters), ['self','file','device','with_opt','strict'])
    test_eq(list(inspect.signature(TextLearner.load).parameters)[:4], ['self','file','with_opt','device'])
