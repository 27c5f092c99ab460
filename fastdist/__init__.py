"""Modules:

- `fastdist.accelerator`: The same object in the head, before there are ranks, and in each rank
- `fastdist.check`: Does all of this work on your machine? A report of one screen, and an exit code
- `fastdist.comm.collectives`: Collectives over nested structures, and who goes first
- `fastdist.comm.control`: What happens to one rank is known to all at once
- `fastdist.comm.exchanges`: Exchanges between ranks, counted and named, so that ranks that stand in different ones are found
- `fastdist.comm.listener`: Connections from ranks of this job, and from nobody else
- `fastdist.comm.rng`: What ranks must decide alike, and what they must not
- `fastdist.comm.watchdog`: A rank that stops moving is found, and named
- `fastdist.data.digest`: A few plain values that tell ranks whether their loaders hold the same
- `fastdist.data.loader`: `DistributedDL`: any loader's batches for one rank
- `fastdist.data.sharding`: Which sample goes where, by arithmetic on an order that all ranks share
- `fastdist.data.share`: The part of a loader's samples that falls to one rank, and what its batches weigh
- `fastdist.data.shuffle`: Python's shuffle of a range, as an array and many times faster
- `fastdist.data.stream`: Iterable data sets: each rank reads the whole stream and keeps its slice of every global batch
- `fastdist.data.torch_loader`: A torch `DataLoader`, built again around one rank's batches
- `fastdist.evaluate.loss`: What a rank's loss weighs in a step, and how all ranks learn the loss of all, for nothing
- `fastdist.evaluate.metrics`: Metrics, losses and predictions of all ranks, put together once
- `fastdist.evaluate.trial`: Trying out a user's code without leaving a trace
- `fastdist.job.fork`: Ranks from a head process, and forks that do not hang
- `fastdist.job.options`: Hugging Face Accelerate, told where this process stands
- `fastdist.job.spawn`: Ranks that a head process starts, watches and ends
- `fastdist.job.tracebacks`: Tracebacks in which one's own code is found at a glance
- `fastdist.job.world`: Who am I: rank, local rank, world size, node, device and backend, from any launcher
- `fastdist.learner`: Contexts that let a Learner train on N ranks, or on several GPUs of one process, and give it back whole
- `fastdist.observe.desync`: Do all ranks still train the same model?
- `fastdist.saving`: Files that are complete or not there, written once for all ranks, and read by any fastai
- `fastdist.state.growth`: A model that has other layers after training than before, taken on by the object that was there before
- `fastdist.state.home`: What training on ranks has changed comes back to the object in the head
- `fastdist.state.replicas`: Do all ranks hold the same model?
- `fastdist.train.accumulate`: Several batches, one step of the optimizer, one exchange
- `fastdist.train.batchnorm`: Batch norm over all ranks, on any device, lent to the user's own modules
- `fastdist.train.consistency`: What all ranks must have alike when a fit begins, compared in one exchange
- `fastdist.train.context`: What a Learner lends to a job of several ranks, and gets back
- `fastdist.train.events`: Callbacks decide; all ranks do what one decides
- `fastdist.train.gradients`: Gradients that the optimizer is about to use are those of all ranks
- `fastdist.train.report`: Validation losses, metrics, predictions and statistics of activations, as one process would have them
- `fastdist.train.trainer`: The callback that lets a Learner train on N ranks as it would in one process"""

from importlib.metadata import version
from torch.nn.parallel import DataParallel, DistributedDataParallel
from .job.world import World, WorldError, this_world, setup_distrib, teardown_distrib
from .job.fork import RankError, on_ranks
from .comm.collectives import rank0_first
from .data.loader import DistributedDL
from .job.options import OptionError
from .state.home import HomeError
from .accelerator import Accelerator
from .train.trainer import DistributedTrainer
from .train import report
from .learner import ParallelTrainer
from . import saving
from .state.replicas import DesyncError
from .observe.desync import DesyncCheck

__version__ = version('fastdist')
__all__ = ['DataParallel', 'DistributedDataParallel', 'World', 'WorldError', 'this_world', 'setup_distrib', 'teardown_distrib', 'RankError', 'on_ranks',
    'rank0_first', 'DistributedDL', 'OptionError', 'HomeError', 'Accelerator', 'ParallelTrainer', 'DistributedTrainer', 'DesyncCheck',
    'DesyncError']
