"Options of an Accelerator hold for a Learner's context in the function that it distributes, as if they were the context's own, or are refused by the same error"
import pytest
from datetime import timedelta
from accelerate.utils import *
from fastai.basics import *
from fastcore.test import test_eq,expect_fail
from fastdist import *
from learners import digits

pytestmark = pytest.mark.timeout(300)
cpu = partial(Accelerator, compute_setup='cpu')

def seen(**opts):
    "What a context has of its options"
    learn = digits(n=40, bs=4)
    with learn.distrib_ctx(**opts):
        cb = learn.distributed_trainer
        live = cb.job.live
        handlers = live.ddp_options.find_unused_parameters,live.scaler_options,live.autocast_options
        acc = live.acc
        return live.accumulate,live.precision,cb.split,handlers,cb.plan is not None,str(acc.project_dir),str(acc.state.dynamo_plugin.backend),live.sync_each

def outcome(f):
    try: return f()
    except Exception as e: return type(e).__name__,str(e)

both = [dict(gradient_accumulation_steps=4), dict(gradient_accumulation_plugin=GradientAccumulationPlugin(3, sync_each_batch=True)), dict(split_batches=True),
    dict(dataloader_config=DataLoaderConfiguration(split_batches=True)), dict(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]),
    dict(project_dir='here'), dict(project_config=ProjectConfiguration('there')), dict(dynamo_backend='eager'), dict(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)),
    dict(rng_types=['torch']), dict(device_placement=False), dict(dataloader_config=DataLoaderConfiguration(even_batches=False)),
    dict(kwargs_handlers=[ProfileKwargs()]),
    dict(gradient_accumulation_plugin=GradientAccumulationPlugin(2, sync_with_dataloader=False)),
    dict(kwargs_handlers=[AutocastKwargs(cache_enabled=False),GradScalerKwargs(init_scale=4.)])]

@pytest.mark.parametrize('opts', both, ids=lambda o: first(o))
def test_an_option_means_the_same_in_both_forms(opts):
    "It changes the context, or both are refused alike"
    direct,given,none = outcome(partial(seen, cpu=True, **opts)),outcome(cpu(**opts).distribute(seen)),outcome(partial(seen, cpu=True))
    test_eq(str(given), str(direct))
    assert str(direct)!=str(none)

@pytest.mark.parametrize('n', [2,3])
def test_on_ranks(n):
    opts = dict(gradient_accumulation_steps=4, split_batches=True, mixed_precision='bf16', kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=50))])
    def f():
        learn = digits(n=48, bs=12)
        with learn.distrib_ctx(), learn.no_bar(), learn.no_logging():
            cb = learn.distributed_trainer
            learn.fit(1)
        return cb.patience,cb.split,len(learn.recorder.losses)
    test_eq(cpu(nprocs=n, **opts).distribute(f, start='fork')()[:2], (50.,True))
    res = cpu(nprocs=n, **opts).distribute(seen, start='fork', all_ranks=True)()
    test_eq([o[:3] for o in res], [(4,'bf16',True)]*n)

def test_precision_and_dtype_reach_the_batches():
    class Sees(Callback):
        order = 6
        def before_batch(self): self.learn.saw = self.x.dtype,next(self.model.parameters()).dtype
    def f():
        learn = digits(n=40, bs=4, cbs=Sees())
        with learn.distrib_ctx(), learn.no_bar(), learn.no_logging(): learn.fit(1)
        return learn.saw
    test_eq(cpu(nprocs=2, dtype=torch.float64).distribute(f, start='fork')(), (torch.float64,torch.float64))

def test_the_context_s_own_options_win():
    f = lambda: seen(gradient_accumulation_steps=2, dataloader_config=DataLoaderConfiguration())
    test_eq(cpu(gradient_accumulation_plugin=GradientAccumulationPlugin(4), split_batches=True, mixed_precision='bf16').distribute(f)()[:3], (2,'bf16',False))

