"What a seed costs: time of a step with `seed=` over that without, measured side by side. `python benchmarks/seeds.py [RANKS]`"
import sys,time
from fastcore.all import *
from fastai.vision.all import *
from fastdist import *
from fastdist.launch.fork import on_ranks

class Clock(Callback):
    "Seconds of this process in each step, not those of its neighbours"
    order,run_valid = -100,False
    def before_fit(self): self.times,self.at = [],None
    def before_batch(self):
        now = time.process_time()
        if self.at: self.times.append(now-self.at)
        self.at = now
    def after_train(self): self.at = None

def mlp(bs):
    "A network of three layers with dropout, on tensors"
    x,y = torch.randn(40*64, 50),torch.randint(0, 10, (40*64,))
    dls = DataLoaders.from_dsets(list(zip(x, y)), list(zip(x[:64], y[:64])), bs=bs, num_workers=0, device='cpu')
    ps = [o for a,b in ((50,400),(400,400)) for o in (nn.Linear(a, b),nn.ReLU(),nn.Dropout(.3))]
    return Learner(dls, nn.Sequential(*ps, nn.Linear(400, 10)), loss_func=CrossEntropyLossFlat(), cbs=Clock())

def cnn(bs):
    "A convolutional network on augmented images"
    ims = [PILImage.create((torch.rand(72, 72, 3)*255).byte().numpy()) for _ in range(16*16)]
    ds = Datasets(range(len(ims)), [[lambda i: ims[i]], [lambda i: i%10,Categorize(vocab=range(10))]], splits=[range(len(ims)),range(16)])
    tfms = dict(after_item=[RandomResizedCrop(64),ToTensor()], after_batch=[IntToFloatTensor(),*aug_transforms()])
    dls = ds.dataloaders(bs=bs, device='cpu', num_workers=0, **tfms)
    return Learner(dls, xresnet18(n_out=10), loss_func=CrossEntropyLossFlat(), cbs=Clock())

def medians(mk, n, rounds):
    "Median seconds of a step without a seed and with one; the two take turns"
    learn,times = mk(16//n if mk is cnn else 64//n),{None:[],42:[]}
    with learn.no_bar(),learn.no_logging():
        for seed in (None,42)*rounds:
            with learn.distrib_ctx(seed=seed, sync_bn=False): learn.fit(1, 1e-3)
            times[seed] += learn.clock.times[1:]
    return [float(np.median(o)) for o in times.values()]

def seeds(ranks:int=1):
    "Print for both networks the milliseconds of a step, and their ratio"
    res = {}
    for mk,rounds in ((mlp,6),(cnn,3)):
        plain,seeded = first(on_ranks(lambda rank: medians(mk, ranks, rounds), ranks, timeout=600)) if ranks>1 else medians(mk, 1, rounds)
        res[mk.__name__] = dict(plain=plain*1e3, seeded=seeded*1e3, ratio=seeded/plain)
        print(f'{mk.__name__}, {ranks} rank{"s" if ranks>1 else ""}: {plain*1e3:.2f} ms of a core a step without a seed, {seeded*1e3:.2f} ms with one, {seeded/plain:.2f} times')
    return res

if __name__=='__main__': seeds(*map(int, sys.argv[1:]))
