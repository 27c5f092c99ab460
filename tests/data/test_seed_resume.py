"With a seed a training that was cut off in an epoch, and goes on with other ranks and data workers, is the undisturbed one"
import os,pytest,random,signal
from fastai.vision.all import *
from fastdist import *
from fastdist.base.errors import *
from seeded import *
from test_seeds import vision

class Cut(Callback):
    order = 90
    def __init__(self, at): self.at = at
    def before_step(self):
        if self.learn.train_iter==self.at: raise InterruptedError('cut off')

class Kill(Cut):
    "Kills this process, the last of `n` ranks"
    def __init__(self, at, n): self.at,self.n = at,n
    def before_step(self):
        if self.learn.train_iter==self.at and rank_distrib()==self.n-1: os.kill(os.getpid(), signal.SIGKILL)

def script(n, path, at=None, seed=42, workers=0, cut=Cut):
    "A user's script of two fits and two evaluations, the second fit cut off at step `at`; what each rank has in the end"
    model = lambda: nn.Sequential(nn.Flatten(), nn.Linear(768, 12), nn.Dropout(.3), nn.Linear(12, 3))
    def run(rank):
        for f in (random.seed,np.random.seed,torch.manual_seed): f(rank+1)
        learn = vision([RandomResizedCrop(16)], aug_transforms(size=16), workers, model)(n)
        learn.add_cb(Checkpoint(path, every=1))
        with learn.no_bar(),learn.no_logging(),learn.distrib_ctx(seed=seed):
            learn.fit(1, .01)
            learn.validate()
            learn.fit_one_cycle(3, .01, cbs=at and cut(at))
            losses = [*map(plain, learn.recorder.losses)]
            preds = plain(learn.get_preds(cbs=[MCDropoutCallback()])[0])
        return [*map(plain, learn.model.parameters())],losses,preds
    return on_ranks(run, n, timeout=100)

@pytest.fixture(scope='module')
def whole(tmp_path_factory): return script(1, tmp_path_factory.mktemp('whole')/'states')[0]

@pytest.mark.parametrize('before,after,at,workers', ((1,2,3,0),(2,1,4,2),(3,2,5,1),(1,1,2,0)))
@pytest.mark.by_default('3-2-5-1')
def test_a_training_goes_on_with_other_ranks(tmp_path, whole, before, after, at, workers):
    with pytest.raises(RankError, match='cut off'): script(before, tmp_path/'states', at)
    for res in script(after, tmp_path/'states', workers=workers): assert near(res, whole)

@pytest.mark.whole
@pytest.mark.parametrize('before,after', ((2,3),pytest.param(3,1, marks=pytest.mark.whole)))
def test_a_rank_that_is_killed(tmp_path, whole, before, after):
    with pytest.raises(RankError): script(before, tmp_path/'states', 3, workers=1, cut=partial(Kill, n=before))
    assert [*(tmp_path/'states').glob('0*')]
    for res in script(after, tmp_path/'states', workers=1): assert near(res, whole)

@pytest.mark.whole
def test_another_seed_is_another_training(tmp_path):
    script(1, tmp_path/'states')
    for seed in (43,None):
        with pytest.raises(RankError, match=f'another training: seed was 42, is {seed}'): script(1, tmp_path/'states', seed=seed)
