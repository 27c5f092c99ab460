"Ranks that part are found, and ranks that do not are left alone"
import math,pytest
from collections import Counter
from fastcore.test import test_close,test_eq
from fastai.basics import *
from fastai.callback.all import *
from fastdist import *
from fastdist.tools.checks import *
from fastdist.state.replicas import *
from collectives import counting
from half import halved
from learners import collab,digits,language_model

def fitted(learn, *cbs, epochs=1, **kw):
    with learn.distrib_ctx(**kw), learn.no_bar(), learn.no_logging(): learn.fit(epochs, 0.01, cbs=cbs)
    return learn

def found(learn, *cbs, **kw):
    "The message of the error, without what fastai puts before it"
    with pytest.raises(DesyncError) as e: fitted(learn, *cbs, **kw)
    assert not learn._grab_cbs(DistributedTrainer)
    return 'ranks differ in'+str(e.value).split('ranks differ in')[1]

class On(Callback):
    "Calls `f` with the Learner on one rank, when batch `at` comes to `event`"
    def __init__(self, mine, at, f, event='after_step'):
        self.mine,self.at,self.f = mine,at,f
        setattr(self, event, self.act)
    def act(self):
        if self.mine and self.training and self.train_iter==self.at: self.f(self.learn)

class Buffered(nn.Sequential):
    "With a mask that is read, and a memory of the samples that is written"
    def __init__(self, *layers):
        super().__init__(*layers)
        self.register_buffer('mask', torch.ones(64))
        self.register_buffer('memory', torch.zeros(64))
        self.register_buffer('seen', torch.tensor(0))
    def forward(self, x):
        if self.training:
            self.memory.lerp_(x.mean(0), .1)
            self.seen += 1
        return super().forward(x*self.mask)

def buffered(**kw):
    learn = digits(**kw)
    learn.model = Buffered(*learn.model)
    return learn

# Drift

def weight(learn): learn.model[0].weight.data[3,5] += 0.5
def stats(learn): learn.model[1].running_mean[0] -= 0.25
def mask(learn): learn.model.mask[:2] = 0
def momentum(learn): learn.opt.state[learn.model[0].weight]['grad_avg'][:] = math.nan
def count(learn): learn.opt.state[learn.model[1].bias]['step'] = 7
def rate(learn): learn.opt.set_hyper('lr', 0.5)

drifts = [(weight, '0.weight', 'in 1 of 2048 elements by up to 0.5'), (stats, '1.running_mean', 'in 1 of 32 elements by up to 0.25'),
    (mask, 'mask', 'in 2 of 64 elements by up to 1'), (momentum, 'optimizer state of 0.weight: grad_avg', 'in 2048 of 2048 elements by up to nan'),
    (count, 'optimizer state of 1.bias: step', 'with 7 instead of 4'), (rate, 'lr of parameter group 0', 'with 0.5 instead of 0.01')]

@pytest.mark.replicas # in shards a rank has rows that no other has, so there is nothing to compare
@pytest.mark.parametrize('size', (2,3))
@pytest.mark.parametrize('f,name,how', drifts)
@pytest.mark.by_default('weight', 'mask', 'momentum', 'rate')
def test_drift_is_named_on_every_rank(f, name, how, size):
    res = on_ranks(lambda rank: found(buffered(), On(rank==1, 3, f), DesyncCheck(2)), size, join=False)
    test_eq(res, res[:1]*size)
    assert res[0].startswith(f'ranks differ in {name} after step 4 of the fit, in epoch 0: rank 1 from rank 0, {how}. HINT')

@pytest.mark.whole
@pytest.mark.replicas
def test_the_majority_is_right():
    for who in (0,2):
        res = on_ranks(lambda rank: found(digits(), On(rank==who, 0, weight), DesyncCheck(1)), 3, join=False)
        test_eq(res, res[:1]*3)
        assert f'rank {who} from rank {0 if who else 1}, in 1' in res[0]

def several(rank):
    def f(learn): [weight(learn), stats(learn), rate(learn)]
    return found(digits(), On(rank, 1, f), DesyncCheck(1))

@pytest.mark.replicas
def test_causes_come_first():
    for o in on_ranks(several, 3, join=False): assert 'in lr of parameter group 0 after step 2 of the fit, in epoch 0: rank 0 from rank 1, with 0.01 instead of 0.5. They differ as well in 0.weight' in o

@pytest.mark.replicas
def test_found_at_the_end_of_the_epoch():
    for o in on_ranks(lambda rank: found(digits(), On(rank==1, 1, weight), DesyncCheck(), epochs=2), join=False): assert 'after step 9 of the fit, in epoch 0' in o

def stop(learn): learn.opt.step = noop

