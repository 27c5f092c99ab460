"Ranks that catch an error themselves and go on meet again, or get an error: none waits for one that is elsewhere"
import time,pytest
from fastcore.test import test_eq
from fastai.basics import *
from fastdist import *

pytestmark = pytest.mark.timeout(120)

def learner():
    set_seed(3)
    data = [(torch.randn(3), torch.randn(1)) for _ in range(24)]
    dls = DataLoaders.from_dsets(data, data[:8], bs=4, num_workers=0, device='cpu')
    return Learner(dls, nn.Linear(3,1), loss_func=MSELossFlat())

event_names = 'before_fit','after_batch','after_fit'

class Fails(Callback):
    "Fails on one rank at an event"
    def __init__(self, rank, event): setattr(self, event, partial(self._fail, rank))
    def _fail(self, rank):
        if rank_distrib()!=rank: return
        time.sleep(.7*(rank%2))
        raise ValueError('of one rank')

def goes_on(rank, of, where):
    "How four contexts end, each with a fit, of which the second fails on rank `of`: before the fit, behind it, or at an event of it"
    learn,res = learner(),[]
    def fit(i):
        with learn.no_bar(), learn.no_logging(), learn.distrib_ctx(patience=10):
            if i==1 and where=='context' and rank==of: raise ValueError('of one rank')
            learn.fit(1, cbs=Fails(of, where) if i==1 and where in event_names else None)
            if i==1 and where=='behind' and rank==of: raise ValueError('of one rank')
    for i in range(4):
        try: fit(i)
        except Exception as e: res.append(type(e).__name__)
        else: res.append('done')
    return res

@pytest.mark.parametrize('where', ['behind','context',*event_names])
@pytest.mark.parametrize('n,of', [(2,1),(2,0),(3,1)])
@pytest.mark.parametrize('join', [True,False], ids=['outer','own'])
@pytest.mark.by_default('outer-2-1-behind', 'own-3-1-behind', 'outer-2-0-context')
def test_contexts(where, n, of, join):
    "A rank that alone knew of an error made the process group anew, or sent its model, and waited for others that did not"
    res = on_ranks(partial(goes_on, of=of, where=where), n, join=join, timeout=60)
    others = 'done' if where=='behind' else 'RankError' # which had done the fit, and left
    test_eq(res, [['done','ValueError' if r==of else others,'done','done'] for r in range(n)])
