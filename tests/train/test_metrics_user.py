"What a user's metrics and losses see, keep and steer on N ranks is what they see, keep and steer in one process"
from collections import Counter,defaultdict,deque
from fastcore.test import test_eq
from fastai.vision.all import *
from fastdist import *
from compare import *
from tasks import *

class Cleared(Metric):
    def __init__(self): self.all,self.n = [],0
    def reset(self): self.all.clear()
    def accumulate(self, learn): self.all.append(learn.pred.detach().max(1).values)
    value = property(lambda self: torch.cat(self.all).std())

class Zeroed(Metric):
    def __init__(self): self.of = dict(sums=np.zeros(3), n=torch.zeros(1))
    def reset(self):
        self.of['sums'][:] = 0
        self.of['n'].zero_()
    def accumulate(self, learn):
        self.of['sums'] += learn.pred.detach().sum(0).numpy()
        self.of['n'] += len(learn.y)
    value = property(lambda self: (self.of['sums']**2).sum()/self.of['n'].item())

class State:
    "A helper that resets itself in place, as torchmetrics' do"
    def __init__(self): self.rows,self.by,self.calls = [],dict(hits=torch.zeros(()),n=0),0
    def reset(self):
        del self.rows[:]
        self.by['hits'].zero_()
        self.by['n'] = 0
    def update(self, p, y):
        self.rows.append(p)
        self.by['hits'] += (p.argmax(1)==y).sum()
        self.by['n'] += len(y)
    def compute(self): return self.by['hits'].item()/self.by['n']+torch.cat(self.rows).std().item()

class Wrapped(Metric):
    def __init__(self): self.state = State()
    def reset(self): self.state.reset()
    def accumulate(self, learn): self.state.update(learn.pred.detach(), learn.y)
    value = property(lambda self: self.state.compute())

class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer('sums', torch.zeros(3))
    def forward(self, p): self.sums += p.sum(0)

class Module(Metric):
    def __init__(self): self.m = Buffers()
    def reset(self): self.m.sums.zero_()
    def accumulate(self, learn): self.m(learn.pred.detach())
    value = property(lambda self: self.m.sums.square().sum())

class Grown(Metric):
    def __init__(self): self.last,self.votes,self.of = deque(),Counter(),defaultdict(list)
    def reset(self): [o.clear() for o in (self.last,self.votes,self.of)]
    def accumulate(self, learn):
        self.votes.update(learn.y.tolist())
        for p,y in zip(learn.pred.max(1).values.tolist(), learn.y.tolist()):
            self.last.append(p)
            self.of[y].append(p)
    value = property(lambda self: sum(self.last)+self.votes[1]+np.mean([np.mean(o) for o in self.of.values()]))

class Slots(Metric):
    __slots__ = 'total','n'
    def reset(self): self.total,self.n = 0.,0
    def accumulate(self, learn): self.total,self.n = self.total+learn.pred.max(1).values.sum().item(),self.n+len(learn.y)
    value = property(lambda self: self.total/self.n)

class OfLosses(Metric):
    def reset(self): self.all = []
    def accumulate(self, learn): self.all.append(learn.loss.item())
    value = property(lambda self: np.mean(self.all))

class FirstHalf(Metric):
    "Looks at where the epoch is"
    def reset(self): self.total,self.at = 0.,[]
    def accumulate(self, learn):
        self.at.append((learn.iter,learn.n_iter,learn.epoch,learn.train_iter))
        if learn.iter<(learn.n_iter+1)//2: self.total += learn.pred.sum().item()
    value = property(lambda self: self.total+sum(map(sum, self.at)))

class Text(Metric):
    "What it keeps cannot be added up"
    def reset(self): self.text = ''
    def accumulate(self, learn): self.text += ''.join(map(str, learn.y.tolist()))
    value = property(lambda self: self.text)

class Locked(Metric):
    def __init__(self): self.lock,self.all = threading.Lock(),[]
    def reset(self): self.all.clear()
    def accumulate(self, learn):
        with self.lock: self.all += learn.y.tolist()
    value = property(lambda self: float(np.mean(self.all)))

