"Files of Learners in shards: plain fastai reads them, and they read its own; nothing of the shards is left afterwards"
import io,os,pickle,pytest,types,warnings
from contextlib import nullcontext,suppress
from copy import deepcopy
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrizations import weight_norm
from accelerate.utils import FullyShardedDataParallelPlugin
from fastai.basics import *
from fastai.callback.all import *
from fastdist import *
from fastdist.comm.rank0 import only_rank0
from fastcore.test import test_eq
from learners import digits,language_model

@pytest.fixture(autouse=True)
def no_warnings():
    warnings.filterwarnings('ignore')
    yield

def ctx(learn, **kw): return ContextManagers([learn.distrib_ctx(**{'shard':True, **kw}), learn.no_logging(), learn.no_bar()])

def net(d=35, seed=0):
    "Tied weights, batch norm, and rows that neither two nor three ranks divide"
    torch.manual_seed(seed)
    m = nn.Sequential(nn.Linear(64,d), nn.BatchNorm1d(d), nn.ReLU(), nn.Sequential(nn.Linear(d,d), nn.Linear(d,d)), nn.Linear(d,10))
    m[3][1].weight = m[3][0].weight
    return m

def halves(m): return [[*m[0].parameters()],[*m[1:].parameters()]]

def net_learner(seed=0, **kw):
    learn = digits(n=120, path='.', splitter=halves, **kw)
    learn.model = net(seed=seed)
    return learn

def flat(o, k=''):
    "Name -> value of everything in a nest of dicts and lists; a tensor by its bits, its form and the bytes that a file has of it"
    if isinstance(o, dict): return {n:v for i,p in o.items() for n,v in flat(p, f'{k}.{i}').items()}
    if isinstance(o, (list,tuple,L)): return {n:v for i,p in enumerate(o) for n,v in flat(p, f'{k}.{i}').items()}
    return {k:(type(o), o.dtype, o.stride(), o.untyped_storage().nbytes(), o.tolist()) if isinstance(o, Tensor) else o}

def saved(learn, **kw):
    learn.save(b := io.BytesIO(), **kw)
    return b.getvalue()

opts = dict(sgd=partial(SGD, mom=.9), adam=Adam, ranger=ranger, wrapper=partial(OptimWrapper, opt=partial(torch.optim.AdamW, eps=1e-3)), lamb=Lamb)
made = dict(inside=noop, before=lambda o: o.create_opt(), frozen=lambda o: o.freeze())

def written(rank, opt, prepare):
    learn = net_learner(opt_func=opts[opt])
    made[prepare](learn)
    with ctx(learn):
        learn.save('none')
        learn.fit(1, 0.01, cbs=SaveModelCallback(fname='best', with_opt=True))
        inside = saved(learn),saved(learn, with_opt=False)
    return inside,(saved(learn),saved(learn, with_opt=False)),learn.model.state_dict()

@pytest.mark.whole
@pytest.mark.parametrize('opt,prepare,size', [('sgd','inside',3),('adam','frozen',2),('ranger','before',3),('wrapper','frozen',3)])
@pytest.mark.by_default('ranger')
def test_the_bytes_of_a_plain_save(opt, prepare, size):
    (inside,after,state),*others = on_ranks(lambda rank: written(rank, opt, prepare), size, join=False)
    assert inside==after and all(o[0]==(b'',b'') for o in others)
    learn = net_learner(seed=1, opt_func=opts[opt])
    made[prepare](learn)
    test_eq(flat(learn.load(io.BytesIO(inside[0]), weights_only=False).model.state_dict()), flat(state))
    fresh,none = flat(net().state_dict()),torch.load('models/none.pth', weights_only=False)
    test_eq(flat(none['model'] if 'model' in none else none), fresh)
    test_eq(flat(torch.load('models/best.pth', weights_only=False)), flat(torch.load(io.BytesIO(inside[0]), weights_only=False)))
    with learn.no_bar(),learn.no_logging(): learn.fit(1)
    plain = flat(torch.load(io.BytesIO(saved(learn)), weights_only=False))
    form = lambda o: {k:v[:4] if isinstance(v, tuple) else type(v) for k,v in o.items()}
    test_eq(form(flat(torch.load(io.BytesIO(inside[0]), weights_only=False))), form(plain))

