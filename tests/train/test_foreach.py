"fastai's optimizers over lists of tensors are fastai's optimizers, to the bit"
import pickle,pytest,torch
from contextlib import nullcontext
from copy import deepcopy
from hypothesis import given,strategies as st
from fastcore.test import test_eq
from torch.utils._python_dispatch import TorchDispatchMode
from fastai.basics import *
from fastai.callback.all import *
from fastai.optimizer import *
from fastdist import *
from fastdist.parallel.passes import each_step,local
from fastdist.parallel.foreach import *

l2 = dict(wd=.1, decouple_wd=False)
opts = dict(sgd=SGD, decay=partial(SGD, wd=.1), momentum=partial(SGD, mom=.9, wd=.1), l2=partial(SGD, mom=.9, **l2), rms=RMSProp)
opts |= dict(rms_mom=partial(RMSProp, mom=.9, wd=.1), adam=Adam, adam_l2=partial(Adam, **l2), qhadam=QHAdam, qhadam_2=partial(QHAdam, nu_2=.5, **l2))
opts |= dict(radam=partial(RAdam, wd=.1), sadam=partial(RAdam, beta=50.), radam_0=partial(RAdam, eps=0., sqr_mom=.9), ranger=partial(ranger, k=2))
opts |= dict(larc=partial(Larc, wd=.1), larc_wide=partial(Larc, trust_coeff=5.), lars=partial(Larc, clip=False, **l2), larc_0=partial(Larc, mom=0.))
opts |= dict(lamb=partial(Lamb, wd=.1), lamb_l2=partial(Lamb, **l2))
each = pytest.mark.parametrize('f', [pytest.param(f, id=k) for k,f in opts.items()])

def net(dtype=torch.float):
    "A convolution in channels last, norms without decay, odd sizes, a scalar and a parameter of zeros"
    set_seed(2)
    m = nn.ModuleList([nn.Conv2d(3,5,3), nn.BatchNorm2d(5), nn.Linear(7,11), nn.LayerNorm(11), nn.Linear(11,3)])
    m[0].to(memory_format=torch.channels_last)
    m.scale,m.zero = nn.Parameter(torch.tensor(.5)),nn.Parameter(torch.zeros(3))
    return m.to(dtype)

def groups(m): return [params(m[:2]),params(m[2:4]),[*m[4].parameters(),m.scale,m.zero]]

def made(f, m):
    opt = f(groups(m), lr=.01)
    for p in norm_bias_params(m): opt.state[p] = dict(do_wd=False)
    return opt

def grads(m, i):
    "Gradients of step `i`; some parameters have none, and those of frozen groups are zero where they had some"
    g = torch.Generator().manual_seed(i)
    for n,p in enumerate(m.parameters()):
        new = torch.randn(p.shape, generator=g).to(p.dtype)
        if p.requires_grad and (n+i)%5: p.grad = new if p.grad is None else p.grad.copy_(new)
        elif n==i: p.grad = None

def schedule(opt, i):
    if i in (0,9): opt.freeze_to(1)
    if i==3: opt.unfreeze()
    opt.set_hyper('lr', slice(1e-4*(i+1), 1e-2))
    if 'mom' in opt.hypers[0]: opt.set_hyper('mom', .9-.01*i)
    if i==7: opt.set_hyper('wd', 0.)

def run(f, overridden, n=12, dtype=torch.float, change=noop):
    m = net(dtype)
    opt = made(f, m)
    for i in range(n):
        schedule(opt, i)
        grads(m, i)
        opt = change(opt, i) or opt
        with lists_ctx(opt) if overridden(i) else nullcontext():
            opt.step()
            if i%2: opt.zero_grad()
    return m,opt

def flat(o): return [flat(x) for x in (sorted(o.items()) if isinstance(o, dict) else o)] if isinstance(o, (dict,list,tuple,L)) else o

def same(a, b):
    "Numbers, their types and the bits of tensors"
    if isinstance(a, list): return isinstance(b, list) and len(a)==len(b) and all(map(same, a, b))
    bits = lambda o: o.detach().nan_to_num(7.)
    if isinstance(a, Tensor): return isinstance(b, Tensor) and a.dtype==b.dtype and a.stride()==b.stride() and torch.equal(bits(a), bits(b))
    return type(a)==type(b) and a==b