@pytest.mark.replicas
def test_a_rank_that_steps_no_more():
    for o in on_ranks(lambda rank: found(digits(), On(rank==1, 2, stop, 'before_step'), DesyncCheck(2)), join=False):
        assert o.startswith('ranks differ in optimizer state of 0.weight: grad_avg after step 4')

def alone(learn): learn.opt.state[learn.model[0].weight]['extra'] = torch.zeros(2)

@pytest.mark.replicas
def test_a_state_that_one_rank_has_alone():
    for o in on_ranks(lambda rank: found(digits(), On(rank==1, 0, alone), DesyncCheck(1)), join=False):
        assert 'optimizer state of 0.weight: extra' in o and 'with torch.float32 (2,) instead of nothing' in o

def lost(rank):
    def mine(learn): learn.model[0].weight.grad *= 1+rank
    return found(digits(), On(True, 0, mine, 'after_backward'), DesyncCheck(1))

@pytest.mark.replicas
def test_gradients_that_a_rank_changes():
    for o in on_ranks(lost, join=False): assert 'optimizer state of 0.weight: grad_avg after step 1' in o

# Once an epoch

@pytest.mark.whole
@pytest.mark.replicas
def test_without_asking(size=3):
    for who in (0,2):
        res = on_ranks(lambda rank: found(digits(), On(rank==who, 1, weight), epochs=2), size, join=False)
        test_eq(res, res[:1]*size)
        assert res[0].startswith(f'ranks differ in 0.weight at the end of training in epoch 0: rank {who} from rank {0 if who else 1}, in 1 of 2048 elements by up to 0.5. HINT')

class EMA(Callback):
    "Trains with one set of weights, validates with their mean, and ends with it; on all ranks alike"
    order = 70
    def before_fit(self): self.mean = [p.detach().clone() for p in self.model.parameters()]
    def after_step(self): torch._foreach_lerp_(self.mean, [p.data for p in self.model.parameters()], .1)
    def swap(self):
        for m,p in zip(self.mean, self.model.parameters()): m.data,p.data = p.data,m.data
    before_validate = after_validate = swap

averages = pytest.param(dict(cbs=[EMA()]), marks=pytest.mark.replicas)
alikes = averages,dict(cbs=[GradientClip(.1),SaveModelCallback()]),dict(mk=lambda: halved(digits(), init_scale=2.**30))

@pytest.mark.whole
@pytest.mark.parametrize('kw', alikes)
@pytest.mark.by_default('kw0')
def test_callbacks_that_do_alike(kw):
    mk,cbs = kw.get('mk', digits),kw.get('cbs', [])
    test_eq(on_ranks(lambda rank: len(fitted(mk(), *cbs, epochs=2, cpu=True).recorder.losses), join=False), [18]*2)

def off(rank):
    learn = fitted(digits(), On(rank==1, 1, weight), desync_check=False)
    return [type(cb).__name__ for cb in learn.cbs]

@pytest.mark.replicas
def test_may_be_left_out(): test_eq(on_ranks(off, join=False), [['TrainEvalCallback','Recorder','CastToTensor','ProgressCallback']]*2)

# No drift

def alike(rank, mk=buffered, cbs=(), epochs=2, **kw): return len(fitted(mk(), *cbs, DesyncCheck(1), epochs=epochs, **kw).recorder.losses)

@pytest.mark.parametrize('size', (2,3))
@pytest.mark.parametrize('sync_bn', (True,False))
def test_no_false_alarm(size, sync_bn):
    res = on_ranks(lambda rank: alike(rank, sync_bn=sync_bn), size, join=False)
    assert res[0] and len(set(res))==1

split = lambda m: [params(m[:2]),params(m[2:])]
adamw = partial(OptimWrapper, opt=torch.optim.AdamW)

others = dict(callback=dict(cbs=[GradientAccumulation(64)]), steps=dict(gradient_accumulation_steps=2), torch=dict(mk=lambda: digits(opt_func=adamw)),
    ranger=dict(mk=lambda: digits(opt_func=ranger)), bf16=dict(mk=lambda: halved(digits(), 'bf16')), fp16=dict(mk=lambda: halved(digits(), init_scale=2.**30)),
    collab=dict(mk=collab), text=dict(mk=language_model), ragged=dict(mk=lambda: digits(dls_kw=dict(drop_last=False))))

@pytest.mark.whole
@pytest.mark.parametrize('k', others)
@pytest.mark.by_default('steps')
def test_no_false_alarm_elsewhere(k): on_ranks(lambda rank: alike(rank, **others[k], cpu=True), join=False)

