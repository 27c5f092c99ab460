# What people do to look at data and model before they train, inside the context and with a patch of their own
from fastai.vision.all import *
from fastai.callback.tensorboard import TensorBoardCallback
from fastdist import *
from _result import result

bs = 6
set_seed(55)
@patch
def n_params(self:Learner): return sum(p.numel() for p in self.model.parameters())
def image(i): return PILImage.create(np.full((12,12,3), i*4, np.uint8))
dls = DataBlock((ImageBlock,CategoryBlock), get_x=image, get_y=lambda i: 'dim' if i<25 else 'bright', splitter=RandomSplitter(seed=1)).dataloaders(
    list(range(50)), bs=bs)
model = nn.Sequential(ConvLayer(3,8,stride=2), nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(8,2))
learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), metrics=accuracy, path='.')
with learn.distrib_ctx():
    shape = list(dls.one_batch()[0].shape[1:])
    before = learn.validate()
    sizes = [line for line in repr(learn.summary()).splitlines() if 'params' in line]
    learn.fit(2, 1e-2, cbs=TensorBoardCallback('logs', trace_model=False, log_preds=False))
    learn.show_results()
    after = learn.validate(dl=dls.test_dl(list(range(30)), with_labels=True))
    learn.recorder.plot_loss()
if rank_distrib()==0: print(learn.n_params(), 'parameters,', len(list(Path('logs').iterdir())), 'log')
result(learn, sizes=sizes, shape=shape, before=before, after=after)
