"A `DistributedDL` by itself, as fastai's: its length, its order, and what it exchanges"
import itertools,random,tempfile,pytest
from torch.utils.data import BatchSampler,RandomSampler
from torch.utils.data import DataLoader as TorchLoader
from fastai.basics import *
from fastai.callback.data import WeightedDL
from fastai.text.data import LMDataLoader
from fastdist import *
from fastdist import DistributedDL
from fastcore.test import test_eq

def own(n, bs, drop, shuffle): return TfmdDL(list(range(n)), bs=bs, drop_last=drop, shuffle=shuffle, num_workers=0)
def torchs(n, bs, drop, shuffle): return TorchLoader(range(n), batch_size=bs, drop_last=drop, shuffle=shuffle)

def epoch(share):
    "Ranks without a group share an order as far as they share a seed"
    torch.manual_seed(0)
    share.dl.rng = random.Random(0)
    return [b.tolist() for b in share]

@pytest.mark.parametrize('mk', (own,torchs))
def test_length_is_what_comes(mk):
    for n,size,bs,drop,shuffle in itertools.product(range(1,11), range(1,5), (1,2,3,5), (False,True), (False,True)):
        shares = [DistributedDL(mk(n, bs, drop, shuffle), r, size) for r in range(size)]
        got,what = list(map(epoch, shares)),f'{n=} {size=} {bs=} {drop=} {shuffle=}'
        assert [len(s) for s in shares]==[len(o) for o in got]==[len(got[0])]*size, what
        seen = [i for o in got for b in o for i in b]
        if drop: assert all(len(b)==bs for o in got for b in o), what
        else: assert set(seen)==set(range(n)) and len(seen)==-(-n//size)*size, what

class Noted(DistributedDL):
    "What fastai's notebook puts in the place of a group: rank 0 leaves its order in a file, others' rows are -100"
    note = tempfile.mktemp()
    def _broadcast(self, t, rank):
        t = LongTensor(t)
        if rank==self.rank: torch.save(t, self.note)
        else: t.data = torch.load(self.note)
        return t.tolist()
    def _to_detach(self, b, cpu=True, gather=True):
        b = to_detach(b, cpu, gather)
        return apply(lambda x: torch.cat([x if i==self.rank else torch.full_like(x, -100) for i in range(self.world_size)]), b) if gather else b

@pytest.mark.parametrize('drop', (False,True))
def test_blocks_of_pairs(drop):
    dl = TfmdDL(list(zip(range(50), range(100,150))), bs=12, num_workers=2, drop_last=drop)
    for i in range(4):
        a,b = torch.arange(i*13, i*13+12)%50,torch.tensor([i*13+12])%50
        test_eq(list(Noted(dl, i, 4)), [(a,100+a),(b,100+b)][:1 if drop else 2])

def test_padding_is_dropped_when_gathered():
    dls = [Noted(TfmdDL(list(zip(range(12), range(100,112))), bs=12, num_workers=2), i, 5) for i in range(5)]
    for b in zip(*dls):
        for r in range(5): test_eq(L(dls[r].to_detach(b[r])).map(lambda x: (x!=-100).sum().item()), (3,3) if r<4 else (0,0))

def test_order_of_rank_0_by_broadcast():
    dl = TfmdDL(list(range(10)), bs=4, num_workers=2, shuffle=True)
    for i in range(3):
        mine = Noted(dl, i, 3)
        b = list(mine)[0]
        test_eq(b[:None if i<2 else 2], mine.to_detach(b)[4*i:4*(i+1)])

def test_weighted():
    dl = WeightedDL(list(range(50)), bs=16, num_workers=2, shuffle=True, wgts=list(np.arange(50)>=25))
    assert all(o>=25 for i in range(4) for o in list(DistributedDL(dl, i, 4))[0].tolist())

def test_without_a_group_nothing_is_gathered_or_cut():
    dl = DistributedDL(TfmdDL(list(range(12)), bs=12, num_workers=0), 4, 5)
    test_eq([dl.to_detach(b) for b in dl], [tensor([0,1,2])])

names = dict(zip('abcdefghijklm', range(13)))
def shuffled_names(): return TfmdDL(names, bs=2, num_workers=0, get_idxs=lambda: random.sample(list(names), 13))
def sampled(): return TorchLoader(range(13), batch_sampler=BatchSampler(RandomSampler(range(13)), 2, False))
def fastais(): return TfmdDL(list(range(13)), bs=2, shuffle=True, num_workers=1)

loaders = dict(fastai=fastais, torch=lambda: torchs(13, 2, False, True), sampler=sampled, names=shuffled_names, given=lambda: own(13, 2, False, True))

def in_group(rank, name, prepare):
    for o in (random.seed,np.random.seed,torch.manual_seed): o(rank)
    dl = loaders[name]()
    w = dist_rank_size() if name=='given' else ()
    dl = Accelerator(cpu=True).prepare(dl) if prepare else DistributedDL(dl, *w)
    if rank==0: dl.one_batch() # looked at by one rank alone
    return [[(b.tolist(),dl.to_detach(b).tolist()) for b in dl] for _ in range(2)]

def dist_rank_size(): return torch.distributed.get_rank(),torch.distributed.get_world_size()

@pytest.mark.parametrize('name,prepare', [*((o,False) for o in loaders), ('fastai',True), ('given',True)])
@pytest.mark.parametrize('size', (2,3))
def test_ranks_of_a_group_share_an_order(name, prepare, size):
    res = on_ranks(lambda rank: in_group(rank, name, prepare), size)
    for ranks in zip(*res):
        assert {o for r in ranks for b,_ in r for o in b}==set(range(13))
        whole = [[o for b,_ in r for o in b] for r in ranks]
        test_eq(sorted(sum(whole, [])[:13]), list(range(13)))
        assert all(a==b for r in ranks[1:] for (_,a),(_,b) in zip(ranks[0], r))
        gathered = [o for _,g in ranks[0] for o in g]
        test_eq(sorted(gathered), list(range(13)))
    assert len({str(e) for e in res[0]})==2

def texts(rank):
    for o in (random.seed,np.random.seed): o(rank)
    docs = [torch.arange(i*10, i*10+9) for i in range(12)]
    return torch.cat([b[0].flatten() for b in DistributedDL(LMDataLoader(docs, bs=3, seq_len=4, shuffle=True))]).tolist()

def test_documents_shuffled_alike():
    a,b = on_ranks(texts)
    test_eq(len(a+b), len(set(a+b)))