def loaded(rank, opt, prepare, file):
    "Everything of `file` that ranks have after a load; and what a step on it gives"
    learn = net_learner(seed=5, opt_func=opts[opt])
    made[prepare](learn)
    with ctx(learn):
        if prepare=='before': learn.fit(1)
        test_eq(learn.load(file, weights_only=False), learn)
        state = [v for s in learn.opt.state.values() for v in s.values() if isinstance(v, Tensor)]
        held = max(getattr(o, '_local_tensor', o).untyped_storage().nbytes() for o in [*learn.model.parameters(), *state])
        there = saved(learn)
        learn.fit(1, 0.01)
    return there,held,saved(learn)

@pytest.mark.parametrize('opt,prepare,size', [('sgd','before',2),('wrapper','inside',3),('adam','frozen',2), *(pytest.param(*o, marks=pytest.mark.whole) for o in (('adam','inside',3),('ranger','before',2),('wrapper','before',2)))])
@pytest.mark.by_default('wrapper', 'frozen')
def test_a_plain_file_is_loaded(opt, prepare, size):
    learn = net_learner(opt_func=opts[opt])
    if prepare=='frozen': learn.freeze()
    with learn.no_bar(),learn.no_logging(): learn.fit(1, 0.01)
    learn.save('plain')
    want = flat(torch.load('models/plain.pth', weights_only=False))
    (there,held,after),*others = on_ranks(lambda rank: loaded(rank, opt, prepare, 'plain'), size, join=False)
    got = flat(torch.load(io.BytesIO(there), weights_only=False))
    test_eq(got.keys(), want.keys())
    for k,v in got.items(): test_eq(v, want[k])
    assert all(o[1]<=64*18*4 for o in others), others

def text(rank, what, size=None):
    "A language model whose encoder, or vocabulary and weights, come from files of one process"
    learn = language_model()
    learn.path = Path('.')
    if what=='made':
        learn.save_encoder('enc')
        learn.save('lm', with_opt=False)
        save_pickle('vocab.pkl', learn.dls.vocab[::-1])
        return
    for p in learn.model.parameters(): p.data.zero_()
    with ctx(learn) if size else nullcontext():
        if what=='encoder': learn.load_encoder('enc')
        elif what=='load': learn.load('lm')
        else: learn.load_pretrained('models/lm.pth', 'vocab.pkl')
        learn.save_encoder(f'again{what}')
        test_eq(learn.model.training, True)
    return flat(learn.model.state_dict()),flat(torch.load(f'models/again{what}.pth'))

@pytest.mark.whole
@pytest.mark.parametrize('what', ['encoder','load','pretrained'])
def test_text_files(what):
    text(0, 'made')
    want = text(0, what)
    for got in on_ranks(lambda rank: text(rank, what, 2), join=False): assert got==want

@pytest.mark.whole
def test_state_dicts_of_a_user():
    "Prefixed names, modules of the model, other sizes, `assign`, dtypes, rows that were unsharded by a forward pass"
    def f(rank):
        learn = net_learner()
        other,ps = net(seed=3),[*learn.model.parameters()]
        with ctx(learn):
            learn.model(torch.zeros(2,64))
            learn.model.load_state_dict({k:v.double() if v.ndim else v for k,v in other.state_dict().items()}, assign=rank>=0)
            learn.fit(1, 0.)
            learn.model[3][1].load_state_dict(net(seed=4)[3][1].state_dict())
            learn.model[4].load_state_dict({k:v+1 for k,v in learn.model[4].state_dict().items()})
            try: learn.model[0].load_state_dict(net(d=7)[0].state_dict())
            except RuntimeError as e: assert 'size mismatch for weight' in str(e)
            else: raise AssertionError
        assert all(a is b for a,b in zip(ps, learn.model.parameters()))
        test_eq(learn.model[0].weight, other[0].weight)
        test_eq(learn.model[3][0].weight, net(seed=4)[3][1].weight)
        test_eq(learn.model[4].bias, other[4].bias+1)
        lone = digits(n=60, path='.')
        lone.model = nn.Linear(64,10)
        with ctx(lone):
            torch.save({f'module.{k}':torch.ones_like(v) for k,v in nn.Linear(64,10).state_dict().items()}, b := io.BytesIO())
            b.seek(0)
            lone.load(b, with_opt=False)
        test_eq(lone.model.weight, torch.ones(10,64))
    on_ranks(f, 3, join=False)

