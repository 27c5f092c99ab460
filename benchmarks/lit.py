"Lightning's Trainer, with all that it does besides training switched off"
import logging
from lightning import LightningModule,Trainer
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import DataLoader
from work import Peer

class Module(LightningModule):
    def __init__(self, net, lr):
        super().__init__()
        self.net,self.lr = net,lr

    def configure_optimizers(self): return SGD(self.parameters(), self.lr)
    def training_step(self, batch, _): return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, _):
        out = self.net(batch[0])
        res = dict(loss=F.cross_entropy(out, batch[1]), accuracy=(out.argmax(1)==batch[1]).float().mean())
        self.log_dict(res, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(out))

class Lightning(Peer):
    def __init__(self, rank, size):
        super().__init__(rank, size)
        for k in ('lightning','lightning.pytorch','lightning.fabric'): logging.getLogger(k).setLevel(logging.ERROR)
        off = 'logger enable_checkpointing enable_progress_bar enable_model_summary'.split()
        self.options = dict(accelerator='cpu', devices=size, strategy='ddp' if size>1 else 'auto', num_sanity_val_steps=0, **dict.fromkeys(off, False))

    def fit(self, model, w, train, valid, epochs):
        dl = DataLoader(self.data(w, train), w.bs, shuffle=True, drop_last=True)
        valid_dl = DataLoader(self.data(w, valid), w.bs) if valid else None
        Trainer(max_epochs=epochs, **self.options).fit(Module(model, self.lr), dl, valid_dl)