class OnClass(Metric):
    all = []
    def reset(self): self.all.clear()
    def accumulate(self, learn): self.all.append(learn.pred.detach().max(1).values)
    value = property(lambda self: torch.cat(self.all).std())

class Masked(Callback):
    def before_batch(self): self.learn.mask = self.x[:,0]>0

class OfMasked(Metric):
    "Uses what a callback of the user's leaves at the Learner for the batch"
    def reset(self): self.all = []
    def accumulate(self, learn): self.all.append(learn.pred.detach()[learn.mask].amax(1))
    value = property(lambda self: torch.cat(self.all).std())

def in_closure():
    seen = []
    class Closure(Metric):
        def reset(self): seen.clear()
        def accumulate(self, learn): seen.append(learn.pred.detach().max(1).values)
        value = property(lambda self: torch.cat(seen).std())
    return Closure()

own = [Cleared, Zeroed, Wrapped, Module, Grown, Slots, OfLosses, FirstHalf, Text, Locked, OnClass, OfMasked, in_closure]

def masked(met, learn):
    learn.metrics = L(met())
    with learn.added_cbs(Masked()): return reports(learn, 2, True)

@pytest.mark.whole
def test_metrics_of_users(): check(partial(task, *tasks['classes']), 2, {o.__name__:partial(masked, o) for o in own}, [(37,4)], **exact)

def masked_together(learn):
    with learn.added_cbs(Masked()): return measured_together(own, True, learn)

@sizes
def test_metrics_of_users_together(size): check(partial(task, *tasks['classes']), size, dict(all=masked_together), [(37,4),(5,1)], **exact)

def weighted(n, bs, rank=0):
    set_seed(3)
    return learner((data(n, kinds),data(n, kinds, 1)), Shaped(3), bs, rank, CrossEntropyLossFlat(weight=tensor([1.,5.,.2])), drop_last=False)

@pytest.mark.whole
@sizes
def test_metrics_of_a_weighted_loss(size):
    check(weighted, size, {o.__name__:partial(measured, o, False) for o in (OfLosses,FirstHalf)}, [(37,4)], **exact)

def counted(kind, path='calls.txt'):
    "A metric that leaves a trace of each call, somewhere; and how many there are"
    n = SimpleNamespace(calls=0)
    def by_attr(p, y):
        by_attr.calls += 1
        return confident(p)
    by_attr.calls = 0
    def by_closure(p, y):
        n.calls += 1
        return confident(p)
    def by_file(p, y):
        with open(path, 'a') as f: f.write('x')
        return confident(p)
    class Own:
        calls,__name__ = 0,'own'
        def __call__(self, p, y):
            self.calls += 1
            return confident(p)
    own = Own()
    return dict(attr=(by_attr,lambda: by_attr.calls), closure=(by_closure,lambda: n.calls), own=(own,lambda: own.calls),
        file=(by_file,lambda: Path(path).stat().st_size))[kind]

def confident(p): return p.softmax(1).max(1).values.mean()

def calls(learn):
    res = {}
    for kind in ('attr','closure','own','file'):
        f,n = counted(kind, f'calls{rank_distrib()}.txt')
        learn.metrics = L(AvgMetric(f))
        learn.fit(2, 0.05)
        res[kind] = n(),[float(o) for o in learn.recorder.values[-1]]
        Path(f'calls{rank_distrib()}.txt').unlink(missing_ok=True)
    return res

@pytest.mark.whole
@sizes
def test_a_metric_is_called_as_often_as_in_one_process(size): check(partial(task, *tasks['classes'][:3], lambda n: []), size, dict(calls=calls), [(36,4)], **exact)

class LossWithCount:
    def __init__(self): self.calls,self.mean = 0,None
    def __call__(self, p, y):
        self.calls += 1
        loss = F.cross_entropy(p, y)
        self.mean = loss.item() if self.mean is None else .9*self.mean+.1*loss.item()
        return loss

class LossModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer('calls', torch.zeros(()))
    def forward(self, p, y):
        self.calls += 1
        return F.cross_entropy(p*self.scale, y)

def of_loss(mk, learn):
    learn.loss_func = f = mk()
    learn.fit(2, 0.05)
    return int(f.calls),learn.recorder.values

def loss_with_attr():
    def f(p, y):
        f.calls += 1
        return F.cross_entropy(p, y)
    f.calls = 0
    return f

def loss_with_noise():
    def f(p, y):
        f.calls += 1
        return F.cross_entropy(p, y)+0*torch.rand(())
    f.calls,f.reduction = 0,'mean'
    return f

@pytest.mark.whole
@sizes
@cases(**{o.__name__:partial(of_loss, o) for o in (LossWithCount,LossModule,loss_with_attr,loss_with_noise)})
def test_a_loss_is_called_as_often_as_in_one_process(cases, size): check(partial(task, *tasks['classes'][:3], lambda n: []), size, cases, [(36,4)], **exact)

class Moody(Metric):
    "Another number on each rank"
    def __init__(self): self.n = 0
    def accumulate(self, learn): pass
    value = property(lambda self: self._next())
    def _next(self):
        self.n += 1
        return [.5,.6,.4,.7][self.n%4] if not rank_distrib() else [.9,.1,.2,.1][self.n%4]

class Column(Callback):
    "Adds a number of its own to the record"
    order = 51
    def before_fit(self): self.recorder.metric_names = self.recorder.metric_names[:-1]+['mine','time']
    def after_validate(self): self.recorder.log += [float(self.epoch if rank_distrib() else -self.epoch)]

def steered(cbs, learn):
    learn.metrics = L(Moody())
    learn.fit(5, .1, cbs=cbs())
    weights,lr = [o.detach().clone() for o in learn.model.parameters()],learn.opt.hypers[0]['lr']
    return weights,lr,list(learn.recorder.values),list(learn.final_record),list(learn.validate())

def stops(): return EarlyStoppingCallback('moody')
def keeps_best(): return SaveModelCallback('moody', fname='best')
def lowers(): return ReduceLROnPlateau('moody', patience=2)
def by_column(): return [Column(),EarlyStoppingCallback('mine', patience=2)]

@pytest.mark.whole
@sizes
@cases(**{o.__name__:partial(steered, o) for o in (stops,keeps_best,lowers,by_column)})
def test_what_steers_is_the_same_on_all_ranks(cases, size): check(partial(task, *tasks['classes'][:3], lambda n: []), size, cases, [(37,4)], **exact)

class Late(Metric):
    "Says that its state adds up, and keeps what cannot be put together"
    merge = 'sum'
    def reset(self): self.total,self.seen = 0.,None
    def accumulate(self, learn):
        self.total += len(learn.y)
        if ((learn.x[:,0]>.6)&(learn.x[:,0]<1)).any(): self.seen = str(learn.x[0].tolist()) # not in the first batch, and other text on each rank
    value = property(lambda self: self.total)

class LateHelper(Late):
    def accumulate(self, learn):
        super().accumulate(learn)
        if self.seen: self.seen = deque([self.seen])

def said(rank, mk):
    learn = task(*tasks['classes'][:3], lambda n: [mk()], 37, 4, rank)
    with warnings.catch_warnings(record=True) as w, learn.distrib_ctx(), learn.no_bar(), learn.no_logging():
        warnings.simplefilter('always')
        learn.fit(3, .1)
    return [str(o.message) for o in w if 'ranks' in str(o.message)],[o[-1] for o in learn.recorder.values]

def test_what_differs_is_named_once_on_rank_0():
    (first,a),(other,b) = on_ranks(lambda rank: said(rank, Moody), 2, timeout=60, join=False)
    test_eq((len(first),other,b), (1,[],a))
    assert first[0].startswith('moody differs between ranks (0.6, 0.1)'), first

