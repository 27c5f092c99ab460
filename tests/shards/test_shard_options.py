"Options that divide a model over ranks: each field of Accelerate's plugin and of a YAML file is honoured or refused by name, and Accelerate itself never shards"
import os,pickle,pytest,re,torch,yaml
from dataclasses import fields
from functools import partial
from unittest import mock
from accelerate.commands.launch import _validate_launch_command,launch_command_parser
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin,DistributedDataParallelKwargs,DistributedType,FullyShardedDataParallelPlugin
from accelerate.utils import ParallelismConfig,TorchTensorParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy,MixedPrecision,MixedPrecisionPolicy,ShardedStateDictConfig,ShardedOptimStateDictConfig,ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy,size_based_auto_wrap_policy,transformer_auto_wrap_policy
from fastcore.test import expect_fail,test_eq
from fastdist import *
from fastdist.base.errors import OptionError
from fastdist.launch.options import ProcessAccelerator,check_env,check_options,forget_state,has_state,open_accelerate
from fastdist.shard.plan import ShardPlan,shard_plan
from fastdist.launch.group import this_world
from fastdist.launch.world import World

Plugin,bf16,linear = FullyShardedDataParallelPlugin,torch.bfloat16,nn.Linear(1,1)
wrap = ModuleWrapPolicy([nn.Linear])
one,two = (partial(Plugin, fsdp_version=v) for v in (1,2))

@pytest.fixture(autouse=True)
def clean(monkeypatch):
    "A plugin writes to the environment while it is made"
    for k in ('FSDP_CPU_RAM_EFFICIENT_LOADING','ACCELERATE_USE_FSDP'):
        monkeypatch.setenv(k, '')
        monkeypatch.delenv(k)

def said(e): return re.search(r'HINT: \S|must be .*, got ', str(e.value))
def plan(plugin, env={}, **kw): return shard_plan(False, plugin, env, **kw)

# Fields of a plugin

strategies = dict(FULL_SHARD=(True,False), SHARD_GRAD_OP=(False,False), HYBRID_SHARD=(True,True), HYBRID_SHARD_ZERO2=(False,True))
def lies(reshard, hybrid): return dict(reshard=reshard, hybrid=hybrid)
def flag(name, to, makes=(one,two)): return [(o, {name:v}, {to:v}) for o in makes for v in (True,False)]

uncast = MixedPrecisionPolicy(bf16, cast_forward_inputs=False)
has = {f.name for f in fields(Plugin)}
of_1_10 = 'activation_checkpointing_offload' not in has # Accelerate 1.10, which takes no text for a policy
mixed = [(two, 'bf16', MixedPrecisionPolicy(bf16, bf16, bf16)), (two, uncast, uncast),
    (one, MixedPrecision(bf16, torch.float32, cast_root_forward_inputs=False), MixedPrecisionPolicy(bf16, torch.float32, cast_forward_inputs=False))]

# Version of the plugin, what is set, what the plan then has

names = [(two, dict(auto_wrap_policy=p, transformer_cls_names_to_wrap=['A','B']), dict(classes=('A','B'), one_unit=False))
    for p in ('TRANSFORMER_BASED_WRAP',transformer_auto_wrap_policy,None)]
sizes = [(two, dict(auto_wrap_policy=p, min_num_params=7), dict(min_params=7, one_unit=False)) for p in ('SIZE_BASED_WRAP',size_based_auto_wrap_policy,None)]
ways = [(two, {}, dict(one_unit=True)), (two, dict(auto_wrap_policy='NO_WRAP'), dict(one_unit=True)),
    (two, dict(auto_wrap_policy=wrap), dict(policy=wrap, one_unit=False)), (two, dict(auto_wrap_policy='TRANSFORMER_BASED_WRAP'), dict(classes=(), one_unit=False))]
by_strategy = {k:[(one, {k:s}, lies(*v)) for s,v in strategies.items()] for k in ('sharding_strategy','reshard_after_forward')}
by_strategy['sharding_strategy'].append((two, dict(sharding_strategy='HYBRID_SHARD', reshard_after_forward=False), lies(False, True)))
by_strategy['reshard_after_forward'] += [(one, dict(reshard_after_forward=ShardingStrategy.HYBRID_SHARD), lies(True, True)), *flag('reshard_after_forward', 'reshard', [two])]
kinds = [(o, dict(state_dict_type=k), dict(full_state=k=='full_state_dict')) for o in (one,two) for k in ('full_state_dict','sharded_state_dict')]
left = [(o, dict(ignored_modules=v), dict(ignored=v if v=='0.*' else (linear,))) for o in (one,two) for v in ([linear],'0.*',iter([linear]))]

