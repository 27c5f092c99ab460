"What callbacks, modules and the loss hold beside the model is compared at the end of an epoch's training, and named where ranks differ"
import re,time,warnings,pytest
from collections import Counter,deque
from fastcore.test import test_eq
from fastai.basics import *
from fastdist import *
from fastai.callback.data import CollectDataCallback
from fastdist.launch.fork import *
from fastdist.comm.collectives import gather_objs
from collectives import counting

class Critic(Callback):
    "A second model with an optimizer of its own"
    averages = False
    def __init__(self): self.net,self.steps = nn.Linear(3,1),0
    def before_fit(self): self.opt_c = torch.optim.Adam(self.net.parameters(), .1)
    def after_pred(self):
        if not self.training: return
        self.opt_c.zero_grad()
        self.net(self.x).square().mean().backward()
        if self.averages: self._average()
        self.opt_c.step()
        self.steps += 1
    def _average(self):
        for p in self.net.parameters(): p.grad /= num_distrib()*(1 if torch.distributed.all_reduce(p.grad) else 1)

class Averaged(Critic): averages = True

critic = nn.Linear(3,1)
class OfScript(Callback):
    "Trains a critic that is a global of the script"
    def before_fit(self): self.oc = torch.optim.SGD(critic.parameters(), .1)
    def after_pred(self):
        if not self.training: return
        self.oc.zero_grad()
        critic(self.x).square().mean().backward()
        self.oc.step()

class Hard(Callback):
    "How many examples of the rank were hard, by whatever name, and its loss of the last batch"
    def __init__(self): self._seconds,self.last_members = 0,torch.tensor(0)
    def after_batch(self):
        n = ((self.pred-self.y).abs().flatten()>.8).sum()
        self._seconds += int(n)
        self.last_members = self.last_members+n

class Counts(Callback):
    "Hits and hard examples of the rank, and its losses"
    def __init__(self): self.hits,self.hard,self.losses = 0,[],[]
    def after_loss(self): self.losses.append(self.loss.item())
    def after_batch(self):
        err = (self.pred-self.y).abs().flatten()
        self.hits += (err<.5).sum().item()
        self.hard += self.x[err>.8,0].tolist()

class Centred(nn.Module):
    "Moves a centre along with its inputs, and shows the features of the last batch"
    def __init__(self):
        super().__init__()
        self.lin,self.center = nn.Linear(3,1),torch.zeros(3)
    def forward(self, x):
        self.feats = x.detach()
        self.center = .9*self.center+.1*x.mean(0)
        return self.lin(x)

class Drawn(nn.Module):
    "A direction that each rank draws by itself when it is made"
    def __init__(self):
        super().__init__()
        (g := torch.Generator()).seed()
        self.lin,self.towards = nn.Linear(3,1),torch.randn(4, generator=g) # as many as a batch has samples
    def forward(self, x): return self.lin(x)*self.towards.mean()

class Skips(Callback):
    "Leaves batches out that are too hard"
    def after_loss(self):
        if self.training and self.loss>1.: raise CancelBatchException
class SkipsTogether(Callback):
    "Leaves steps out by a loss that all ranks have"
    def before_step(self):
        if self.loss>1.: raise CancelStepException

class Quiet(Callback):
    "What is everybody's, what is of the last batch, and what is a rank's own by its name, by the clock, by a draw or for a collective"
    def __init__(self): self.losses,self.n,self.seconds,self.lams,self.total,self._mine,self.rank,self.best = [],0,0.,[],0.,0,rank_distrib(),None
    def before_batch(self): self.t0,self.last = time.perf_counter(),self.x.mean().item()
    def before_fit(self): self.lams.append(np.random.rand())
    def after_loss(self): self.own = self.loss.item()
    def after_batch(self):
        self.losses.append(self.loss.item())
        self.n += 1
        self.best = min(self.loss.item(), self.best or 9)
        self._mine += self.pred.sum().item()
    def after_step(self): self._add(time.perf_counter()-self.t0)
    def _add(self, s): self.seconds += s
    def after_cancel_batch(self): self.total += self.pred.sum().item()
    def after_epoch(self): torch.distributed.all_reduce(tensor(self.total))

class Agrees(Quiet):
    "What is everybody's, without the number of the rank"
    def __init__(self):
        super().__init__()
        del self.rank

class Features(Callback):
    def after_pred(self): self.acts = self.pred
    def before_epoch(self): self.start = time.time()

class Average(Callback):
    "A moving average of the weights"
    def before_fit(self): self.avg = deepcopy(self.model)
    def after_step(self):
        for a,p in zip(self.avg.parameters(), self.model.parameters()): a.data.lerp_(p.data, .1)

def learner(*cbs, model=None, bs=4, n_valid=8, **kw):
    set_seed(3)
    data = [(torch.randn(3), torch.randn(1)) for _ in range(36+n_valid)]
    dls = DataLoaders.from_dsets(data[:36], data[36:], bs=bs, num_workers=0, device='cpu')
    return Learner(dls, model or nn.Linear(3,1), loss_func=MSELossFlat(), cbs=[o() for o in cbs], **kw)

