"What `promises.py` asks of each peer: to train, evaluate and predict as one process does, to hear of an error on another rank, and to go on after a kill"
import logging,os,signal,time,torch
from pathlib import Path
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from loops import Accelerator

n_train,n_valid,bs,epochs,lr = 50,21,8,3,.5 # neither number of samples divides by two ranks with 8 a batch

def samples(n, seed):
    g = torch.Generator().manual_seed(seed)
    xs = torch.randn(n, 4, generator=g)
    return list(zip(xs, (xs.sum(1)>0).long()))

train,valid = samples(n_train, 0),samples(n_valid, 1)

class Fails(Exception): pass

def weights(model): return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()

class Promised:
    "Base of peers, one object a rank: `fit` trains a model, and calls `step` with the number of each step before its backward pass"
    heard = None # when a fit has raised an error of another rank; by default when the whole call has
    def __init__(self, rank, size): self.rank,self.size,self.step = rank,size,lambda i: None

    def __call__(self, what, *args): return getattr(self, what)(*args)

    def model(self):
        torch.manual_seed(0)
        return nn.Linear(4, 2)

    def exact(self, bs):
        "Return parameters, accuracy and predictions"
        model = self.model()
        acc,preds = self.fit(model, bs)
        return weights(model),float(acc),preds.tolist()

    def failing(self):
        "Return the seconds after which this rank knows that rank 1 has failed in step 2, and what it raises"
        at = []
        def step(i):
            at.append(time.monotonic())
            if self.rank==1 and i==2: raise Fails('in step 2')
        self.step = step
        try: self.fit(self.model(), bs)
        except BaseException as e: return (self.heard or time.monotonic())-at[-1],f'{type(e).__name__}: {e}'
        return None,'it went on'

    def survives(self, folder, kill):
        "Return the parameters; end by SIGKILL in step `kill`, if there is one"
        def step(i):
            if i==kill and self.rank==1: os.kill(os.getpid(), signal.SIGKILL)
        self.step = step
        model = self.model()
        self.fit_from(model, Path(folder))
        return weights(model)

class ByAccelerate(Promised):
    "The loop of Accelerate's examples, with `gather_for_metrics`; states by its `save_state` after every second step"
    def __init__(self, rank, size):
        super().__init__(rank, size)
        self.acc = Accelerator(cpu=True)

    def loaders(self, bs): return DataLoader(train, bs),DataLoader(valid, bs)

    def fit(self, model, bs, folder=None):
        acc = self.acc
        model,opt,dl,valid_dl = acc.prepare(model, torch.optim.SGD(model.parameters(), lr), *self.loaders(bs))
        for i in range(self.go_on(folder, acc), epochs*len(dl)):
            if not i%len(dl) or i==self.begun: batches = iter(acc.skip_first_batches(dl, i%len(dl)))
            x,y = next(batches)
            self.step(i)
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            acc.backward(loss)
            opt.step()
            if folder and i%2: self.save(folder, acc, i+1)
        with torch.no_grad(): outs = [acc.gather_for_metrics((model(x),y)) for x,y in valid_dl]
        preds,ys = map(torch.cat, zip(*outs))
        acc.free_memory()
        return (preds.argmax(1)==ys).float().mean(),preds

    def go_on(self, folder, acc):
        self.begun = 0
        done = sorted(folder.glob('*/done'), key=lambda o: int(o.parent.name)) if folder and folder.exists() else []
        if done:
            acc.load_state(done[-1].parent)
            self.begun = int(done[-1].parent.name)
        return self.begun

    def save(self, folder, acc, i):
        acc.save_state(folder/str(i))
        acc.wait_for_everyone()
        if acc.is_main_process: (folder/str(i)/'done').touch()

    def fit_from(self, model, folder): self.fit(model, bs, folder)

class ByLightning(Promised):
    "Lightning's Trainer, with what it documents for each question"
    def __init__(self, rank, size):
        import lightning
        super().__init__(rank, size)
        self.lit = lightning
        for k in ('lightning','lightning.pytorch','lightning.fabric'): logging.getLogger(k).setLevel(logging.ERROR)

    def module(self, model):
        peer = self
        class Module(self.lit.LightningModule):
            def __init__(self):
                super().__init__()
                self.net = model
            def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr)
            def training_step(self, batch, _):
                peer.step(self.global_step)
                return F.cross_entropy(self.net(batch[0]), batch[1])
            def validation_step(self, batch, _):
                self.log('accuracy', (self.net(batch[0]).argmax(1)==batch[1]).float().mean(), on_epoch=True, sync_dist=True, batch_size=len(batch[0]))
            def predict_step(self, batch, _): return self.net(batch[0])
        return Module()

    def trainer(self, callbacks=None, **kw):
        off = dict.fromkeys('logger enable_progress_bar enable_model_summary'.split(), False)
        return self.lit.Trainer(max_epochs=epochs, accelerator='cpu', devices=self.size, strategy='ddp' if self.size>1 else 'auto', num_sanity_val_steps=0, callbacks=callbacks,
            enable_checkpointing=bool(callbacks), **off, **kw)

    def fit(self, model, bs):
        t,m = self.trainer(),self.module(model)
        t.fit(m, DataLoader(train, bs), DataLoader(valid, bs))
        return t.callback_metrics['accuracy'],torch.cat(t.predict(m, DataLoader(valid, bs)))

    def fit_from(self, model, folder):
        from lightning.pytorch.callbacks import ModelCheckpoint
        t = self.trainer([ModelCheckpoint(folder, every_n_train_steps=2, save_last=True, save_top_k=-1)])
        t.fit(self.module(model), DataLoader(train, bs), DataLoader(valid, bs), ckpt_path='last' if (folder/'last.ckpt').exists() else None)

class ByFastai(Promised):
    "A fastai Learner in a context, with accuracy from the recorder, and `get_preds`"
    def learner(self, model, bs, *cbs):
        from fastai.basics import DataLoaders,Learner,CrossEntropyLossFlat,SGD,accuracy,Callback
        peer = self
        class Steps(Callback):
            def after_pred(self):
                if self.training: peer.step(self.train_iter)
        dls = DataLoaders.from_dsets(train, valid, bs=bs, shuffle=False, drop_last=False, num_workers=0, device='cpu')
        return Learner(dls, model, loss_func=CrossEntropyLossFlat(), opt_func=SGD, metrics=accuracy, cbs=[Steps(),*cbs])

    def fit(self, model, bs, *cbs):
        learn = self.learner(model, bs, *cbs)
        with learn.no_bar(), learn.no_logging(), self.context(learn):
            try: learn.fit(epochs, lr)
            except BaseException:
                self.heard = time.monotonic()
                raise
            acc = learn.recorder.values[-1][-1]
            preds = learn.get_preds(act=lambda o: o)[0]
        return acc,preds

class ByFastaiDistributed(ByFastai):
    "`fastai.distributed`, patched to run without a GPU"
    def __init__(self, rank, size):
        from fast import join_without_gpu
        super().__init__(rank, size)
        join_without_gpu()
    def context(self, learn): return learn.distrib_ctx(sync_bn=False, cpu=True)
    def fit_from(self, model, folder): raise NotImplementedError('it has no way to go on in the midst of a fit')

class ByFastdist(ByFastai):
    def __init__(self, rank, size):
        import fastdist
        super().__init__(rank, size)
        self.fastdist = fastdist
    def context(self, learn): return learn.distrib_ctx()
    def fit_from(self, model, folder): self.fit(model, bs, self.fastdist.Checkpoint(folder, every=2))
