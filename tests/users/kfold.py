# Cross-validation: a Learner and a context for each fold
from fastai.vision.all import *
from fastdist import *
from sklearn.datasets import load_digits
from sklearn.model_selection import KFold
from _result import result

bs = 16
xs,ys = load_digits(return_X_y=True)
items,preds,scores = list(range(150)),torch.zeros(150, 10),[]
for fold,(train_idx,valid_idx) in enumerate(KFold(3, shuffle=True, random_state=1).split(items)):
    set_seed(fold)
    dls = DataBlock((TransformBlock,CategoryBlock(vocab=range(10))), get_x=lambda i: tensor(xs[i]).float()/16, get_y=lambda i: int(ys[i]),
        splitter=IndexSplitter(valid_idx)).dataloaders(items, bs=bs)
    model = nn.Sequential(nn.Linear(64,20,bias=False), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20,10))
    learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), metrics=accuracy)
    with learn.distrib_ctx():
        learn.fit_one_cycle(2, 1e-2)
        preds[valid_idx] = learn.get_preds()[0]
        scores.append(learn.validate()[1])
if rank_distrib()==0: print(f'{len(scores)} folds, mean accuracy {np.mean(scores):.3f}')
result(learn, preds=preds, scores=scores)
