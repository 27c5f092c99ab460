# compared: steps
# under: torchrun, accelerate
# Nobody set a seed: the order of the rows, a column, the split, statistics and weights are alike on all ranks, as the launch has drawn them
from fastai.tabular.all import *
from fastdist import *
from sklearn.datasets import load_iris
from _result import result

bs = 8
df = load_iris(as_frame=True).frame.sample(frac=1, ignore_index=True)
df['near'] = [random.choice(['a','b','c']) for _ in range(len(df))]
*conts,target,_ = df.columns
to = TabularPandas(df, [Categorify,Normalize], ['near'], conts, target, CategoryBlock(), splits=RandomSplitter()(range_of(df)))
learn = tabular_learner(to.dataloaders(bs=bs), layers=[8], metrics=accuracy)
begin = [*learn.model.parameters()][-1].tolist()
with learn.distrib_ctx(): learn.fit(2)
result(learn, valid=sorted(to.valid.items.index), means=[*to.procs.normalize.means.values()], rows=df.near.tolist(), begin=begin)
