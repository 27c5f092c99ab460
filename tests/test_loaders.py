"The share of a loader does what the loader does: show, decode, make new ones"
import matplotlib,pytest
matplotlib.use('agg')
from fastcore.test import test_eq
from fastai.basics import *
from fastdist import DistributedDL
import learners

@pytest.mark.parametrize('name', 'vision tabular collab language_model text_classifier'.split())
@pytest.mark.parametrize('rank', range(3))
def test_share_of_each_kind(name, rank):
    dl = getattr(learners, name)().dls.valid
    share = DistributedDL(dl, rank, 3)
    test_eq(type(share.one_batch()), type(dl.one_batch()))
    test_eq(len(list(share)), len(share))
    test_eq(share.n_inp, dl.n_inp)
    share.show_batch(max_n=2)
    test_eq(len(list(share.new(bs=1))), len(share.new(bs=1)))

def test_shares_cover_the_data():
    dl = learners.tabular().dls.valid
    rows = torch.cat([torch.cat([b[1] for b in DistributedDL(dl, r, 3)]) for r in range(3)])
    test_eq(rows[:len(dl.dataset)], torch.cat([b[1] for b in dl]))

def test_test_dl_of_a_share():
    dls = learners.vision().dls
    imgs = [x for x,_ in dls.valid_ds]
    dls.loaders[1] = DistributedDL(dls.valid, 1, 2)
    test = dls.test_dl(imgs, num_workers=0)
    test_eq((type(test), test.n, sum(len(b[0]) for b in test)), (DistributedDL, 8, 4))
