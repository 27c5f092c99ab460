# fails: (?i)rank 0
# fails: (?i)rank 1
# fails: predict|get_preds|validat|evaluat
# Rank 0 alone predicts inside the context, while the others train on
from fastai.tabular.all import *
from fastdist import *
from _result import result

set_seed(24)
df = pd.DataFrame(dict(a=np.arange(60.), b=list('xyz')*20, y=['no','yes']*30))
dls = TabularDataLoaders.from_df(df, procs=[Categorify,Normalize], cat_names=['b'], cont_names=['a'], y_names='y', valid_idx=list(range(40,60)), bs=8)
learn = tabular_learner(dls, layers=[8], metrics=accuracy)
with learn.distrib_ctx():
    learn.fit(1)
    if rank_distrib()==0: print(learn.predict(df.iloc[0]))
    learn.fit(1)
result(learn)