def told(*cbs, model=None, epochs=2, begin='Ranks differ in ', **kw):
    "The warnings of a fit that begin so, by default about what differs"
    learn = learner(*cbs, model=model and model())
    with warnings.catch_warnings(record=True) as ws, learn.no_bar(), learn.no_logging(), learn.distrib_ctx(**kw):
        warnings.simplefilter('always')
        learn.fit(epochs, 1e-2)
    return [str(w.message).removeprefix(begin) for w in ws if str(w.message).startswith(begin)]

ways = pytest.mark.parametrize('n,shard', [(2,False),(3,False),(2,True)])

@ways
@pytest.mark.by_default('3-False')
def test_critic(n, shard):
    "A critic with gradients of its rank is named, with its optimizer; one with averaged gradients is not"
    first,*others = on_ranks(lambda rank: told(Critic, shard=shard), n)
    opt,net = sorted(first, key=lambda o: o.startswith('Critic.net'))
    assert opt.startswith('Critic.opt_c optimizer state of parameter 0 of the optimizer: ') and net.startswith('Critic.net.weight (test_attributes.py:') and not any(others), (first,others)
    assert 'from rank 0' in net and 'in 3 of 3 elements by up to' in net and 'average its gradients before its step' in net
    assert on_ranks(lambda rank: told(Averaged, *([] if shard else [Average]), shard=shard), n)==[[]]*n

@ways
@pytest.mark.by_default('3-False')
def test_counts(n, shard):
    "Counts of a rank's samples, and lists that grow by them, are named once with both values"
    first,*others = on_ranks(lambda rank: told(Counts, shard=shard), n)
    assert {o.split()[0] for o in first}=={'Counts.hits','Counts.hard'} and len(first)==2 and not any(others), (first,others)
    assert all('HINT: let what is counted be a metric' in o and 'epoch 0' in o for o in first), first

def test_counts_beside_desync_check():
    first,*_ = on_ranks(lambda rank: told(Counts, partial(DesyncCheck, 2)), 2)
    assert {o.split()[0] for o in first}=={'Counts.hits','Counts.hard'}, first

@ways
@pytest.mark.by_default('2-False')
def test_critic_of_the_script(n, shard):
    "A critic that no callback holds is found by the optimizer that trains it"
    first,*others = on_ranks(lambda rank: told(OfScript, shard=shard), n)
    assert first[0].startswith('OfScript.oc parameter 0 of the optimizer (test_attributes.py:') and len(first)==1 and 'average its gradients' in first[0] and not any(others), (first,others)

@ways
@pytest.mark.by_default('3-False')
def test_hard_examples(n, shard):
    "A count is named whatever it is called, as a whole number and as a tensor"
    first,*others = on_ranks(lambda rank: told(Hard, shard=shard), n)
    assert {o.split()[0] for o in first}=={'Hard._seconds','Hard.last_members'} and len(first)==2 and not any(others), (first,others)

@ways
@pytest.mark.by_default('2-True')
def test_module(n, shard):
    "A centre that a module moves along is named, the features of the last batch are not"
    first,*others = on_ranks(lambda rank: told(model=lambda: nn.Sequential(Centred()), shard=shard), n)
    assert [o.split()[0] for o in first]==['model.0.center'] and not any(others), (first,others)

@ways
@pytest.mark.by_default('3-False')
def test_drawn(n, shard):
    "What each rank draws when a module is made is named, also where it has the size of a batch"
    first,*others = on_ranks(lambda rank: told(model=Drawn, shard=shard), n)
    assert [o.split()[0] for o in first]==['model.towards'] and 'or has drawn it' in first[0] and not any(others), (first,others)

@ways
@pytest.mark.by_default('2-False')
def test_skips(n, shard):
    "A callback that leaves batches out by the loss of its rank is named with the batches; what all ranks decide alike is not"
    first,*others = on_ranks(lambda rank: told(Skips, shard=shard), n)
    assert len(first)==1 and first[0].startswith('the batches that Skips cancels in after_loss (test_attributes.py:') and 'Each rank decides by its own samples' in first[0] and not any(others), (first,others)
    assert on_ranks(lambda rank: told(SkipsTogether, shard=shard), n)==[[]]*n

class EndsFit(Callback):
    "Ends the fit by the loss of the samples of one rank"
    def after_loss(self):
        if self.training and self.iter==2 and this_world().rank==1: raise CancelFitException
class EndsEpoch(Callback):
    "Ends each epoch by it"
    def after_loss(self):
        if self.training and self.iter==2 and this_world().rank==1: raise CancelEpochException

@ways
@pytest.mark.parametrize('ends', [EndsFit,EndsEpoch])
def test_ends(n, shard, ends):
    "So is one that ends an epoch or the fit by it"
    first,*others = on_ranks(lambda rank: told(ends, shard=shard), n)
    assert len(first)==1 and first[0].startswith(f'the batches that {ends.__name__} cancels in after_loss (test_attributes.py:') and not any(others), (first,others)

