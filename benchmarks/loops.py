"Loops written by hand: plain torch, and Accelerate"
import torch
from accelerate import Accelerator
from torch import distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader,DistributedSampler
from work import Peer

opts = dict(SGD=torch.optim.SGD, Adam=torch.optim.AdamW) # as fastai's Adam, which decays weights apart from gradients

class Loop(Peer):
    "A training loop with `DistributedDataParallel` and `DistributedSampler`; losses and hits are added up over ranks once an epoch"
    def __init__(self, rank, size):
        super().__init__(rank, size)
        if size>1: dist.init_process_group('gloo')

    def fit(self, model, w, train, valid, epochs):
        opt = opts[w.opt](model.parameters(), self.lr)
        model,opt,dl,valid_dl = self.prepare(model, opt, self.loader(w, train, True), self.loader(w, valid, False))
        for epoch in range(epochs):
            self.set_epoch(dl, epoch)
            self.train(model, opt, dl)
            if valid: self.validate(model, valid_dl)

    def loader(self, w, steps, shuffle):
        data = self.data(w, steps)
        if self.size==1 or not steps: return DataLoader(data, w.bs, shuffle=shuffle and steps>0, drop_last=shuffle)
        return DataLoader(data, w.bs, sampler=DistributedSampler(data, shuffle=shuffle), drop_last=shuffle)

    def prepare(self, model, *args): return DistributedDataParallel(model) if self.size>1 else model, *args
    def set_epoch(self, dl, epoch):
        if self.size>1: dl.sampler.set_epoch(epoch)

    def train(self, model, opt, dl):
        model.train()
        total = torch.zeros(())
        for x,y in dl:
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            self.backward(loss)
            opt.step()
            total += loss.detach()
        return total/len(dl)

    def backward(self, loss): loss.backward()

    @torch.no_grad()
    def validate(self, model, dl):
        model,sums = self.bare(model).eval(),torch.zeros(3)
        for x,y in dl:
            out = model(x)
            sums += torch.stack([F.cross_entropy(out, y, reduction='sum'), (out.argmax(1)==y).sum(), torch.tensor(len(y))])
        loss,hits,n = self.reduce(sums)
        return loss/n,hits/n

    def bare(self, model): return model.module if self.size>1 else model
    def reduce(self, sums):
        if self.size>1: dist.all_reduce(sums)
        return sums

class AccelerateLoop(Loop):
    "The same loop with Accelerate, which shares out the loaders and wraps what it is given"
    def __init__(self, rank, size):
        Peer.__init__(self, rank, size)
        self.acc = Accelerator(cpu=True)

    def fit(self, *args):
        super().fit(*args)
        self.acc.free_memory()

    def loader(self, w, steps, shuffle): return DataLoader(self.data(w, steps), w.bs, shuffle=shuffle and steps>0, drop_last=shuffle)
    def prepare(self, *args): return self.acc.prepare(*args)
    def set_epoch(self, dl, epoch): pass
    def backward(self, loss): self.acc.backward(loss)
    def bare(self, model): return model
    def reduce(self, sums): return self.acc.reduce(sums)

class AccelerateGather(AccelerateLoop):
    "The same with each batch of validation gathered, as Accelerate's own examples evaluate"
    @torch.no_grad()
    def validate(self, model, dl):
        model,sums = model.eval(),torch.zeros(3)
        for x,y in dl:
            out,y = self.acc.gather_for_metrics((model(x),y))
            sums += torch.stack([F.cross_entropy(out, y, reduction='sum'), (out.argmax(1)==y).sum(), torch.tensor(len(y))])
        loss,hits,n = sums
        return loss/n,hits/n