def held(m, opt): return flat([list(m.parameters()), [p.grad for p in m.parameters()], opt.state_dict()])
def compare(a, b): assert same(held(*a), held(*b))

never,always = (lambda i: False),(lambda i: True)

@each
def test_to_the_bit(f): compare(run(f, never), run(f, always))

class Count(TorchDispatchMode):
    "Counts operations"
    n = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += func.overloadpacket is not torch.ops.aten.detach # an alias, `p.data`
        return func(*args, **(kwargs or {}))

known = {k:f for k,f in opts.items() if k[:2] not in ('la','qh')}

@pytest.mark.parametrize('f', [f for k,f in known.items() if k[:2] not in ('sa','ra')])
def test_operations_are_as_many_for_any_number(f):
    def count(n):
        ps = [nn.Parameter(torch.ones(3)) for _ in range(n)]
        for p in ps: p.grad = torch.ones(3)
        opt = override_lists(f(ps, lr=.1))
        opt.step()
        with Count() as count:
            opt.step()
            opt.zero_grad()
        return count.n
    test_eq(count(3), count(30))

@pytest.mark.parametrize('f', known.values(), ids=known.keys())
def test_nothing_is_read(f):
    "On a device that has no numbers, reading one is an error"
    ps = [nn.Parameter(torch.ones(3, device='meta')) for _ in range(3)]
    for p in ps: p.grad = torch.ones_like(p)
    opt = override_lists(f(ps, lr=.1))
    for _ in range(8):
        opt.step()
        opt.zero_grad()

@each
@pytest.mark.parametrize('dtype', (torch.float64,torch.bfloat16,torch.half))
def test_other_types(f, dtype): compare(run(f, never, dtype=dtype), run(f, always, dtype=dtype))

def reloaded(opt, i):
    "At some steps another optimizer loads the state, and one of them is cleared"
    if i==5: opt.load_state_dict(deepcopy(opt.state_dict()))
    if i==9: opt.clear_state()

@each
def test_in_turn(f): compare(run(f, never, change=reloaded), run(f, lambda i: i%3>0, change=reloaded))

mixed = [torch.float,torch.half,torch.bfloat16,torch.float64,torch.complex64]
def test_mixed_types(f=Adam):
    def made(step):
        set_seed(1)
        ps = [nn.Parameter(torch.randn(4, dtype=mixed[i%5])) for i in range(15)]
        opt = f(ps, lr=.1)
        with lists_ctx(opt) if step else nullcontext():
            for i in range(3):
                for p in ps: p.grad = torch.randn(4, dtype=p.dtype)
                opt.step()
        return ps,opt.state_dict()
    assert same(*[flat(made(o)) for o in (False,True)])

def keeps_graph(p):
    "One gradient with a graph, one that is sparse, one of zeros"
    (p[0]**3).sum().backward(create_graph=True)
    F.embedding(tensor([1,1,2]), p[1], sparse=True).sum().backward()
    p[2].grad = torch.zeros(3)

@pytest.mark.parametrize('f', (SGD,partial(SGD, wd=.1),Larc,Lamb))
def test_odd_gradients(f):
    def made(overridden):
        set_seed(1)
        ps = [nn.Parameter(torch.randn(3, *s)) for s in ((),(2,),())]
        opts = [f(ps[::2], lr=.1),SGD(ps[1:2], lr=.1)]
        keeps_graph(ps)
        for opt in opts:
            if overridden: override_lists(opt)
            opt.step()
            opt.zero_grad()
        assert not any(p.grad.requires_grad for p in ps)
        return [p.detach() for p in ps],[p.grad.to_dense() for p in ps],opts[0].state_dict()
    assert same(*[flat(made(o)) for o in (False,True)])

def test_a_graph_outlives_a_step():
    "fastai changes `p.data`, so that a backward pass may follow, as in a GAN"
    p = nn.Parameter(torch.ones(2))
    loss,p.grad,opt = (p*p).sum(),torch.ones(2),override_lists(Adam([p], lr=.1))
    opt.step()
    loss.backward()

def test_parts():
    "Of many tensors, and of one that is larger than a part"
    def made(overridden):
        set_seed(1)
        ps = [nn.Parameter(torch.randn(n)) for n in [0,300_000,1,7,600_000,5,200_000,0]+[1000]*9]
        opt = Adam([ps[:10],ps[10:]], lr=.1)
        if overridden: override_lists(opt)
        for i in range(2):
            for p in ps: p.grad = p.detach()**2
            opt.step()
        return [p.detach() for p in ps],opt.state_dict()
    assert same(*[flat(made(o)) for o in (False,True)])

