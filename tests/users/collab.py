# Who likes what, the way of fastai's collab tutorial
from fastai.collab import *
from fastai.tabular.all import *
from fastdist import *
from _result import result

bs = 16
set_seed(6)
ratings = pd.DataFrame(dict(user=[i%13 for i in range(230)], title=[f'film {i%7}' for i in range(230)], rating=[float((i*i)%6) for i in range(230)]))
dls = CollabDataLoaders.from_df(ratings, item_name='title', seed=42, bs=bs)
learn = collab_learner(dls, n_factors=5, y_range=(0,5.5))
with learn.distrib_ctx(): learn.fit_one_cycle(2, 5e-3, wd=0.1)
result(learn)