class Positions(nn.Module):
    "Has a buffer that is in no file"
    def __init__(self, d):
        super().__init__()
        self.register_buffer('at', torch.linspace(0, 1, d), persistent=False)
    def forward(self, x): return x+self.at

def meta_learner(rank, real=False, **kw):
    set_seed(2)
    learn = digits(n=120, path='.', **kw)
    with torch.device('cpu' if real else 'meta'): learn.model = nn.Sequential(Positions(64), *net())
    return learn

def values(learn): return flat({**dict(learn.model.named_parameters()), **dict(learn.model.named_buffers())})

def test_rank_0_must_have_values():
    def f(rank):
        with ctx(meta_learner(rank)): pass
    def said(rank):
        try: f(rank)
        except ValueError as e: return str(e)
    for o in on_ranks(said, 3, join=False): assert 'got none for 1.weight, 1.bias, 2.weight and ' in o and 'on rank 0' in o, o

def test_rank_0_alone_has_values():
    def f(rank, alone):
        learn = meta_learner(rank, real=not (alone and rank))
        with ctx(learn, shard=False, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=True)): learn.fit(1, 0.01)
        return values(learn)
    a,b,c,d = *on_ranks(lambda rank: f(rank, True), join=False),*on_ranks(lambda rank: f(rank, False), join=False)
    assert a==b==c==d

def said(f):
    try: f()
    except Exception as e: return str(e)

@pytest.mark.parametrize('opt', ['ranger','wrapper'])
@pytest.mark.by_default('ranger')
def test_kept_in_shards(opt):
    def f(rank, keep, between=noop):
        set_seed(3)
        learn = net_learner(opt_func=opts[opt])
        ps,res = [*learn.model.parameters()],[]
        with ctx(learn, keep_sharded=keep): learn.fit(1, 0.01)
        outside = [lambda: learn.model(torch.zeros(1,64)), lambda: learn.validate(), lambda: learn.save('k'), lambda: learn.export('k.pkl'), lambda: learn.load('k')]
        if keep: res += map(said, outside)
        with ctx(learn, keep_sharded=keep):
            learn.fit(1, 0.01)
            if keep: learn.save('kept')
        if keep: assert all(isinstance(p, DTensor) for p in learn.model.parameters())
        with learn.distrib_ctx(shard=not keep),learn.no_bar(),learn.no_logging():
            test_eq(isinstance(learn.model[0].weight, DTensor), not keep)
            learn.fit(1, 0.01)
        assert all(a is b for a,b in zip(ps, learn.model.parameters())) and not 'kept_in_shards' in vars(learn)
        return values(learn),res
    kept,plain = on_ranks(lambda rank: f(rank, True), 3, join=False),on_ranks(lambda rank: f(rank, False), 3, join=False)
    for (a,why),(b,_) in zip(kept, plain):
        for k in a: np.testing.assert_allclose(a[k][-1], b[k][-1], atol=1e-5)
        assert all('outside of' in o and 'HINT: `with learn.distrib_ctx(shard=True)' in o for o in why), why

@pytest.mark.whole
def test_kept_by_other_ranks():
    def f(rank):
        learn = net_learner()
        with ctx(learn, keep_sharded=rank>=0): learn.fit(1)
        if rank==1: del learn.kept_in_shards
        why = said(lambda: ctx(learn).__enter__())
        return why
    assert all('kept in shards' in o for o in on_ranks(f, join=False))

class Saver(Callback):
    rank0_only = True
    def after_epoch(self): self.learn.save('x')

@pytest.mark.whole
def test_saving_on_rank_0_alone():
    def f(rank):
        learn = net_learner()
        with ctx(learn): return said(lambda: learn.fit(1, cbs=Saver()))
    a,b = on_ranks(f, join=False)
    assert all('rank 0 alone save or load a model in shards' in o for o in (a,b)), (a,b)

def reachable(o, seen, path='learn'):
    "Path -> object of everything that `o` holds: attributes, items, and what a partial or a method is bound to"
    if id(o) in seen or isinstance(o, (str,bytes,int,float,type(None),type,np.ndarray,pd.DataFrame)) or isinstance(o, types.ModuleType): return seen
    seen[id(o)] = path,o
    inner = list(o.items()) if isinstance(o, dict) else list(enumerate(o)) if isinstance(o, (list,tuple,set,L)) else []
    if isinstance(o, partial): inner += [('func',o.func),('args',o.args),('keywords',o.keywords)]
    if isinstance(o, types.MethodType): inner += [('self',o.__self__),('func',o.__func__)]
    if isinstance(o, types.FunctionType): inner += [(k, c.cell_contents) for k,c in enumerate(o.__closure__ or ()) if c!=types.CellType()]
    else: inner += getattr(o, '__dict__', {}).items()
    for k,v in inner: reachable(v, seen, f'{path}.{k}')
    return seen

