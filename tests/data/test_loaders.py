"The share of a loader does what the loader does: show, decode, make new ones"
import matplotlib,pytest
matplotlib.use('agg')
from fastcore.test import test_eq
from fastai.basics import *
from fastdist import DistributedDL
from fastdist.data.loader import StepDL
from fastdist.launch.fork import forked_workers
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

class OwnItem(TfmdDL):
    def do_item(self, s): return 2*super().do_item(s)

class OwnCreate(TfmdDL):
    def create_item(self, s): return super().create_item(s)+100

def bare(cls=TfmdDL, items=range(12), **kw): return cls(items, bs=3, **kw)

@pytest.mark.parametrize('dl,seen', [(bare(), range(12)), (bare(OwnItem), range(0,24,2)), (bare(OwnCreate), range(100,112)),
    (bare(after_item=lambda o: o+1), range(1,13)), (bare(create_item=lambda s: s+5), range(5,17))])
@forked_workers() # in one process too: from Python 3.14 on its data workers would not know what only this process has
def test_items_are_made_as_the_loader_makes_them(dl, seen):
    for workers in (0,1):
        dl.fake_l.num_workers = workers
        test_eq(sorted(torch.cat([b for r in range(2) for b in StepDL(dl, r, 2)]).tolist()), list(seen))
