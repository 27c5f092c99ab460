"A fastai Learner: in one process, with `fastai.distributed`, and with fastdist"
import sys
from contextlib import contextmanager,nullcontext
from importlib import import_module
from torch import distributed as dist
from fastai.basics import *
from fastai.callback.all import *
from work import Peer

opts = dict(SGD=SGD, Adam=Adam)

class Fastai(Peer):
    "A Learner without progress bar or log"
    def fit(self, model, w, train, valid, epochs):
        dls = DataLoaders.from_dsets(self.data(w, train), self.data(w, valid or 1), bs=w.bs, num_workers=0, device='cpu')
        learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), opt_func=opts[w.opt], lr=self.lr, metrics=accuracy)
        if not valid: learn._do_epoch_validate = noop
        with learn.no_bar(), learn.no_logging(), self.context(learn): learn.fit(epochs)

    def context(self, learn): return nullcontext()

def join_without_gpu():
    "Let `fastai.distributed` send its order without a GPU, over a gloo group that it cannot make itself"
    from fastai.distributed import DistributedDL
    if 'fastdist' in sys.modules: raise ImportError('fastdist has taken the place of fastai.distributed in this process')
    def _broadcast(self, t, rank):
        t = LongTensor(t)
        dist.broadcast(t, rank)
        return t.tolist()
    DistributedDL._broadcast = _broadcast
    dist.init_process_group('gloo')

class FastaiDistributed(Fastai):
    "`fastai.distributed`, patched"
    def __init__(self, rank, size):
        super().__init__(rank, size)
        join_without_gpu()

    def context(self, learn): return learn.distrib_ctx(sync_bn=False, cpu=True)

class Fastdist(Fastai):
    "fastdist, with batch norm on each rank alone as the others have it"
    sync_bn = False
    def __init__(self, rank, size):
        super().__init__(rank, size)
        import_module('fastdist')

    def context(self, learn): return learn.distrib_ctx(sync_bn=self.sync_bn, desync_check=self.exchange)

class FastdistSyncBN(Fastdist):
    "fastdist as it is by default, with batch norm over all ranks"
    sync_bn = True

class Deciding(Callback):
    "May cancel after each batch, as far as the ranks know"
    decides = True
    def after_batch(self): pass

class FastdistVoting(Fastdist):
    "fastdist with a callback that may cancel, so that the ranks vote after each batch"
    @contextmanager
    def context(self, learn):
        with super().context(learn), learn.added_cbs(Deciding()): yield
