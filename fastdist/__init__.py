"""fastai on N processes. After `from fastdist import *` every Learner has the contexts below; the other names do what a Learner does not:

| name | what it is for |
|---|---|
| `learn.distrib_ctx(nprocs=2)`, `learn.distrib_ctx()` | train on two ranks from a script that runs once; on the ranks that a launcher started |
| `learn.parallel_ctx()` | train on all GPUs of one process |
| `learn.lean()` | the step of ranks, which does less in Python, for a training in one process |
| `Accelerator` | run a function or a training loop on ranks, on this machine or on others, with everything that an Accelerator of Accelerate has |
| `Checkpoint` | a callback with which a killed training resumes |
| `Timeline`, `DesyncCheck` | callbacks that show which rank is late, and the step after which ranks differ |
| `Trace`, `Comparison` | a callback that records what the first steps leave; the first difference between two such records |
| `rank0_first` | call a function on rank 0 first, then on the others: for downloads and caches |
| `DistributedDL` | a loader's batches for one rank |
| `DistributedTrainer`, `ParallelTrainer` | the callbacks behind the contexts |
| `setup_distrib`, `teardown_distrib`, `this_world`, `World` | join a job and leave it by hand; rank, size and device of this process |
| `on_ranks` | call a function on a few CPU ranks, as the pages here do |
| `RankError`, `WorldError`, `OptionError`, `DesyncError`, `ResumeError`, `Preempted` | what is raised, each with what was set, what was found, and what to do |

Modules:

- `fastdist.accelerator`: One object for the parent process, which starts ranks, and for each rank
- `fastdist.base.at_fork`: What a forked child closes, and begins anew, of all that it inherits from its parent
- `fastdist.base.errors`: The exceptions that fastdist raises
- `fastdist.base.overrides`: Attributes, variables and handlers of signals that are overridden in a context, and restored
- `fastdist.base.tracebacks`: Short tracebacks, printed by one rank
- `fastdist.base.values`: Nested values: their leaves by name, mapped, copied and compared
- `fastdist.check`: `fastdist-check`: a report of one screen on this machine or cluster, and an exit code
- `fastdist.comm.collectives`: Collectives over tensors, rows and objects, the same in one process and on many ranks
- `fastdist.comm.draws`: torch's random draws in a step, made for the global batch and cut to the rows of this rank
- `fastdist.comm.failures`: Errors of one rank, and how they reach the main thread of another
- `fastdist.comm.job`: What the ranks of a job share beside the process group: decisions, and the error of one of them
- `fastdist.comm.progress`: Where each rank is, and which rank keeps the others waiting
- `fastdist.comm.rank0`: Work that rank 0 does first, or that only rank 0 does, while other ranks wait
- `fastdist.comm.rng`: Random numbers that ranks share, streams of their own, and numbers as a function of a seed and a place
- `fastdist.comm.store`: Key-value store of one job, and who of its processes exist
- `fastdist.data.digest`: Plain values by which ranks compare the data of their loaders
- `fastdist.data.fetch`: Batches of plain samples in few calls, and data workers that are watched
- `fastdist.data.loader`: `DistributedDL`: any loader's batches for one rank
- `fastdist.data.sharding`: The samples of each rank in a pass over a loader, by arithmetic on an order that all ranks share
- `fastdist.data.source`: One rank's batches of a fastai loader, whose samples are read by number or as a stream
- `fastdist.data.torch_loader`: A torch `DataLoader`, built again around one rank's batches
- `fastdist.evaluate.evaluate`: Validation losses, metrics and predictions, as one process would have them
- `fastdist.evaluate.loss`: Reduction and normaliser of a Learner's loss, found by all ranks together, and the loss of all ranks
- `fastdist.evaluate.metrics`: The states of a metric on all ranks are merged into that of one process, in one exchange
- `fastdist.evaluate.mixing`: The module, callback or batch transform that mixes the samples of a batch, and hooks on parameters that are not linear, found by a probe
- `fastdist.evaluate.probe`: A function of samples is run whole and in parts, once, on copies, and its results are compared
- `fastdist.launch.agent`: The process that runs the ranks of one machine for a parent process, on this machine or another
- `fastdist.launch.callbacks`: Callbacks of a job, those that only rank 0 runs, and hooks around the events of a Learner
- `fastdist.launch.detached`: Jobs that outlive the process that started them, and are found again by name
- `fastdist.launch.fork`: Ranks that are forked from this process, and forks that do not hang
- `fastdist.launch.group`: Join a process to its job, and undo that
- `fastdist.launch.launcher`: Start ranks through agents, on this node or by an engine on others; watch them, show their output, end them
- `fastdist.launch.options`: Options of Accelerate, honoured or refused, and its object for this process
- `fastdist.launch.pickling`: Functions, classes and tensors, sent between a parent process and its ranks
- `fastdist.launch.ray`: Ranks on the nodes of a Ray cluster
- `fastdist.launch.slurm`: Ranks in the tasks of a SLURM job that `submitit` submits
- `fastdist.launch.world`: Rank, local rank, world size, node, device and backend of a process, read from the environment of any launcher
- `fastdist.learner`: Contexts in which a Learner trains on N ranks, or on several GPUs of one process
- `fastdist.parallel.context`: From joining a job to leaving it: the connections, the device, the precision, and who prints
- `fastdist.parallel.foreach`: fastai's optimizers step lists of tensors
- `fastdist.parallel.layout`: Layout of parameters on ranks, and the layout in which each rank holds all of them
- `fastdist.parallel.norms`: Norms of the models of a fit count the samples of all ranks
- `fastdist.parallel.passes`: Forward passes of training go through a wrapper, and backward passes are seen where they begin
- `fastdist.parallel.seeding`: A Learner whose random numbers are a function of the seed, the step and the sample
- `fastdist.saving`: Files written once for all ranks, and read by any fastai
- `fastdist.shard.files`: Files of a model in shards: whole tensors are read into rows, and rows are written by each rank
- `fastdist.shard.forward_sync`: All ranks make a forward pass of a model in shards, and a pass of one rank only is an error there
- `fastdist.shard.layout`: Each rank holds a part of each parameter, and FSDP2 gathers them for the forward and the backward pass
- `fastdist.shard.model`: A model in shards: torch's FSDP2 is put on it, and taken off without a trace
- `fastdist.shard.optimizer`: An optimizer steps the shards of the parameters that it was made for
- `fastdist.shard.plan`: How a model is divided over ranks, read from a plugin of Accelerate, the environment or `shard=True`
- `fastdist.shard.wrap_policy`: Modules whose parameters are gathered together when a model is sharded
- `fastdist.state.changes`: What a copy of this process has changed in objects that this process has too
- `fastdist.state.checkpoint`: `Checkpoint`: a training that is killed goes on at its step when the same script is started again
- `fastdist.state.consistency`: Facts that all ranks must share when a fit begins, and samples that they must read alike
- `fastdist.state.dcp`: Rows of tensors in shards: each rank writes its own, and each reads what it needs
- `fastdist.state.folder`: A folder of states, each complete or not there, that one job at a time writes to
- `fastdist.state.progress`: What training has changed, as values from which another process resumes
- `fastdist.state.replicas`: Comparing what ranks hold, bit by bit: models, and what callbacks and modules hold beside
- `fastdist.state.resume`: Where a fit stands: done, cut off, or new; and how it goes on from a state
- `fastdist.state.serialize`: Nested values as JSON and named tensors, many scalars as one tensor
- `fastdist.state.snapshot`: The state of a Learner as one value: taken, put back, compared, kept by a detached job
- `fastdist.tools.checks`: Facts of a job that are known beforehand, compared with what is found
- `fastdist.tools.comparison`: The first difference between two traces, its size beside that of rounding, and where it begins
- `fastdist.tools.step_clock`: The time of each part of a step on this rank, taken at the borders of events
- `fastdist.tools.timeline`: Where the time of a training goes, on each rank and in each step, and which rank is late
- `fastdist.tools.trace`: A record of what the first steps of a fit leave, which another process can be compared with
- `fastdist.train.events`: Callbacks decide; all ranks do what one decides
- `fastdist.train.gradients`: Gradients and loss of a step are those of the global batch, whatever passes are made
- `fastdist.train.parent`: The process that runs the script, and the ranks that its Learner's calls run on
- `fastdist.train.phase`: The training and the evaluation that run at the moment, and this rank's share of their loaders
- `fastdist.train.process`: Accelerate's object for this process, joined to its job when it is first needed
- `fastdist.train.scale`: By how much the loss of this rank's batch counts in that of the global batch, and in a step over several batches
- `fastdist.train.step`: A batch through the Learner, with plain tensors between the loader and the loss
- `fastdist.train.trainer`: The callback that lets a Learner train on N ranks as it would in one process"""

