# A table with gaps, categories and numbers, the way of fastai's tabular tutorial
from fastai.tabular.all import *
from fastdist import *
from _result import result

bs = 16
set_seed(1)
rng = np.random.default_rng(0)
df = pd.DataFrame(dict(age=rng.integers(18, 80, 203).astype(float), hours=rng.integers(5, 60, 203), job=rng.choice(['clerk','smith','cook'], 203)))
df['rich'] = np.where(df.age+2*df.hours>110, 'yes', 'no')
df.loc[::17, 'age'] = np.nan
splits = RandomSplitter(seed=3)(range_of(df))
to = TabularPandas(df, procs=[Categorify,FillMissing,Normalize], cat_names=['job'], cont_names=['age','hours'], y_names='rich', splits=splits)
learn = tabular_learner(to.dataloaders(bs=bs), layers=[20,10], metrics=[accuracy,F1Score(),RocAucBinary()])
with learn.distrib_ctx(): learn.fit_one_cycle(2, 1e-2)
preds,targs = learn.get_preds()
result(learn, preds=preds)