def of_shards(o):
    "Whether `o` is something that a model in shards has: a class, a module, a hook or a tensor"
    names = [str(getattr(c, '__module__', '')) for c in (*type(o).__mro__, *((o,) if callable(o) else ()))]
    return isinstance(o, DTensor) or any(n.startswith(('torch.distributed','fastdist.shard','fastdist.parallel.norms')) for n in names)

def form(learn):
    m = learn.model
    own = lambda p: (id(p), type(p), p.requires_grad, p.stride(), p.dtype, p.device, p.untyped_storage().nbytes(), sorted(vars(p)))
    return ({n:(type(o), sorted(vars(o)), {k:len(v) for k,v in vars(o).items() if 'hooks' in k}) for n,o in m.named_modules()},
        {n:own(p) for n,p in m.named_parameters(remove_duplicate=False)},
        {n:(id(b), b.stride(), type(b)) for n,b in m.named_buffers()}, sorted(vars(learn)), [type(o) for o in learn.cbs],
        [[id(p) for p in ps] for ps in learn.opt.param_lists], sorted(vars(learn.opt)))

class Odd(nn.Module):
    "A convolution in channels_last, a parametrized weight, tied weights, a frozen parameter, one without dimensions, a user's hooks"
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 5, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm,self.lin,self.out = nn.BatchNorm2d(5),weight_norm(nn.Linear(320,7)),nn.Linear(7,7,bias=False)
        self.again,self.scale = nn.Linear(7,7,bias=False),nn.Parameter(torch.ones(()))
        self.again.weight = self.out.weight
        self.head = nn.Linear(7,10).requires_grad_(False)
        self.calls,_ = [],self.head.register_forward_hook(self.called)
    def called(self, *_): self.calls.append(1)
    def forward(self, x):
        x = self.norm(self.conv(x.view(-1,1,8,8).expand(-1,2,8,8))).flatten(1)
        return self.head(self.again(self.out(self.lin(x)))*self.scale)

def odd(opt=partial(SGD, mom=.9)):
    set_seed(1)
    learn = digits(n=120, path='.', opt_func=opt)
    learn.model = Odd()
    learn.create_opt()
    return learn

def cleaned(rank, how, learn):
    learn.path = Path('.')
    with learn.no_bar(),learn.no_logging(): learn.fit(1)
    before = form(learn)
    def fail(self): raise KeyError('mine')
    with suppress(KeyError,RankError), ctx(learn):
        learn.model.eval()
        learn.fit(1, 0.01, cbs=[SaveModelCallback(), CSVLogger()])
        if how=='loaded': learn.load('model')
        if not isinstance(learn.model, Odd): learn.export('inside.pkl')
        if how=='error': learn.fit(1, cbs=Callback(before_backward=fail if rank else noop))
    for a,b in zip(before, form(learn)): test_eq(b, a)
    left = {p:type(o) for p,o in reachable(learn, {}).values() if of_shards(o)}
    test_eq(left, {})
    deepcopy(learn.model)
    if isinstance(learn.model, Odd): pickle.dumps((learn.model.state_dict(), learn.opt.state_dict())) # torch pickles no parametrized module
    elif rank==0:
        pickle.dumps((learn.model, learn.opt.state_dict()))
        learn.export()
        assert not any(o in Path(f).read_bytes() for f in ('export.pkl','inside.pkl') for o in (b'fastdist',b'fsdp',b'DTensor'))
        test_eq(flat(load_learner('inside.pkl').model.state_dict()), flat(load_learner('export.pkl').model.state_dict()))
    with learn.no_bar(),learn.no_logging(): learn.fit(1)

@pytest.mark.parametrize('how', ['fitted','loaded','error'])
@pytest.mark.by_default('error')
def test_nothing_is_left(how): on_ranks(lambda rank: cleaned(rank, how, odd()), 3 if how=='fitted' else 2, join=False)

@pytest.mark.whole
def test_nothing_is_left_on_recurrent_models(): on_ranks(lambda rank: cleaned(rank, 'fitted', language_model()), join=False)