def tuned(rank):
    learn = digits(splitter=split)
    with learn.distrib_ctx(), learn.no_bar(), learn.no_logging():
        learn.add_cb(DesyncCheck(1))
        learn.fine_tune(1)
        learn.lr_find(num_it=5, show_plot=False)
        learn.fit_one_cycle(1, slice(1e-4,1e-2))

@pytest.mark.whole
def test_frozen_layers_and_schedules(): on_ranks(tuned, join=False)

class Odd(nn.Module):
    "Parameters and buffers of all kinds, most of them without a gradient"
    def __init__(self, n):
        super().__init__()
        self.lin,self.rest = nn.Linear(64,10),nn.Parameter(torch.full((3,), math.nan), requires_grad=False)
        for i,d in enumerate((torch.bool,torch.uint8,torch.int64,torch.bfloat16,torch.float16,torch.complex64)): self.register_buffer(f'b{i}', torch.ones(n, dtype=d))
    def forward(self, x): return self.lin(x)

def odd(rank, n, f=noop):
    learn = digits(opt_func=SGD)
    learn.model = Odd(n)
    return fitted(learn, DesyncCheck(1)) and None if f is noop else found(learn, On(rank==1, 0, f), DesyncCheck(1))

@pytest.mark.whole
def test_all_dtypes_empty_tensors_and_nan():
    for n in (0,2): on_ranks(lambda rank: odd(rank, n), join=False)
    for k in range(6):
        def change(learn): getattr(learn.model, f'b{k}')[1] = 0
        for o in on_ranks(lambda rank: odd(rank, 2, change), join=False): assert f'in b{k} after step 1' in o and 'in 1 of 2 elements by up to 1.' in o

@pytest.mark.replicas
def test_nan_that_all_have_is_no_difference():
    def f(rank):
        def spoil(learn): learn.model[0].weight.data[0] = math.nan
        learn = fitted(digits(), On(True, 1, spoil), DesyncCheck(1))
        return learn.model[0].weight.isnan().any().item()
    test_eq(on_ranks(f, join=False), [True,True])

# Cost

def exchanges(rank, *cbs, **kw):
    with counting() as ran: learn = fitted(digits(), *cbs, **kw)
    return len(learn.recorder.losses),ran

@pytest.mark.parametrize('every', (1,4))
@pytest.mark.by_default('4')
def test_one_collective_a_check(every):
    (n,without),(_,checked),(_,both) = [on_ranks(lambda rank: exchanges(rank, *cbs, **kw), join=False)[0] for cbs,kw in
        (([],dict(desync_check=False)), ([],{}), ([DesyncCheck(every)],{}))]
    test_eq((checked-without, both-without), (Counter({'c10d::allreduce_':2}), Counter({'c10d::allreduce_':n//every+3}))) # the context compares after training and after validation, the callback every few steps and after training

def test_one_process_compares_nothing():
    learn = fitted(digits(), DesyncCheck(1))
    test_eq(learn.desync_check.began if hasattr(learn, 'desync_check') else {}, {})
    with digits().no_bar() as learn, learn.no_logging(): learn.fit(1, cbs=DesyncCheck(1))

def test_ranks_that_have_not_met():
    def f(rank):
        with pytest.raises(WorldError, match='no process group'), digits().no_bar() as learn: learn.fit(1, cbs=DesyncCheck())
    on_ranks(f, join=False)

# Fingerprints

@pytest.mark.parametrize('n', (2**16-1, 2**16, 2**16+1, 3*2**16+5))
def test_every_element_counts(n):
    t = torch.randn(n)
    for i in (0, n//2, n-1):
        o = t.clone()
        o[i] = -o[i]
        assert fingerprint(o)!=fingerprint(t)
    assert fingerprint(t.roll(2**15))!=fingerprint(t)==fingerprint(t.clone())

def test_fingerprints_do_not_collide():
    "Of 4096 tensors that differ in two bits of 64 words, in the highest or in the lowest"
    base = torch.zeros(64, dtype=torch.int32)
    for bit in (1, -2**31):
        seen = set()
        for i in range(64):
            for j in range(64):
                t = base.clone()
                t[i] = bit
                t[j] += bit if i!=j else 0
                seen.add(fingerprint(t).item())
        test_eq(len(seen), 64*63//2+64)

def test_layout_and_laziness_do_not_matter():
    t = torch.randn(4,3,5,5)
    test_eq(fingerprint(t.to(memory_format=torch.channels_last)), fingerprint(t))
    z = torch.randn(6, dtype=torch.complex64)
    test_eq(fingerprint(z.conj()), fingerprint(z.conj().resolve_conj()))
    test_eq(fingerprint(z.conj().imag), fingerprint(-z.imag))

def test_random_numbers_are_left_alone():
    state = torch.get_rng_state()
    fingerprint(torch.ones(3))
    test_close(torch.get_rng_state(), state)
