"N ranks with batch size `bs` compute what one process computes with `N*bs`"
import pytest
from collections import Counter
from fastcore.test import test_eq
from fastai.basics import *
from fastai.callback.all import *
from fastdist import *
from collectives import counting
from compare import whole_tables
from learners import digits

def learner(n, bs, opt, bn=False, cbs=None):
    set_seed(3)
    g = torch.Generator().manual_seed(0)
    data = list(zip(torch.randn(n, 8, generator=g), torch.randint(0, 3, (n,), generator=g)))
    dls = DataLoaders.from_dsets(data, data, bs=bs, shuffle=True, drop_last=False, num_workers=0, device='cpu')
    layers = [nn.Linear(8,6,bias=False),nn.BatchNorm1d(6)] if bn else [nn.Linear(8,6)]
    mets = [accuracy,F1Score(average='macro'),Perplexity()]
    return Learner(dls, nn.Sequential(*layers, nn.ReLU(), nn.Linear(6,3)), loss_func=CrossEntropyLossFlat(), opt_func=opt, metrics=mets, cbs=cbs)

def fitted(rank, *args):
    learn = learner(*args)
    with learn.distrib_ctx(), learn.no_bar(), learn.no_logging():
        learn.fit(2, 0.02)
        preds,targs = learn.get_preds()
    weights = torch.cat([o.detach().float().flatten() for o in learn.model.state_dict().values()])
    return weights,tensor(learn.recorder.values[0]),tensor(learn.recorder.losses),preds,targs

sizes = {1:(1,5,6,7,12), 4:(1,5,7,48,49,101), 12:(1,5,7,48,49,101)} # batch size -> numbers of samples: few steps, and each remainder that two to four ranks can leave
if not whole_tables: sizes = {1:(5,12), 4:(1,7,49), 12:(5,48,101)} # fewer samples than ranks, none left over, one, and several

@pytest.mark.slow
@pytest.mark.parametrize('size', (1,2,3,4))
@pytest.mark.parametrize('opt,bn,clip', [(SGD,False,True), (Adam,False,False), (SGD,True,False)])
@pytest.mark.by_default('SGD-True-False-3')
def test_the_law(size, opt, bn, clip):
    "Batch norm is left out where one process refuses a batch of one sample, and where few samples leave nothing but rounding to learn from"
    runs = [(n,bs) for bs,ns in sizes.items() for n in ns if not bn or n%(bs*size)!=1 and bs*size>=8]
    cbs = GradientClip(.1) if clip else None
    many = on_ranks(lambda rank: [fitted(rank, n, bs, opt, bn, cbs) for n,bs in runs], size, join=False, timeout=100)
    for i,(n,bs) in enumerate(runs):
        one = fitted(0, n, bs*size, opt, bn, cbs)
        for o in many:
            for a,b,eps in zip(one, o[i], (1e-5,1e-6,1e-6,1e-5,1e-9)): torch.testing.assert_close(a, b, rtol=eps, atol=eps)

def counted(rank, epochs, n, bn):
    learn = digits(n=n, bs=4)
    if not bn: learn.model = nn.Linear(64,10)
    with learn.distrib_ctx(), learn.no_bar(), learn.no_logging(), counting() as ran: learn.fit(epochs)
    return len(learn.recorder.losses),ran

def extra(*args):
    "Collectives of each kind, but for one all-reduce of the gradients in each step"
    steps,counts = on_ranks(lambda rank: counted(rank, *args), join=False)[0]
    return steps,counts-Counter({'c10d::allreduce_':steps})

@pytest.mark.replicas
def test_only_gradients_are_exchanged_in_a_step():
    (few,a),(many,b),(_,two) = extra(1, 100, False),extra(1, 300, False),extra(2, 100, False)
    assert few<many
    test_eq(a, b)
    test_eq(two-a, Counter({'c10d::broadcast_':4, 'c10d::allgather_':2, 'c10d::allreduce_':5})) # two of them compare what ranks hold, one what they record

@pytest.mark.replicas
def test_batch_norm_adds_two_exchanges_a_step():
    plain,(steps,bn) = extra(1, 100, False)[1],extra(1, 100, True)
    test_eq(bn-plain, Counter({'c10d::allreduce_':steps, 'c10d::allgather_':steps}))