def rows(rank, f):
    "A model in shards: whether its optimizer is known, how many parameters step by themselves, and the shape of a state"
    set_seed(1)
    data = [(torch.randn(8),i%3) for i in range(12)]
    learn = Learner(DataLoaders.from_dsets(data, data, bs=3, num_workers=0, device='cpu'), nn.Linear(8,3), loss_func=CrossEntropyLossFlat(), opt_func=f)
    with learn.distrib_ctx(shard=True), learn.no_bar(), learn.no_logging():
        learn.fit(1)
        o = learn.opt.step.__self__
        return o.known,o.known and len(o.single[0]),local(learn.opt.state[learn.opt.param_lists[0][0]]['grad_avg']).shape

@pytest.mark.replicas
def test_rows():
    "Of a model in shards step in lists where each element is treated by itself"
    for f,known in ((Adam,True),(Lamb,False)): test_eq(on_ranks(partial(rows, f=f), timeout=60), [(known,0,(n,8)) for n in (2,1)])

# What is not known

def unknown(p, lr, **kw): p.data.sub_(lr)

def append(opt, i):
    if i==4: opts_in(opt)[-1].cbs.append(unknown)
    if i==8: opts_in(opt)[-1].cbs.pop()

@pytest.mark.parametrize('f', (SGD,Adam,ranger))
def test_a_function_comes_and_goes(f):
    def ran(overridden):
        m = net()
        opt = made(f, m)
        if overridden: override_lists(opt)
        for i in range(12):
            grads(m, i)
            append(opt, i)
            opt.step()
        return m,opt
    compare(*[[m,return_lists(opt)] for m,opt in map(ran, (False,True))])

class Mine(Optimizer):
    def step(self, closure=None): self.mine = True

@pytest.mark.parametrize('mk', (lambda p: Mine(p, sgd_step, lr=.1), lambda p: Optimizer(p, [weight_decay,unknown], lr=.1),
    lambda p: OptimWrapper(p, torch.optim.SGD, lr=.1), lambda p: Optimizer(p, partial(average_grad, grad_avg=torch.ones(2)), mom=.9)))
def test_left_alone(mk):
    opt = mk([nn.Parameter(torch.ones(2))])
    before = dict(vars(opt))
    with lists_ctx(opt): assert vars(opt)==before and not steps_as_lists(opt)

@pytest.mark.parametrize('hyper', (dict(lr=tensor(.1)),dict(grad_avg=None),dict(lr=.1, dampening=True),dict(lr=np.float64(.1))))
def test_other_hypers(hyper):
    def made(overridden):
        p = nn.Parameter(torch.ones(2))
        opt = SGD([p], lr=.1, mom=.9)
        opt.hypers[0].update(hyper)
        if overridden: override_lists(opt)
        for i in range(3):
            p.grad = torch.ones(2)*i
            try: opt.step()
            except Exception as e: return type(e)
        return p.detach(),opt.state[p]['grad_avg']
    assert same(*[flat(made(o)) for o in (False,True)])

def test_twice_the_same_parameter():
    def made(overridden):
        p = nn.Parameter(torch.ones(2))
        q,p.grad = nn.Parameter(p.data),torch.ones(2)
        q.grad = torch.ones(2)
        res = []
        for ps in ([p,p],[p,q]):
            opt = Adam(ps, lr=.1, wd=.1)
            if overridden: override_lists(opt)
            opt.step()
            res += [p.detach().clone(),opt.state[p]['step']]
        return res
    assert same(*[flat(made(o)) for o in (False,True)])

def test_someones_own_step():
    p = nn.Parameter(torch.ones(2))
    opt,calls = SGD([p], lr=.1),[]
    opt.step = lambda: calls.append(1)
    before = dict(vars(opt))
    with lists_ctx(opt):
        assert vars(opt)==before
        opt.step()
    test_eq((vars(opt)==before, calls), (True, [1]))

def test_someone_within():
    "A step that somebody puts in the place of ours stays, and ours, where it was kept, steps as before"
    p = nn.Parameter(torch.ones(2))
    opt = override_lists(SGD([p], lr=.1))
    kept = opt.step
    opt.step = mine = lambda: kept()
    return_lists(opt)
    test_eq({'zero_grad','__getstate__'} & vars(opt).keys(), set())
    p.grad = torch.ones(2)
    opt.step()
    assert opt.step is mine and p[0]<1