def test_nothing_is_left_behind():
    cpu(gradient_accumulation_steps=4, mixed_precision='bf16').distribute(seen)()
    with expect_fail(ValueError): cpu(gradient_accumulation_steps=3).distribute(lambda: {}['lost'] if 0 else int('x'))()
    test_eq(seen(cpu=True)[:2], (1,'no'))

wrong = dict(mixed_precision='fp61', dynamo_backend='fast', log_with='paper', rng_types=['dice'], split_batches=3, cpu='yes', device_placement=2, step_scheduler_with_optimizer='no',
    gradient_accumulation_steps=0, gradient_accumulation_plugin=4, dataloader_config=dict(), project_config='x', project_dir=3,
    dynamo_plugin='eager', kwargs_handlers=[3],
    nprocs=0, compute_setup='tpu', log_setup='gpu', dtype=torch.int64)

@pytest.mark.parametrize('name', wrong)
def test_a_wrong_value_is_refused_before_ranks_start(name):
    with expect_fail(OptionError, f'{name} must be '): Accelerator(**{'nprocs':2, name:wrong[name]})

def test_two_handlers_of_one_class():
    with expect_fail(OptionError, 'one of each class'): cpu(kwargs_handlers=[ProfileKwargs(),ProfileKwargs()])

def test_what_fastai_has_itself_is_refused_with_its_own_hint():
    for opts,hint in ((dict(step_scheduler_with_optimizer=False), 'schedules by batches'), (dict(log_with='wandb'), 'a callback'), (dict(mixed_precision='fp8'), 'a loop of your own')):
        with expect_fail(OptionError, hint): cpu(**opts).distribute(seen)()

def test_a_misspelt_option_has_the_nearest_name():
    learn = digits(n=40)
    cases = dict(nproc='nprocs', num_processes='nprocs', devices='nprocs', precision='mixed_precision', bakend='backend', mixed_precison='mixed_precision')
    for k,v in cases.items():
        with expect_fail(TypeError, f"Accelerator has no option {k!r}. Did you mean {v!r}?"): Accelerator(**{k:2})
    for k,v in dict(sinc_bn='sync_bn', sync_batchnorm='sync_bn', sed='seed', gradient_accumulation='gradient_accumulation_steps', patiens='patience').items():
        with expect_fail(TypeError, f"distrib_ctx has no option {k!r}. Did you mean {v!r}?"):
            with learn.distrib_ctx(**{k:2}): pass
        with expect_fail(TypeError, f"to_distributed has no option {k!r}"): learn.to_distributed(**{k:2})
    with pytest.raises(TypeError, match='has no option') as e: Accelerator(deepspeed_plugn=2)
    assert 'deepspeed' not in str(e.value).partition("'deepspeed_plugn'")[2]

# What is given for a function

def test_a_call_in_the_place_of_a_function():
    learn = digits(n=40)
    for bad,what in ((None,'None'),(3,'a int'),(learn,'a Learner')):
        with expect_fail(TypeError, 'HINT: distribute(learn.fit)(1)'): cpu(nprocs=2).distribute(bad)
        with expect_fail(TypeError, 'HINT: rank0_first(func, *args)'): rank0_first(bad)

def test_a_partial_trains_the_learner_of_its_method():
    learn = digits(n=40, bs=4)
    before = learn.model[0].weight.clone()
    with learn.no_bar(), learn.no_logging(): pair = cpu(nprocs=2).distribute(partial(learn.fit, 1), start='fork')()
    assert not torch.equal(before, learn.model[0].weight) and len(learn.recorder.losses)==4
    assert pair[0] is learn.model and pair[1] is learn.opt and isinstance(pair, tuple) and len(repr(pair))<40

def test_a_class_makes_its_object_on_ranks(): test_eq(cpu(nprocs=2).distribute(Counted, start='fork')(), Counted())

class Counted:
    def __eq__(self, o): return type(o) is type(self)
