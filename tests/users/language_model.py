# ranks: 3
# A language model on text that is made here, with a network that keeps its state from batch to batch
import multiprocessing
multiprocessing.set_start_method('fork', force=True) # outside of a context, for Python 3.14
from fastai.text.all import *
from fastdist import *
from _result import result

bs = 6
set_seed(1)
words = 'the cat dog sat ran on under a mat table'.split()
df = pd.DataFrame(dict(text=[' '.join(random.choices(words, k=20+i%7)) for i in range(60)]))
dls = TextDataLoaders.from_df(df, text_col='text', is_lm=True, valid_pct=.2, seed=1, bs=bs, seq_len=12)
class Net(Module):
    def __init__(self, n): self.emb,self.rnn,self.out,self.h = nn.Embedding(n, 12),nn.GRU(12, 16, batch_first=True),nn.Linear(16, n),None
    def reset(self): self.h = None
    def forward(self, x):
        if self.h is not None and self.h.shape[1]!=len(x): self.h = None
        res,h = self.rnn(self.emb(x), self.h)
        self.h = h.detach()
        return self.out(res)
learn = Learner(dls, Net(len(dls.vocab)), loss_func=CrossEntropyLossFlat(), metrics=[accuracy,Perplexity()], cbs=ModelResetter())
with learn.distrib_ctx(): learn.fit_one_cycle(2, 1e-2)
result(learn)
