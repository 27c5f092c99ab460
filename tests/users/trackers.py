# The best model is kept, and training stops when it gets no better
from fastai.vision.all import *
from fastdist import *
from sklearn.datasets import load_digits
from _result import result

bs = 16
set_seed(20)
xs,ys = load_digits(return_X_y=True)
data = [(tensor(x).float()/16, int(y)) for x,y in zip(xs[:240], ys)]
dls = DataLoaders.from_dsets(data[:160], data[160:], bs=bs)
cbs = [SaveModelCallback(fname='best', monitor='accuracy', with_opt=True),EarlyStoppingCallback('valid_loss', patience=2, min_delta=0.05),
    ReduceLROnPlateau('valid_loss', patience=1, min_delta=0.1),CSVLogger(),ShowGraphCallback(),TerminateOnNaNCallback()]
learn = Learner(dls, nn.Sequential(nn.Linear(64,20), nn.ReLU(), nn.Linear(20,10)), loss_func=CrossEntropyLossFlat(), metrics=accuracy, path='.')
with learn.distrib_ctx(): learn.fit(12, 5e-2, cbs=cbs)
log = pd.read_csv('history.csv')
result(learn, files=sorted(str(o) for o in Path('models').iterdir()), log=log.drop(columns='time').values.tolist())
