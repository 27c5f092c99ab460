"Small tasks of each kind, with the metrics that people take for them, and what a Learner reports of its fit"
from fastai.vision.all import *
from fastai.text.all import CorpusBLEUMetric,Perplexity
from fastdist import *
from compare import learner

exact = dict(rtol=1e-6, atol=1e-6)

def data(n, ys, seed=0):
    g = torch.Generator().manual_seed(seed)
    return list(zip(torch.randn(n, 8, generator=g), ys(n, g)))

def task(ys, model, loss, metrics, n, bs, rank=0):
    "A Learner on `n` samples for training and as many for validation, a ragged last batch among them"
    set_seed(3)
    learn = learner((data(n, ys),data(n, ys, 1)), model(), bs, rank, loss, drop_last=False)
    learn.metrics = L(metrics(n))
    return learn

def reports(learn, epochs=1, train_metrics=False):
    learn.recorder.train_metrics = train_metrics
    learn.fit(epochs, 0.05)
    return dict(names=learn.recorder.metric_names, values=learn.recorder.values, losses=L(learn.recorder.losses).map(float), record=learn.validate())

def confidence(p, y): return p.softmax(1).gather(1, y[:,None]).mean()

class Parts:
    "A loss that keeps its parts for `LossMetrics`"
    def __call__(self, p, y, reduction='mean'):
        self.fit,self.size = F.cross_entropy(p, y),p.pow(2).mean()
        return F.cross_entropy(p, y, reduction=reduction)+self.size/9

def pixels(n, g): return torch.randint(0, 2, (n,2,2), generator=g)
def tokens(n, g): return torch.randint(0, 5, (n,4), generator=g)
def numbers(n, g): return torch.rand(n, 1, generator=g)+.1

class Shaped(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.lin,self.shape = nn.Linear(8,math.prod(shape)),shape
    def forward(self, x): return self.lin(x).view(-1, *self.shape)

class Positive(Shaped):
    "Predictions above 0, or a logarithm in `msle` has no value, or makes much of the last bit of one near -1"
    def forward(self, x): return F.softplus(super().forward(x))

def two(n, g): return torch.randint(0, 2, (n,), generator=g)
def all_three(n, g): return torch.arange(n)%3
def kinds(n, g): return torch.randint(0, 3, (n,), generator=g)
def several(n, g): return torch.randint(0, 2, (n,3), generator=g).float()

binary = [accuracy, error_rate, AvgMetric(confidence), partial(top_k_accuracy, k=1), F1Score(), FBeta(2), Precision(), Recall(), RocAucBinary(),
    APScoreBinary(), MatthewsCorrCoef(), CohenKappa(), BalancedAccuracy(), HammingLoss(), Jaccard(), *LossMetrics('fit,size')]
classes = [accuracy, partial(top_k_accuracy, k=2), Perplexity(), F1Score(average='macro'), Precision(average='micro'), Recall(average='weighted')]
regression = [mse, mae, msle, rmse, exp_rmspe, R2Score(), ExplainedVariance(), SpearmanCorrCoef()]
multi = [accuracy_multi, F1ScoreMulti(), PrecisionMulti(), RecallMulti(), HammingLossMulti(), JaccardMulti(average='samples')]

# One process itself refuses some metrics of few samples
tasks = dict(binary=(two, partial(Shaped, 2), Parts(), lambda n: binary))
tasks['classes'] = all_three,partial(Shaped, 3),CrossEntropyLossFlat(),lambda n: classes+[RocAuc()][:n>2]
tasks['regression'] = numbers,partial(Positive, 1),MSELossFlat(),lambda n: regression+[PearsonCorrCoef()][:n>1]
tasks['multi'] = several,partial(Shaped, 3),BCEWithLogitsLossFlat(),lambda n: multi+[RocAucMulti()][:n>7]
tasks['pixels'] = pixels,partial(Shaped, 2, 2, 2),CrossEntropyLossFlat(axis=1),lambda n: [Dice(), JaccardCoeff(), DiceMulti(), JaccardCoeffMulti()]
tasks['tokens'] = tokens,partial(Shaped, 4, 5),CrossEntropyLossFlat(),lambda n: [CorpusBLEUMetric(5), Perplexity(), accuracy]

def measured(met, train_metrics, learn):
    learn.metrics = L(met())
    return reports(learn, getattr(met, 'epochs', 1), train_metrics)

def measured_together(mets, train_metrics, learn):
    "What each of `mets` tells of two epochs and of a validation"
    learn.metrics = L(o() for o in mets)
    res = reports(learn, 2, train_metrics)
    return dict(zip(res['names'][1:-1], zip(*res['values'], strict=True), strict=True), losses=res['losses'], record=dict(zip(['loss',*learn.metrics.attrgot('name')], res['record'], strict=True)))