@ways
@pytest.mark.by_default('3-False', '2-True')
def test_silent(n, shard):
    "What is the same on all ranks, or a rank's own, is not named"
    assert on_ranks(lambda rank: told(Quiet, Features, *([] if shard else [Average]), shard=shard), n)==[[]]*n

def _ran(rank, *cbs, **kw):
    with counting() as ran: told(*cbs, **kw)
    return ran

@pytest.mark.whole
@pytest.mark.replicas # it averages weights, which shards refuse
def test_cost():
    "What agrees travels in the collective that compares the model; what was told of is not compared again"
    cases = ([],2),([Agrees,Average],2),([],4),([Counts],2),([Counts],4)
    plain,held,longer,named,longer_named = [on_ranks(lambda rank: _ran(rank, *cbs, epochs=n), join=False)[0] for cbs,n in cases]
    test_eq(held-plain, Counter({'c10d::allreduce_':2})) # of Quiet, one an epoch
    test_eq(longer_named-named, longer-plain)

class CountsSamples(Callback):
    "Samples and batches of a rank, and numbers that do not grow by them"
    def before_fit(self): self.n,self.seen,self.steps,self.size = 0,tensor(0),0,12
    def before_train(self): self.once = 36//(4*num_distrib())*4 # by chance as many
    def after_batch(self):
        if not self.training: return
        self.n += len(self.x)
        self.steps += 1
        self._together(len(self.x))
    def _together(self, n): self.all = num_distrib()*n*(self.iter+1)

@pytest.mark.parametrize('n', [2,3])
def test_counted_samples_of_equal_parts(n):
    "A number that grows by the samples of each rank is named where all ranks have equally many; batches, and what all ranks have, are not"
    def f(rank): return told(CountsSamples, begin='Ranks have ')
    first,*others = on_ranks(f, n)
    assert len(first)==1 and f'{36//(4*n)*4} in CountsSamples.n (test_attributes.py:' in first[0] and 'epoch 0' in first[0] and not any(others), (first,others)

class InValidation(Callback):
    "Predictions and samples of a rank in validation, and predictions of its last batch"
    def before_validate(self): self.preds,self.n,self.last = [],0,[]
    def after_batch(self):
        if self.training: return
        self.preds.append(self.pred)
        self.n += len(self.x)
        self.last = [self.pred,self.y]

def in_evaluation(how):
    "What the warnings name of a fit of one epoch, or of an evaluation"
    learn = learner(InValidation, bs=2, n_valid=24)
    with warnings.catch_warnings(record=True) as ws, learn.no_bar(), learn.no_logging(), learn.distrib_ctx():
        warnings.simplefilter('always')
        how(learn)
    return [re.match(r'Ranks (?:differ|have \d+) in (\S+)', str(w.message))[1] for w in ws if str(w.message).startswith('Ranks ')]

@pytest.mark.parametrize('n', [2,3])
@pytest.mark.parametrize('how', [lambda o: o.fit(1), lambda o: o.validate(), lambda o: o.get_preds()], ids=['fit','validate','get_preds'])
@pytest.mark.by_default('fit-3','validate-2','get_preds-2')
def test_evaluations_are_compared(n, how):
    first,*others = on_ranks(lambda rank: in_evaluation(how), n)
    assert first==['InValidation.preds.0','InValidation.n'] and not any(others), (first,others)

class Collects(Callback):
    "Batches and predictions of a rank, each batch in a list; and what is of the last batch, in lists too"
    def before_fit(self): self.batches,self.store = [],dict(preds=[], targs=[])
    def after_batch(self):
        if not self.training: return
        self.last,self.feats = [self.x,self.y,self.pred.detach()],dict(a=self.pred.detach()*2, b=self.x+1)
        self._keep()
    def _keep(self):
        self.batches.append((self.x,self.pred.detach()))
        for k,v in dict(preds=self.pred, targs=self.y).items(): self.store[k].append(v.detach())

class Gathers(Collects):
    "The same of all ranks"
    def _keep(self): self.batches.append([gather_objs(o.detach()) for o in (self.x,self.pred)])

class Last(Collects):
    def _keep(self): self.batches = [self.x,self.pred]

class Remembers(Callback):
    "Predictions of the last few batches"
    def before_fit(self): self.memory = deque(maxlen=4)
    def after_batch(self): self.memory.append(self.pred.detach())

@pytest.mark.parametrize('n', [2,3])
def test_collected(n):
    "Lists that grow by the batches of a rank are named once, of a script's callback and of fastai's; those of one batch, and of all ranks, are not"
    def f(rank): return [told(o) for o in (Collects, CollectDataCallback, Remembers, Gathers, Last)]
    (of_script,of_fastai,memory,*quiet),*others = on_ranks(f, n)
    assert {o.split()[0] for o in of_script}=={'Collects.batches.0.0','Collects.store.preds.0'} and len(of_script)==2, of_script
    assert [o.split()[0] for o in of_fastai]==['CollectDataCallback.data.0.0.0'] and 'epoch 0' in of_fastai[0] and 'in one process' in of_fastai[0], of_fastai
    assert len(memory)==1 and memory[0].startswith('Remembers.memory.0'), memory
    assert not any(quiet) and not any(map(any, others)), (quiet,others)