@pytest.mark.parametrize('mk', (Late,LateHelper))
def test_what_cannot_be_put_together_gets_whole_batches_later(mk):
    (first,a),(other,b) = on_ranks(lambda rank: said(rank, mk), 2, timeout=60, join=False)
    test_eq((len(first),other,a,b), (1,[],[19.,37.,37.],[19.,37.,37.]))
    assert 'late' in first[0] and 'seen' in first[0]

def summed(p, y): return F.cross_entropy(p, y, reduction='sum')

def with_sum(learn):
    learn.loss_func = summed
    learn.fit(2, 0.01)
    return [o.detach().clone() for o in learn.model.parameters()],learn.recorder.values

@sizes
def test_a_sum_is_found_with_one_sample_a_rank(size): check(partial(task, *tasks['classes'][:3], lambda n: []), size, dict(summed=with_sum), [(7,1)], **exact)

def shows_nothing(p, y): return 0*F.cross_entropy(p, y)

class FailsOnce(Callback):
    "Raises an error on the last rank in its first batch, while the others ask how the loss reduces"
    done = False
    def after_pred(self):
        if rank_distrib()==num_distrib()-1 and not self.done: raise ValueError('once')
        self.done = True

def fits_again(rank):
    learn = task(*tasks['classes'][:3], lambda n: [], 37, 4, rank)
    learn.loss_func = shows_nothing
    with learn.distrib_ctx(), learn.no_bar(), learn.no_logging():
        try: learn.fit(1, .01, cbs=FailsOnce())
        except (ValueError,RankError) as e: failed = 'once' in str(e)
        learn.fit(2, .01)
    return failed,[list(o) for o in learn.recorder.values]

@pytest.mark.whole
@sizes
def test_after_an_error_ranks_ask_together_again(size):
    "No batch shows how the loss reduces, so ranks ask again at batches that they count, all from the same one on"
    test_eq(on_ranks(fits_again, size, timeout=60, join=False), [(True,[[0.,0.]]*2)]*size)

class Replaces(Callback):
    "Has another loss for a while"
    def __init__(self, loss, begin='before_validate', end='after_validate', order=0): self.loss,self.begin,self.end,self.order = loss,begin,end,order
    def __call__(self, event_name):
        if self.training==(self.end=='after_loss train'): return
        if event_name==self.begin: self.old,self.learn.loss_func = self.learn.loss_func,self.loss
        if event_name==self.end.split()[0]: self.learn.loss_func = self.old

class Sets(Callback):
    "The same loss is a sum for a while"
    order = 0
    def before_validate(self): self.learn.loss_func.reduction = 'sum'
    def after_validate(self): self.learn.loss_func.reduction = 'mean'

total,ignoring,per_batch = CrossEntropyLossFlat(reduction='sum'),CrossEntropyLossFlat(ignore_index=0),('before_batch','after_loss')
overridden = dict(first=lambda: Replaces(total), last=lambda: Replaces(total, order=60), asked=lambda: Replaces(summed), counted=lambda: Replaces(ignoring),
    attribute=Sets, batches=lambda: Replaces(total, *per_batch), later=lambda: Replaces(total, 'before_batch', 'after_batch', 9), training=lambda: Replaces(total, 'before_batch', 'after_loss train'))

def with_overrides(cb, learn):
    learn.fit(2, .01, cbs=(cb := cb()))
    return [o.detach().clone() for o in learn.model.parameters()],list(learn.recorder.values),list(learn.validate(cbs=cb))

@pytest.mark.whole
@pytest.mark.parametrize('size', (2,3,4))
@cases(**{k:partial(with_overrides, v) for k,v in overridden.items()})
@pytest.mark.by_default('all-3')
def test_another_loss_for_a_while(cases, size):
    "A callback gives the Learner another loss, for evaluations or for batches, also where a rank has no samples"
    check(partial(task, *tasks['classes'][:3], lambda n: []), size, cases, [(37,12//size),(1,12//size)], rtol=1e-5, atol=1e-5)