@pytest.mark.whole
@pytest.mark.replicas # it says itself what is in shards
def test_distributed_from_a_head(monkeypatch):
    "A Learner of the head is in shards on the ranks, and returns whole; in a function too"
    set_seed(4)
    plain = net_learner()
    set_seed(4)
    learn = net_learner()
    ps = [*learn.model.parameters()]
    kinds = Callback(after_fit=lambda self: Path(f'{this_world().rank}.txt').write_text(type(self.learn.model[0].weight).__name__))
    for o,fsdp in ((plain,False),(learn,True)):
        set_seed(5)
        if fsdp: monkeypatch.setenv('ACCELERATE_USE_FSDP', 'true')
        if fsdp: monkeypatch.setenv('FSDP_VERSION', '2')
        with o.no_bar(): Accelerator(nprocs=2, compute_setup='cpu').distribute(o.fit, start='fork')(1, 0.01, cbs=kinds)
        test_eq([Path(f'{i}.txt').read_text() for i in range(2)], ['DTensor' if fsdp else 'Parameter']*2)
    monkeypatch.undo()
    monkeypatch.chdir(os.getcwd())
    for a,b in zip(learn.model.state_dict().values(), plain.model.state_dict().values()): np.testing.assert_allclose(a, b, atol=1e-5)
    assert all(a is b for a,b in zip(ps, learn.model.parameters())) and len(learn.opt.state_dict()['state'][0]['grad_avg'])==35
    def f():
        set_seed(5)
        learn = net_learner()
        with ctx(learn): learn.fit(1, 0.01)
        return flat(learn.model.state_dict()),flat(learn.opt.state_dict()),learn.model
    res = Accelerator(nprocs=2, compute_setup='cpu').distribute(f, start='fork', all_ranks=True)()
    assert res[0][:2]==res[1][:2] and flat(res[0][2].state_dict())==res[0][0]
    saved(learn)

@pytest.mark.whole
@pytest.mark.parametrize('whole', [True,False])
@pytest.mark.by_default('False')
def test_the_type_of_a_state_dict(whole):
    "FULL_STATE_DICT: whole tensors on rank 0, nothing on others; SHARDED_STATE_DICT: rows. What saves and restores by itself, and a load, do not mind"
    def f(rank):
        set_seed(4)
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type='FULL_STATE_DICT' if whole else 'SHARDED_STATE_DICT')
        learn = net_learner()
        with learn.distrib_ctx(fsdp_plugin=plugin),learn.no_bar(),learn.no_logging():
            learn.lr_find(num_it=3, show_plot=False)
            learn.fit(1, 0.01, cbs=SaveModelCallback())
            state,part = learn.model.state_dict(),learn.model[3].state_dict()
            learn.load('model')
            only_rank0(torch.save, state, 'theirs.pth')
            learn.model.load_state_dict(torch.load('theirs.pth') if whole else state)
            test_eq(list(learn.model.state_dict()), list(state))
            learn.validate()
        return learn.model.state_dict(),state,part
    def check(now, state, part):
        assert flat(state)==flat(now) and state['3.0.weight'].data_ptr()==state['3.1.weight'].data_ptr()
        assert flat(part)=={k.replace('3.', ''):v for k,v in flat(now).items() if k.startswith('.3')}
    def g(rank):
        now,state,part = f(rank)
        if not whole: assert isinstance(state['0.weight'], DTensor) and state['0.weight'].to_local().shape[0]==(12 if rank<2 else 11)
        elif rank: test_eq((state,part), ({},{}))
        else: check(now, state, part)
    on_ranks(g, 3, join=False)

# Process groups

def left(rank):
    "Threads and descriptors of process groups that a context with shards has left"
    with ctx(net_learner()): pass # what torch opens once in a process, and keeps
    before,learn = len(os.listdir('/dev/fd')),net_learner()
    with ctx(learn): learn.fit(1, .01)
    return [o for o in Path('/proc/self/task').glob('*/comm') if 'gloo' in o.read_text()],len(os.listdir('/dev/fd'))-before

@pytest.mark.whole
@pytest.mark.parametrize('size', [2,3])
def test_no_process_group_is_left(size):
    "torch's caches hold meshes, and a thread of gloo that outlives its group may end the process when Python shuts down"
    test_eq(on_ranks(left, size, join=False), [([],0)]*size)
