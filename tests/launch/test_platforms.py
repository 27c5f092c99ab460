"The scripts of examples/ for services that start no ranks for a notebook: what they send trains on two ranks; with --whole the services' own packages take them"
import inspect,os,pytest,re,runpy,subprocess,sys
from contextlib import redirect_stdout
from io import BytesIO,StringIO
from types import ModuleType
from fastdist import *
from fastdist.launch.fork import on_ranks
from fastai.basics import torch
from procs import *

kubeflow,on_modal,sky = examples/'kubeflow_train.py',examples/'modal_train.py',examples/'skypilot.yaml'

def source(): return inspect.getsource(import_file(kubeflow).train)

def import_file(path):
    sys.path.insert(0, str(path.parent))
    try: return __import__(path.stem)
    finally: sys.path.pop(0)

def test_kubeflow_sends_a_function_s_source(tmp_path):
    "A shell would read these characters, in a document without quotes"
    assert not set('$`\\') & set(source())
    def f(rank):
        with redirect_stdout(StringIO()) as said: exec(source()+f'\ntrain(folder={str(tmp_path)!r})\n', {})
        return said.getvalue()
    said = on_ranks(f, join=False)
    assert float(re.search(r'accuracy: ([\d.]+)', said[0])[1])>.85 and 'accuracy: ' not in said[1]
    assert torch.load(tmp_path/'models/digits.pth', weights_only=True)

@pytest.mark.whole
@pytest.mark.launcher
def test_kubeflow_s_own_command(tmp_path):
    "As its container runs it, on two ranks of this node"
    pytest.importorskip('kubeflow')
    from kubeflow.trainer.backends.kubernetes import utils
    from kubeflow.trainer.constants import constants
    from kubeflow.trainer.types.types import Runtime,RuntimeKind,RuntimeTrainer,TrainerType
    trainer = RuntimeTrainer(trainer_type=TrainerType.CUSTOM_TRAINER, framework='torch', image='none')
    trainer.set_command(constants.TORCH_COMMAND)
    runtime = Runtime(name='torch-distributed', trainer=trainer, kind=list(RuntimeKind)[0])
    cmd = utils.get_command_using_train_func(runtime, import_file(kubeflow).train, dict(epochs=3, folder=str(tmp_path)), [], None)
    out,_ = run(*cmd, PATH=f'{bin_}:{os.environ["PATH"]}', PET_NPROC_PER_NODE='2', PET_MASTER_ADDR='127.0.0.1', PET_MASTER_PORT=str(free_port()))
    assert '2 ranks on 1 node, cpu over gloo, from torchrun' in out and float(re.search(r'accuracy: ([\d.]+)', out)[1])>.85

def stand_in():
    "What of Modal's package the script calls when it is imported; a function of its is the function here"
    m = ModuleType('modal')
    same = lambda *a, **kw: lambda f: f
    m.App = lambda *a, **kw: SimpleNamespace(function=same, local_entrypoint=same)
    m.Image = SimpleNamespace(debian_slim=lambda **kw: SimpleNamespace(pip_install=lambda *a: None))
    m.Volume = SimpleNamespace(from_name=lambda *a, **kw: None)
    return m

def trains(train, d):
    acc,weights = train(3, str(d))
    assert acc>.85 and len(torch.load(BytesIO(weights), weights_only=True))==9

@pytest.mark.whole
def test_a_function_of_modal_s(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, 'modal', stand_in())
    trains(runpy.run_path(str(on_modal))['train'], tmp_path)

@pytest.mark.whole
def test_modal_s_own_function(tmp_path):
    pytest.importorskip('modal')
    trains(runpy.run_path(str(on_modal))['train'].local, tmp_path)

def test_skypilot_s_task():
    import yaml
    task = yaml.safe_load(sky.read_text())
    assert (examples.parent/task['workdir']/'train.py').exists() and not subprocess.run(['bash','-n','-c',task['run']]).returncode

@pytest.mark.whole
@pytest.mark.launcher
def test_skypilot_s_task_on_two_nodes():
    "With the variables that SkyPilot sets on each of them"
    import yaml
    cmd,port = yaml.safe_load(sky.read_text())['run'],str(free_port())
    vars = dict(SKYPILOT_NUM_NODES='2', SKYPILOT_NUM_GPUS_PER_NODE='2', SKYPILOT_NODE_IPS='127.0.0.1\n127.0.0.1', MASTER_PORT=port, PATH=f'{bin_}:{os.environ["PATH"]}', OMP_NUM_THREADS='1')
    os.chdir(examples/'slurm')
    ends(output(*[start('bash', '-c', cmd, env=env|vars|dict(SKYPILOT_NODE_RANK=str(i))) for i in range(2)]), 4, 'torchrun')