precisions = [(o, dict(mixed_precision_policy=v), dict(mixed=p)) for o,v,p in mixed if not (of_1_10 and isinstance(v, str))]
versions = [(two, {}, dict(full_state=False)), (one, {}, dict(full_state=True))]
offload = flag('cpu_offload', 'offload')+[(two, dict(cpu_offload=CPUOffloadPolicy()), dict(offload=True))]
flags = dict(activation_checkpointing=flag('activation_checkpointing', 'checkpointing'), cpu_ram_efficient_loading=flag('cpu_ram_efficient_loading', 'rank0_loads', [two]))

honoured = by_strategy | flags | dict(fsdp_version=versions, auto_wrap_policy=ways, transformer_cls_names_to_wrap=names, min_num_params=sizes,
    ignored_modules=left, state_dict_type=kinds, mixed_precision_policy=precisions, cpu_offload=offload)

refused = dict(backward_prefetch=[(one, 'BACKWARD_PRE'), (one, 'BACKWARD_POST')], forward_prefetch=[(one, True)], limit_all_gathers=[(one, False), (two, False)],
    use_orig_params=[], sync_module_states=[], # nobody can tell their False from that of a plugin where they were not set
    param_init_fn=[(two, print)], state_dict_config=[(two, ShardedStateDictConfig(offload_to_cpu=False))],
    optim_state_dict_config=[(two, ShardedOptimStateDictConfig(offload_to_cpu=False))])
if not of_1_10: refused['activation_checkpointing_offload'] = [(two, True)]

def test_each_field_is_honoured_or_refused(): test_eq(sorted(has), sorted(honoured|refused))

@pytest.mark.parametrize('name', honoured)
def test_honoured(name):
    for make,kw,want in honoured[name]:
        got = plan(make(**kw))
        test_eq({k:getattr(got, k) for k in want}, want)

@pytest.mark.parametrize('name', refused)
def test_refused(name):
    for make,v in refused[name]:
        more = dict(activation_checkpointing=True) if name.startswith('activation') else {}
        with pytest.raises(OptionError, match=f'You set {name}=') as e: plan(make(**{name:v}, **more))
        assert said(e)

def test_shards_need_torch_2_11():
    for kw in (dict(shard=True, fsdp_plugin=None), dict(shard=False, fsdp_plugin=two())):
        with mock.patch.object(torch, '__version__', '2.10.1+cpu'), expect_fail(OptionError, 'torch must be 2.11 or later for shards'): shard_plan(env={}, **kw)
        with mock.patch.object(torch, '__version__', '2.11.0'): shard_plan(env={}, **kw)

def test_a_field_of_a_later_version():
    p = two()
    p.__dataclass_fields__ = fields_ = dict(Plugin.__dataclass_fields__)
    fields_['sparse'] = type('Field', (), dict(name='sparse', _field_type=fields_['fsdp_version']._field_type))()
    p.sparse,Plugin.sparse = True,False
    try:
        with pytest.raises(OptionError, match='You set sparse=True'): plan(p)
        p.sparse = False
        plan(p)
    finally: del Plugin.sparse

@pytest.mark.parametrize('kw,name', [(dict(sharding_strategy='NO_SHARD'), 'sharding_strategy'), (dict(state_dict_type='LOCAL_STATE_DICT'), 'state_dict_type'),
    (dict(min_num_params=-1), 'min_num_params'), (dict(auto_wrap_policy='SIZE_BASED_WRAP'), 'min_num_params'), (dict(auto_wrap_policy=wrap, min_num_params=3), 'min_num_params'),
    (dict(auto_wrap_policy='TRANSFORMER_BASED_WRAP', min_num_params=3), 'min_num_params'), (dict(auto_wrap_policy=3), 'auto_wrap_policy'),
    (dict(auto_wrap_policy=wrap, transformer_cls_names_to_wrap=['A']), 'transformer_cls_names_to_wrap'), (dict(transformer_cls_names_to_wrap=[nn.Linear]), 'transformer_cls'),
    (dict(ignored_modules='('), 'ignored_modules'), (dict(ignored_modules=[1]), 'ignored_modules'), (dict(mixed_precision_policy=MixedPrecision(buffer_dtype=bf16) if of_1_10 else 'bf16'), 'mixed_precision_policy.buffer_dtype'),
    (dict(mixed_precision_policy=MixedPrecision(keep_low_precision_grads=True)), 'mixed_precision_policy.keep_low_precision_grads')])
def test_values_without_a_meaning(kw, name):
    with pytest.raises(OptionError, match=name) as e: plan(one(**kw))
    assert said(e)

# Other ways to say it

