"What a forward pass leaves behind beside its result: the buffers of norms, of models and of losses, on ranks as in one process or with a warning"
import warnings,pytest
from contextlib import nullcontext
from fastai.basics import *
from fastai.callback.training import GradientAccumulation
from torch.nn.utils.parametrizations import spectral_norm
from fastdist import *
from fastcore.test import test_eq,test_close

class Ema(nn.Module):
    "Divides by a mean that it keeps"
    def __init__(self):
        super().__init__()
        self.register_buffer('mean', torch.ones(3))
    def forward(self, x):
        if self.training: self.mean.lerp_(x.detach().abs().mean((0,2)), .1)
        return x/self.mean[:,None].clone()

class OwnNorm(nn.BatchNorm1d):
    def forward(self, x): return super().forward(x)*2

class Active(nn.BatchNorm1d):
    "As timm's norms are, with an activation"
    def forward(self, x):
        self.num_batches_tracked.add_(self.training)
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps).relu_()

class Masked(nn.Module):
    "Has a buffer that never changes"
    def __init__(self):
        super().__init__()
        self.register_buffer('mask', torch.tensor([1.,0,1])[:,None])
    def forward(self, x): return x*self.mask

class Scaled(nn.Module):
    "A loss in units of what it was so far"
    reduction = 'mean'
    def __init__(self):
        super().__init__()
        self.register_buffer('scale', torch.ones(()))
    def forward(self, p, y):
        loss = F.mse_loss(p, y)
        self.scale.lerp_(loss.detach(), .1)
        return loss/self.scale.clone()

def inst(**kw): return nn.InstanceNorm1d(3, track_running_stats=True, affine=True, **kw)
def body(*layers): return nn.Sequential(nn.Conv1d(2,3,3), *layers, nn.Flatten(), nn.Linear(12,1))

def trained(mk, bs, ctx, size=1, n=31, epochs=2, loss=MSELossFlat, cbs=None, sync_bn=True):
    set_seed(1)
    g = torch.Generator().manual_seed(2)
    x = torch.randn(n+9, 2, 6, generator=g)
    data = list(zip(x, x.mean((1,2))[:,None]))
    dls = DataLoaders.from_dsets(data[:n], data[n:], bs=bs, drop_last=False, num_workers=0, device='cpu')
    learn = Learner(dls, mk(), loss_func=loss(), opt_func=SGD, lr=.05, cbs=cbs and cbs())
    learn.recorder.add_time = False
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('always')
        with learn.distrib_ctx(sync_bn=sync_bn) if ctx else nullcontext(), learn.no_logging(), learn.no_bar(): learn.fit(epochs)
    said = [str(o.message) for o in said if 'rank' in str(o.message)]
    return {k:v.clone() for k,v in learn.model.state_dict().items()},np.concatenate([list(o) for o in learn.recorder.values]),said,learn

def ranks(mk, size, **kw): return on_ranks(lambda rank: trained(mk, 12//size, True, **kw)[:3], size, join=False)

def same_as_alone(mk, size, **kw):
    state,values,_,_ = trained(mk, 12, False, **kw)
    for got,vals,said in ranks(mk, size, **kw):
        test_eq(said, [])
        for k,v in state.items(): assert torch.allclose(got[k].double(), v.double(), 1e-4, 1e-5), (k, got[k], v)
        test_close(vals, values, 1e-4)

class Stop(Callback):
    def before_batch(self):
        if self.training and self.epoch==1 and self.iter==2: raise CancelFitException()

class Midway(Callback):
    "Validates within an epoch"
    order,run_valid = 100,False
    def after_batch(self):
        if self.iter!=1: return
        self.learn.validate()
        self.learn.training = True
        self.model.train()

exact = dict(cumulative=lambda: body(nn.BatchNorm1d(3, momentum=None)), mask=lambda: body(Masked(), nn.BatchNorm1d(3)),
    own=lambda: body(OwnNorm(3)), active=lambda: body(Active(3)),
    spectral=lambda: nn.Sequential(spectral_norm(nn.Conv1d(2,3,3)), nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(12,1)))

@pytest.mark.parametrize('size', [2,3])
@pytest.mark.parametrize('case', exact)
@pytest.mark.by_default('mask', 'own', 'spectral')
def test_as_in_one_process(case, size): same_as_alone(exact[case], size)

@pytest.mark.parametrize('kw', [dict(n=25), dict(cbs=lambda: Stop()), dict(cbs=lambda: Midway()), dict(cbs=lambda: GradientAccumulation(24))])
@pytest.mark.by_default('kw2')
def test_ranks_share_buffers_wherever_training_ends(kw):
    (one,*_),*others = ranks(lambda: body(Ema(), Masked()), 3, **kw)
    for o,*_ in others: assert all(torch.equal(o[k], v) for k,v in one.items())

@pytest.mark.whole
def test_other_buffers_are_named_beside_instance_norms():
    res = ranks(lambda: body(inst(), Ema()), 2)[0][2]
    test_eq([o.split(' by ')[0] for o in res if 'forward pass' in o], ['The forward pass changes 1.running_mean, 1.running_var, 2.mean'])

@pytest.mark.whole
def test_instance_norms_that_do_not_train_are_not_named():
    class Frozen(Callback):
        order = TrainEvalCallback.order+1
        def before_train(self): self.model[1].eval()
    for mk,cbs in ((lambda: body(inst()),Frozen),(lambda: body(nn.InstanceNorm1d(3)),None)): same_as_alone(mk, 2, cbs=cbs)

def test_parted_buffers_are_named_once():
    for i,(state,_,said) in enumerate(res := ranks(lambda: body(Ema(), OwnNorm(3)), 3)):
        for k,v in state.items(): assert torch.equal(v, res[0][0][k]), k
        if i: test_eq(said, [])
    said, = [o for o in res[0][2] if 'mixes the samples' not in o]
    assert '1.mean' in said and '2.running' not in said

def test_a_loss_with_buffers():
    res = on_ranks(lambda rank: [(o[3].loss_func.scale, o[2]) for o in [trained(lambda: body(), 6, True, loss=Scaled)]][0], join=False)
    test_eq(res[0][0], res[1][0])
    test_eq([len([o for o in said if 'loss_func.scale' in o]) for _,said in res], [1,0])

@pytest.mark.whole
def test_batch_norms_that_were_left_alone_are_not_named():
    for _,_,said in ranks(lambda: body(nn.BatchNorm1d(3), Masked()), 2, sync_bn=False): test_eq(said, [])

def test_class_weights_are_rank_0s():
    def run(rank):
        learn = trained(lambda: nn.Sequential(nn.Flatten(), nn.Linear(12,1)), 6, True, loss=lambda: nn.BCEWithLogitsLoss(pos_weight=tensor([rank+1.])))[3]
        return learn.loss_func.pos_weight.item(),learn.model[1].weight.detach()
    (a,w),(b,v) = on_ranks(run, join=False)
    test_eq((a,b), (1.,1.))
    assert torch.equal(w, v)

def test_statistics_of_the_batch_in_evaluation_are_told_of():
    res = ranks(lambda: body(nn.BatchNorm1d(3, track_running_stats=False)), 2)
    state,*_ = trained(lambda: body(nn.BatchNorm1d(3, track_running_stats=False)), 12, False)
    for k,v in state.items(): test_close(res[1][0][k], v, 1e-4)
    said, = [o for o in res[0][2] if 'mixes the samples' not in o]
    assert 'batch norm 1 keeps no running statistics' in said and not res[1][2]