@pytest.mark.parametrize('f', (SGD,Adam,ranger))
def test_no_trace(f):
    opt = made(f, net())
    before = [dict(vars(o)) for o in opts_in(opt)]
    with pytest.raises(KeyError), lists_ctx(opt):
        assert all('zero_grad' in vars(o) for o in opts_in(opt))
        with each_step(opt, noop): raise KeyError
    test_eq([vars(o)==b for o,b in zip(opts_in(opt), before)], [True]*len(before))

@pytest.mark.parametrize('f', (SGD,Adam,ranger))
@pytest.mark.parametrize('copied', (deepcopy,lambda o: pickle.loads(pickle.dumps(o)),lambda o: pickle.loads(pickle.dumps(o, 2))))
def test_copies(f, copied):
    "Of an optimizer that has lists are those of one that has none"
    m,opt = run(f, always, n=3)
    keys = [vars(o).keys()-{'cbs'} for o in opts_in(opt)]
    with lists_ctx(opt):
        opt.step()
        assert b'fastdist' not in pickle.dumps(opt)
        new = copied(opt)
        test_eq([vars(o).keys()-{'cbs'} for o in opts_in(new)], keys)
        assert same(flat(new.state_dict()), flat(opt.state_dict()))
        for ps,qs in zip(new.param_lists, opt.param_lists):
            for p,q in zip(ps, qs): p.grad = None if q.grad is None else q.grad.clone()
        new.step()
        opt.step()
    assert same(flat(new.state_dict()), flat(opt.state_dict()))

def test_a_closure():
    opt = override_lists(SGD([nn.Parameter(torch.ones(2))], lr=.1))
    with pytest.raises(NotImplementedError): opt.step(noop)

class Override(Callback):
    "Copies and exports in the midst of a fit"
    def before_fit(self): override_lists(self.opt)
    def after_batch(self):
        if not self.training or self.iter!=1: return
        deepcopy(self.opt)
        self.learn.save('between')
        self.learn.export()
    def after_fit(self): return_lists(self.opt)

class Data(list):
    def new_empty(self): return Data()

class Thaw(Callback):
    def before_batch(self):
        if self.iter==2: self.learn.unfreeze()

def halves(m): return L(m[:2],m[2:]).map(params)

@each
def test_a_fit(f, tmp_path):
    def fitted(*cbs):
        set_seed(3)
        data = Data((torch.randn(8),i%3) for i in range(30))
        dls = DataLoaders.from_dsets(data, Data(data[:9]), bs=6, num_workers=0, device='cpu')
        m = nn.Sequential(nn.Linear(8,6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6,3))
        learn = Learner(dls, m, loss_func=CrossEntropyLossFlat(), opt_func=f, splitter=halves, wd_bn_bias=False, path=tmp_path, cbs=[Thaw(),*cbs])
        learn.freeze()
        with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(2, slice(.001,.01), cbs=GradientClip(.1))
        return learn.model,learn.opt
    compare(fitted(), fitted(Override()))

shapes = st.lists(st.tuples(st.sampled_from([(),(3,),(2,5),(1000,)]), st.integers(0, 2), st.booleans()), min_size=1, max_size=9)
@given(shapes, st.sampled_from(list(opts.values())), st.lists(st.integers(0, 511), min_size=1, max_size=8))
def test_whatever_has_a_gradient(shapes, f, live):
    "Parameters in up to three groups, with or without weight decay; of which each step gives some a gradient"
    def made(overridden):
        set_seed(0)
        ps = [nn.Parameter(torch.randn(s)) for s,*_ in shapes]
        lists = [[p for p,(_,g,_) in zip(ps, shapes) if g==i] for i in range(3)]
        opt = f([o for o in lists if o], lr=.01)
        for p,(*_,decay) in zip(ps, shapes): opt.state[p] = {} if decay else dict(do_wd=False)
        if overridden: override_lists(opt)
        for bits in live:
            for i,p in enumerate(ps): p.grad = torch.randn(p.shape) if bits>>i&1 else None
            opt.step()
        return [p.detach() for p in ps],opt.state_dict()
    assert same(*[flat(made(o)) for o in (False,True)])