def test_replicas_shards_and_details():
    test_eq(shard_plan(False, None, {}), None)
    test_eq(shard_plan(True, None, {}), ShardPlan())
    test_eq(shard_plan(True, None, {}, keep=True).keep, True)
    test_eq(shard_plan(True, two(reshard_after_forward=False), {}), ShardPlan(False))
    test_eq([shard_plan(True, None, dict(ACCELERATE_USE_FSDP='true') | o).one_unit for o in ({},dict(FSDP_AUTO_WRAP_POLICY='NO_WRAP'))], [False,True])
    test_eq(shard_plan(False, None, dict(ACCELERATE_USE_FSDP='false', FSDP_VERSION='2')), None)
    test_eq(pickle.loads(pickle.dumps(plan(two(min_num_params=3)))), plan(two(min_num_params=3)))

@pytest.mark.parametrize('args,name', [((1,None,{}), 'shard'), ((None,None,{}), 'shard'), ((True,object(),{}), 'fsdp_plugin'), ((False,None,{},True), 'keep_sharded'),
    ((True,None,{},False,[DistributedDataParallelKwargs(static_graph=True)]), 'kwargs_handlers')])
def test_wrong_arguments(args, name):
    with pytest.raises(OptionError, match=name) as e: shard_plan(*args)
    assert said(e)

def test_offloading_on_cpu_ranks():
    with pytest.warns(UserWarning, match='You set cpu_offload'): got = plan(two(cpu_offload=True)).on(World(cpu=True))
    test_eq(got.offload, False)

# What `accelerate launch` sets

def launched(path, **config):
    "Return the variables that `accelerate launch` sets for a YAML file with `config` below `fsdp_config`"
    job = dict(compute_environment='LOCAL_MACHINE', distributed_type='FSDP', num_processes=2, num_machines=1, machine_rank=0, mixed_precision='no')
    path.write_text(yaml.dump(job | dict(fsdp_config=config)))
    args,*_ = _validate_launch_command(launch_command_parser().parse_args(['--config_file', str(path), 'train.py']))
    return {k:v for k,v in prepare_multi_gpu_env(args).items() if 'FSDP' in k}

first = dict(fsdp_auto_wrap_policy='TRANSFORMER_BASED_WRAP', fsdp_transformer_layer_cls_to_wrap='Block,Head', fsdp_backward_prefetch='BACKWARD_PRE',
    fsdp_cpu_ram_efficient_loading=True, fsdp_forward_prefetch=False, fsdp_offload_params=False, fsdp_reshard_after_forward='HYBRID_SHARD', fsdp_state_dict_type='SHARDED_STATE_DICT',
    fsdp_sync_module_states=True, fsdp_use_orig_params=True, fsdp_version=1, fsdp_activation_checkpointing=False)
second = dict(fsdp_version=2, fsdp_reshard_after_forward=False, fsdp_offload_params=True, fsdp_auto_wrap_policy='SIZE_BASED_WRAP', fsdp_min_num_params=500,
    fsdp_state_dict_type='FULL_STATE_DICT', fsdp_cpu_ram_efficient_loading=False, fsdp_activation_checkpointing=True, fsdp_ignored_modules='0.*')

said_nothing = dict(one_unit=True, full_state=True, rank0_loads=True)
plans = [(first, ShardPlan(True, True, ('Block','Head'), rank0_loads=True)), ({}, ShardPlan(True, **said_nothing)),
    (dict(fsdp_sharding_strategy=2), ShardPlan(False, **said_nothing)),
    (second, ShardPlan(False, min_params=500, offload=True, checkpointing=True, ignored='0.*', full_state=True))]

@pytest.mark.parametrize('config,want', plans)
def test_a_yaml_file(config, want, tmp_path):
    env = launched(tmp_path/'config.yaml', **config)
    before = dict(os.environ)
    test_eq(shard_plan(False, None, env), want)
    test_eq(dict(os.environ), before)
    check_env(env)

@pytest.mark.parametrize('k,v', [('backward_prefetch','BACKWARD_POST'), ('forward_prefetch',True), ('use_orig_params',False), *[(o, True) for o in ['activation_checkpointing_offload'] if o in has],
    ('sharding_strategy','NO_SHARD'), ('state_dict_type','LOCAL_STATE_DICT'), ('state_dict_type','HALF'), ('offload_params','perhaps')])
def test_a_yaml_file_with_what_has_no_effect(k, v, tmp_path):
    with pytest.raises(OptionError, match='cpu_offload' if k=='offload_params' else k) as e: shard_plan(False, None, launched(tmp_path/'config.yaml', **{f'fsdp_{k}':v}))
    assert said(e)

