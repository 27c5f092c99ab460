# compared: steps
# Movie reviews, the way of fastai's train_imdbclassifier: built by rank 0 first; dropout, and padding to the longest of a batch
from fastai.text.all import *
from fastdist import *
from _result import result

bs = 8
set_seed(1)
def get_dls():
    words = dict(pos='good fine great lovely'.split(), neg='bad poor dull sad'.split())
    df = pd.DataFrame([dict(text='the film was '+' '.join(random.choices(words[k], k=3+i%9)), label=k) for i in range(50) for k in words])
    return TextDataLoaders.from_df(df, text_col='text', label_col='label', valid_pct=.2, seed=2, bs=bs)

config = awd_lstm_clas_config | dict(emb_sz=16, n_hid=24)
learn = rank0_first(lambda: text_classifier_learner(get_dls(), AWD_LSTM, config=config, drop_mult=0.5, pretrained=False, metrics=accuracy))
with learn.distrib_ctx(): learn.fine_tune(1, 1e-2)
result(learn)
