"""Modules:

- `fastdist.accelerator`: Hugging Face Accelerate, told where this process stands
- `fastdist.accumulate`: Several batches, one step of the optimizer, one exchange
- `fastdist.alike`: What all ranks must have alike when a fit begins, compared in one exchange
- `fastdist.borrow`: What a Learner lends to a job of several ranks, and gets back
- `fastdist.check`: Does all of this work on your machine? A report of one screen, and an exit code
- `fastdist.comm`: Collectives over nested structures, and who goes first
- `fastdist.data`: A data loader's share for each rank
- `fastdist.desync`: Do all ranks still train the same model?
- `fastdist.digest`: What a loader holds, in a few plain values that ranks can compare
- `fastdist.events`: Callbacks decide; all ranks do what one decides
- `fastdist.exchanges`: Exchanges between ranks, counted and named, so that ranks that stand in different ones are found
- `fastdist.gradients`: Gradients that the optimizer is about to use are those of all ranks
- `fastdist.growth`: A model that has other layers after training than before, taken on by the object that was there before
- `fastdist.head`: The same object in the head, before there are ranks, and in each rank
- `fastdist.home`: What training on ranks has changed comes back to the object in the head
- `fastdist.launch`: Ranks from a head process, and forks that do not hang
- `fastdist.learner`: Contexts that let a Learner train on N ranks, or on several GPUs of one process, and give it back whole
- `fastdist.lifeline`: What happens to one rank is known to all at once
- `fastdist.listen`: Connections from ranks of this job, and from nobody else
- `fastdist.loss`: What a rank's loss weighs in a step, and how all ranks learn the loss of all, for nothing
- `fastdist.metrics`: Metrics, losses and predictions of all ranks, put together once
- `fastdist.norm`: Batch norm over all ranks, on any device, lent to the user's own modules
- `fastdist.order`: Which sample goes where, by arithmetic on an order that all ranks share
- `fastdist.randomness`: What ranks must decide alike, and what they must not
- `fastdist.replicas`: Do all ranks hold the same model?
- `fastdist.report`: Validation losses, metrics, predictions and statistics of activations, as one process would have them
- `fastdist.running`: Running statistics of instance norm, as one process would have them
- `fastdist.saving`: Files that are complete or not there, written once for all ranks, and read by any fastai
- `fastdist.shuffle`: Python's shuffle of a range, as an array and many times faster
- `fastdist.spawn`: Ranks that a head process starts, watches and ends
- `fastdist.terms`: What callbacks make of a loss, seen on its graph
- `fastdist.tracebacks`: Tracebacks in which one's own code is found at a glance
- `fastdist.trainer`: The callback that lets a Learner train on N ranks as it would in one process
- `fastdist.trial`: Trying out a user's code without leaving a trace
- `fastdist.watch`: A rank that stops moving is found, and named
- `fastdist.world`: Who am I: rank, local rank, world size, node, device and backend, from any launcher"""

from importlib.metadata import version
from torch.nn.parallel import DataParallel, DistributedDataParallel
from .world import World, WorldError, this_world, setup_distrib, teardown_distrib
from .launch import RankError, on_ranks
from .comm import rank0_first
from .data import DistributedDL
from .accelerator import OptionError
from .home import HomeError
from .head import Accelerator
from .trainer import DistributedTrainer
from . import report
from .learner import ParallelTrainer
from . import saving
from .replicas import DesyncError
from .desync import DesyncCheck

__version__ = version('fastdist')
__all__ = ['DataParallel', 'DistributedDataParallel', 'World', 'WorldError', 'this_world', 'setup_distrib', 'teardown_distrib', 'RankError', 'on_ranks',
    'rank0_first', 'DistributedDL', 'OptionError', 'HomeError', 'Accelerator', 'ParallelTrainer', 'DistributedTrainer', 'DesyncCheck',
    'DesyncError']