def test_a_plugin_beside_a_yaml_file(tmp_path, monkeypatch):
    "A plugin takes from the environment what its maker leaves out; nothing of that was set on the plugin"
    env = launched(tmp_path/'config.yaml', **first | dict(fsdp_cpu_ram_efficient_loading=False)) | dict(FSDP_SYNC_MODULE_STATES='false')
    for k,v in env.items(): monkeypatch.setenv(k, v)
    with pytest.raises(OptionError, match="You set sync_module_states='false'"): plan(one(), env)
    test_eq(plan(one(), env | dict(FSDP_SYNC_MODULE_STATES='true')).classes, ('Block','Head'))

# Accelerate is told of none of it

def opened(rank):
    os.environ.update(ACCELERATE_USE_FSDP='true', FSDP_SYNC_MODULE_STATES='true') # without a GPU Accelerate cannot make a plugin of these
    acc = ProcessAccelerator(this_world(), fsdp_plugin=object()) # which Accelerate would not take
    res = acc.acc.distributed_type,type(acc.prepare(nn.Linear(1,1))).__name__
    acc.release()
    return *res,os.environ['ACCELERATE_USE_FSDP']

def test_accelerate_makes_replicas(): test_eq(on_ranks(opened, join=True), [(DistributedType.MULTI_CPU,'DistributedDataParallel','true')]*2)

def test_a_state_that_the_user_made_with_fsdp():
    try:
        open_accelerate(World(cpu=True))
        AcceleratorState._shared_state['distributed_type'] = DistributedType.FSDP
        test_eq(open_accelerate(World(cpu=True)).distributed_type, DistributedType.NO)
    finally: forget_state()

def test_a_loop_of_ones_own_is_not_sharded(monkeypatch):
    with pytest.raises(OptionError, match='fsdp_plugin') as e: Accelerator(compute_setup='cpu', fsdp_plugin=two()).prepare(nn.Linear(1,1))
    assert said(e) and not has_state()
    monkeypatch.setenv('ACCELERATE_USE_FSDP', 'true')
    with pytest.raises(OptionError, match='ACCELERATE_USE_FSDP.*a Learner') as e: Accelerator(compute_setup='cpu').prepare(nn.Linear(1,1))
    assert said(e) and not has_state()

# Others that divide a model

cases = dict(zip((1,2,3), ('reshard_after_forward=False','reshard_after_forward=False',r'learn.distrib_ctx\(shard=True\)')))

@pytest.mark.parametrize('own_loop', [False,True])
@pytest.mark.parametrize('stage', cases)
def test_zero(stage, own_loop):
    with pytest.raises(OptionError, match=f'deepspeed_plugin.*ZeRO-{stage} .*{cases[stage]}'): check_options(own_loop, deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage))
    with pytest.raises(OptionError, match=f'deepspeed_plugins.*ZeRO-{stage} .*{cases[stage]}'): check_options(own_loop, deepspeed_plugins=dict(a=DeepSpeedPlugin(zero_stage=stage)))
    env = dict(ACCELERATE_USE_DEEPSPEED='true', ACCELERATE_DEEPSPEED_ZERO_STAGE=str(stage), ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE='none')
    with pytest.raises(OptionError, match=f'ACCELERATE_USE_DEEPSPEED.*ZeRO-{stage} .*{cases[stage]}'): check_env(env, own_loop)
    with pytest.raises(OptionError, match='cpu_offload=True'): check_env(env | dict(ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE='nvme'), own_loop)

def test_zero_of_a_file():
    cfg = dict(train_micro_batch_size_per_gpu=1, zero_optimization=dict(stage=3, offload_optimizer=dict(device='cpu')))
    with pytest.raises(OptionError, match='ZeRO-3 .*cpu_offload=True'): check_options(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=cfg))
    with pytest.raises(OptionError, match='shard=True.*ZeRO-1'): check_env(dict(ACCELERATE_USE_DEEPSPEED='1', ACCELERATE_DEEPSPEED_CONFIG_FILE='ds.json'))

others = dict(torch_tp_plugin=TorchTensorParallelPlugin(2), parallelism_config=ParallelismConfig(dp_shard_size=2), megatron_lm_plugin=object())

@pytest.mark.parametrize('name,o', others.items())
def test_other_kinds(name, o):
    with pytest.raises(OptionError, match=rf'(?s)You set {name}.*shard=True'): check_options(**{name:o})

@pytest.mark.parametrize('kind', ['MEGATRON_LM','PARALLELISM_CONFIG'])
def test_other_kinds_of_a_yaml_file(kind):
    with pytest.raises(OptionError, match=rf'ACCELERATE_USE_{kind}.*shard=True'): check_env({f'ACCELERATE_USE_{kind}':'true'})
