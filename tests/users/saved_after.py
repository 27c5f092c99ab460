# What is saved after the context is read at once, by all ranks
from fastai.tabular.all import *
from fastdist import *
from _result import result

set_seed(49)
bs = 8
df = pd.DataFrame(dict(a=np.arange(60.), b=list('xyz')*20, y=['no','yes']*30))
dls = TabularDataLoaders.from_df(df, procs=[Categorify,Normalize], cat_names=['b'], cont_names=['a'], y_names='y', valid_idx=list(range(40,60)), bs=bs)
learn = tabular_learner(dls, layers=[8], metrics=accuracy)
with learn.distrib_ctx(): learn.fit(2, cbs=SaveModelCallback())
learn.load('model')
learn.save('last')
learn.load('last')
learn.export()
with torch.no_grad():
    for p in learn.model.parameters(): p.zero_()
learn.model.load_state_dict(load_learner(learn.path/'export.pkl').model.state_dict())
result(learn)
