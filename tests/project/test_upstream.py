"Bodies of fastai and torch that fastdist has written again, or relies on line by line: a test fails where one has changed. `python tests/project/test_upstream.py` notes those of the versions that are installed, once they were compared"
import ast,csv,hashlib,importlib.util,pytest
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

path,columns = Path(__file__).parent/'upstream.csv',('module','name','version','body')
# module, module or class, and what of it
written_again = '''
train.step fastai.learner:Learner _set_device _split _do_one_batch _backward
train.step fastai.losses:BaseLoss __call__ _contiguous
train.events fastai.callback.core:Callback __call__
train.events fastai.callback.core:TrainEvalCallback after_batch
train.events fastai.learner:CastToTensor before_batch
train.events fastai.learner: _cast_tensor
train.events fastai.learner:Learner _with_events
train.events fastai.learner:Learner __call__ _call_one
train.events fastai.callback.core:Callback __setattr__
train.step fastai.learner:Learner all_batches one_batch
parallel.foreach fastai.optimizer: sgd_step weight_decay l2_reg average_grad average_sqr_grad momentum_step rms_prop_step step_stat debias adam_step radam_step _update
parallel.foreach fastai.optimizer:Optimizer step zero_grad
parallel.foreach fastai.optimizer:Lookahead step
train.trainer fastai.callback.schedule:LRFinder before_fit after_fit
train.trainer fastai.callback.schedule:ParamScheduler before_fit
train.scale fastai.callback.training:GradientAccumulation before_fit after_loss before_step
parallel.context fastai.callback.fp16:MixedPrecision __init__ before_fit before_batch after_pred after_loss before_backward before_step after_step after_fit
parallel.passes torch.autograd: backward
shard.optimizer torch.amp.grad_scaler:GradScaler _unscale_grads_ unscale_ step _maybe_opt_step
train.events fastai.learner:Recorder after_batch
train.events fastai.learner:AvgSmoothLoss accumulate
evaluate.evaluate fastai.callback.core:GatherPredsCallback before_validate after_batch after_validate
evaluate.evaluate fastai.learner:Learner get_preds
data.fetch fastai.data.load:DataLoader __iter__ create_batches create_item create_batch do_item do_batch chunkify retain
data.sharding fastai.data.load:DataLoader get_idxs shuffle_fn randomize sample
data.sharding torch.utils.data.sampler:BatchSampler __iter__
data.sharding torch.utils.data.sampler:RandomSampler __iter__
saving fastai.learner:Learner save export
saving fastai.text.learner:TextLearner save_encoder
saving fastai.text.learner: load_ignore_keys
learner fastai.learner:Learner _do_fit
learner fastai.distributed: rank0_first setup_distrib teardown_distrib'''

def bodies():
    "Pairs of a module and a name"
    for module,place,*names in map(str.split, written_again.split('\n')[1:]):
        yield from ((module, place+n if place[-1]==':' else f'{place}.{n}') for n in names)

@lru_cache
def _defined(module):
    "Qualified name -> code of the functions in `module`, which is read and not imported; a patch of fastcore's counts for its class"
    res = {}
    for o in ast.parse(Path(importlib.util.find_spec(module).origin).read_text()).body:
        if isinstance(o, ast.ClassDef): res |= {f'{o.name}.{f.name}':f for f in o.body if isinstance(f, ast.FunctionDef)}
        if not isinstance(o, ast.FunctionDef): continue
        owner = o.args.args[0].annotation if 'patch' in [getattr(d, 'id', '') for d in o.decorator_list] else None
        res[f'{ast.unparse(owner)}.{o.name}' if owner else o.name] = o
    return res

def body(name):
    "Return a hash of the code of `name`, without comments and docstring"
    module,_,k = name.partition(':')
    f = _defined(module)[k]
    if ast.get_docstring(f) is not None: f.body = f.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.unparse(f).encode()).hexdigest()[:16]

def noted():
    with path.open(newline='') as f: return list(csv.DictReader(f))

def installed(name): return name.partition('.')[0]+' '+version(name.partition('.')[0]).partition('+')[0]

@pytest.mark.parametrize('module,name', bodies())
def test_body(module, name):
    "A version whose body is as in one that was compared is fine"
    rows = [o for o in noted() if o['name']==name and o['module']==module]
    assert body(name) in [o['body'] for o in rows], (f'{name} of {installed(name)} is not what fastdist/{module.replace(".", "/")}.py was written after ({", ".join(o["version"] for o in rows)}). '
        'HINT: compare the two, follow the change, then run python tests/project/test_upstream.py')

def test_modules_are_there():
    package = Path(__file__).parents[2]/'fastdist'
    assert not (gone := {o for o,_ in bodies() if not (package/f'{o.replace(".", "/")}.py').exists()}), gone

def test_what_is_not_written_again_is_not_noted(): assert {(o['module'],o['name']) for o in noted()}<={*bodies()}

def main():
    "Note the bodies of the versions that are installed"
    rows = [o for o in noted() if (o['module'],o['name']) in {*bodies()}] if path.exists() else []
    known = {(o['module'],o['name'],o['body']) for o in rows}
    rows += [dict(zip(columns, (r,n,installed(n),body(n)))) for r,n in bodies() if (r,n,body(n)) not in known]
    with path.open('w', newline='') as f:
        w = csv.DictWriter(f, columns, lineterminator='\n')
        w.writeheader()
        w.writerows(sorted(rows, key=lambda o: [o[k] for k in columns]))

if __name__=='__main__': main()
