"Small Learners on data that ships or is made here"
import warnings
from fastai.vision.all import *
from fastai.tabular.all import *
from fastai.collab import *
from fastai.text.all import *
from sklearn.datasets import load_digits

warnings.filterwarnings('ignore')

_digits = load_digits(return_X_y=True) # read before ranks are forked

def digits(n=360, bs=16, dls_kw=None, **kw):
    xs,ys = _digits
    data = [(torch.tensor(x).float()/16, int(y)) for x,y in zip(xs[:n], ys[:n])]
    cut = n*4//5
    dls = DataLoaders.from_dsets(data[:cut], data[cut:], bs=bs, num_workers=0, device='cpu', **(dls_kw or {}))
    model = nn.Sequential(nn.Linear(64,32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32,10))
    return Learner(dls, model, loss_func=CrossEntropyLossFlat(), metrics=accuracy, **kw)

def vision():
    imgs = [PILImage.create(np.random.RandomState(i).randint(0, 255, (32,32,3), dtype=np.uint8)) for i in range(24)]
    dblock = DataBlock((ImageBlock,CategoryBlock), get_x=lambda i: imgs[i], get_y=lambda i: 'ab'[i%2], splitter=IndexSplitter(range(16,24)),
        batch_tfms=[*aug_transforms(), Normalize.from_stats(*imagenet_stats)])
    return vision_learner(dblock.dataloaders(range(24), bs=4, num_workers=0), resnet18, pretrained=False, metrics=accuracy)

def tabular():
    df = pd.DataFrame(dict(size=range(60), kind=list('xyz')*20, y=[0,1]*30))
    dls = TabularDataLoaders.from_df(df, procs=[Categorify,Normalize], cat_names=['kind'], cont_names=['size'], y_names='y', y_block=CategoryBlock(),
        valid_idx=list(range(40,60)), bs=8)
    return tabular_learner(dls, layers=[8], metrics=accuracy)

def collab():
    df = pd.DataFrame(dict(user=[i%7 for i in range(80)], item=[i%5 for i in range(80)], rating=[float(i%5) for i in range(80)]))
    return collab_learner(CollabDataLoaders.from_df(df, bs=8, valid_pct=.2, seed=1), n_factors=4, y_range=(0,5.5))

def texts():
    words = 'good bad fine poor great dull'.split()
    return pd.DataFrame(dict(text=['the movie was '+' '.join([words[i%6]]*(i%9+1)) for i in range(60)], label=[str(i%3) for i in range(60)]))

tok = dict(text_col='text', valid_pct=.2, seed=1, tok_tfm=Tokenizer(BaseTokenizer(), rules=[]))

def language_model():
    config = awd_lstm_lm_config | dict(emb_sz=16, n_hid=24)
    return language_model_learner(TextDataLoaders.from_df(texts(), is_lm=True, bs=2, seq_len=8, **tok), AWD_LSTM, config=config, pretrained=False,
        metrics=[accuracy,Perplexity()])

def text_classifier():
    config = awd_lstm_clas_config | dict(emb_sz=16, n_hid=24)
    return text_classifier_learner(TextDataLoaders.from_df(texts(), label_col='label', bs=8, **tok), AWD_LSTM, config=config, pretrained=False, metrics=accuracy)