import warnings
from types import ModuleType
with warnings.catch_warnings(): # of what these packages use, which is nobody's to change who imports this one
    warnings.filterwarnings('ignore', '`torch.jit.script`', FutureWarning)
    warnings.filterwarnings('ignore', 'IProgress not found')
    import accelerate,fastai.basics
from torch.nn.parallel import DataParallel, DistributedDataParallel
from fastai.torch_core import num_distrib, rank_distrib
from .base.errors import DesyncError, OptionError, Preempted, RankError, ResumeError, SeedError, VersionError, WorldError
from .launch.world import World, install_fault, own_version
from .launch.group import this_world, setup_distrib, teardown_distrib
from .launch.fork import on_ranks
from .launch.options import add_docments
from .comm.rank0 import rank0_first
from .data.loader import DistributedDL
from .state.checkpoint import Checkpoint
from .accelerator import Accelerator
from .train.trainer import DistributedTrainer
from .parallel.passes import ParallelTrainer
from . import learner,saving
from .tools.checks import DesyncCheck
from .tools.timeline import Timeline
from .tools.trace import Trace
from .tools.comparison import Comparison

__doc__ = (__doc__ or '').partition('\n\nModules:')[0] # nbdev-export writes a list of all modules behind it
__version__ = own_version()
if (_fault := install_fault()): warnings.warn(_fault, stacklevel=2)
__all__ = ['DataParallel', 'DistributedDataParallel', 'World', 'WorldError', 'this_world', 'setup_distrib', 'teardown_distrib', 'RankError', 'on_ranks',
    'rank0_first', 'DistributedDL', 'OptionError', 'Accelerator', 'ParallelTrainer', 'DistributedTrainer', 'DesyncCheck',
    'DesyncError', 'Checkpoint', 'ResumeError', 'SeedError', 'VersionError', 'Preempted', 'Timeline', 'Trace', 'Comparison', 'rank_distrib', 'num_distrib']

for _name in __all__:
    if getattr(globals()[_name], '__module__', '').startswith(__name__): add_docments(globals()[_name])
for _f in vars(learner.Learner).values():
    if getattr(_f, '__module__', '').startswith(__name__): add_docments(_f)

def __getattr__(name):
    "Return what Accelerate calls `name`, so that a script that imports from it may import from fastdist"
    res = None if name.startswith('_') else getattr(accelerate, name, None)
    if res is None or isinstance(res, ModuleType): raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return res
