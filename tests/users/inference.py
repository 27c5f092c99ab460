# All that is done with a trained model: on all ranks inside the context, and on rank 0 after it
import multiprocessing
multiprocessing.set_start_method('fork', force=True) # outside of a context, for Python 3.14
from fastai.vision.all import *
from fastdist import *
from _result import result

bs = 6
set_seed(29)
def image(i): return PILImage.create(np.full((12,12,3), i*4, np.uint8))
def label(i): return 'dim' if i<25 else 'bright'
dls = DataBlock((ImageBlock,CategoryBlock), get_x=image, get_y=label, splitter=RandomSplitter(seed=1)).dataloaders(list(range(57)), bs=bs)
model = nn.Sequential(ConvLayer(3,8,stride=2), nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(8,2))
learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), metrics=accuracy, path='.')
with learn.distrib_ctx():
    learn.fit(1, 1e-2)
    preds,targs,losses = learn.get_preds(with_loss=True)
    tta,_ = learn.tta(n=2)
    test,_ = learn.get_preds(dl=dls.test_dl(list(range(5,16))))
    interp = Interpretation.from_learner(learn)
    top = interp.top_losses(3)
    confusion = ClassificationInterpretation.from_learner(learn).confusion_matrix().tolist()
    learn.export('model.pkl')
    loaded = load_learner('model.pkl')
    answer = str(learn.predict(3)[0])
    final = learn.validate()
if rank_distrib()==0:
    print('predicted', *[load_learner('model.pkl').predict(o)[0] for o in (1,50)])
    print('again', len(learn.get_preds()[0]))
found = dict(preds=preds, targs=targs, losses=losses, tta=tta, test=test, top=top, confusion=confusion, answer=answer, final=final)
result(learn, loaded=list(loaded.model.parameters()), **found)
