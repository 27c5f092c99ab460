"""Modules:

- `fastdist.accelerator`: One object for the head, which starts ranks, and for each rank
- `fastdist.check`: `fastdist-check`: a report of one screen on this machine or cluster, and an exit code
- `fastdist.comm.collectives`: Collectives over tensors, rows and objects, the same in one process and on many ranks
- `fastdist.comm.control`: The control connection: all ranks, connected beside the process group
- `fastdist.comm.exchanges`: Exchanges between ranks, counted and named, so that ranks that stand in different ones are found
- `fastdist.comm.faults`: An error on one rank is an error on all, at once and with its cause
- `fastdist.comm.listener`: Connections from ranks of this job, and from nobody else
- `fastdist.comm.messages`: Messages between two ranks, as lines of JSON over a socket
- `fastdist.comm.rank0`: Work that rank 0 does first, or alone, while the others wait
- `fastdist.comm.rng`: What ranks must decide alike, and what they must not
- `fastdist.comm.signals`: A signal that interrupts the main thread, shared with the handlers of others
- `fastdist.comm.vote`: What one rank decides, all ranks do: meetings, votes, and notes of what rank 0 has done
- `fastdist.comm.watchdog`: A rank that stops moving, or waits where the others do not come, is found and named
- `fastdist.data.digest`: A few plain values that tell ranks whether their loaders hold the same
- `fastdist.data.loader`: `DistributedDL`: any loader's batches for one rank
- `fastdist.data.sharding`: Which sample goes where, by arithmetic on an order that all ranks share
- `fastdist.data.share`: The part of a loader's samples that falls to one rank, and what its batches weigh
- `fastdist.data.shuffle`: Python's shuffle of a range, as an array and many times faster
- `fastdist.data.stream`: Iterable data sets: each rank reads the whole stream and keeps its slice of every global batch
- `fastdist.data.torch_loader`: A torch `DataLoader`, built again around one rank's batches
- `fastdist.evaluate.activations`: Statistics of activations over the samples of all ranks
- `fastdist.evaluate.evaluate`: Validation losses, metrics, predictions and statistics of activations, as one process would have them
- `fastdist.evaluate.evidence`: How the state of a metric may be merged, found out on copies of it
- `fastdist.evaluate.loss`: What a rank's loss weighs in a step, and how all ranks learn the loss of all, for nothing
- `fastdist.evaluate.merge`: What a metric has counted on each rank becomes what one process would have counted
- `fastdist.evaluate.metrics`: Metrics and losses of all ranks, put together once
- `fastdist.evaluate.predictions`: What `get_preds` collects, of all ranks and in the order of the data set
- `fastdist.evaluate.record`: One set of numbers after an epoch, on all ranks
- `fastdist.evaluate.reduction`: How a Learner's loss makes one number of a batch, found out by all ranks together
- `fastdist.evaluate.trial`: Trying out a user's code without leaving a trace
- `fastdist.job.accelerate`: Hugging Face Accelerate, told where this process stands
- `fastdist.job.callbacks`: Callbacks that are on a Learner only inside a job, and those that only rank 0 runs
- `fastdist.job.description`: How many ranks, on what, in which precision: said before there are any
- `fastdist.job.errors`: The exceptions that users meet
- `fastdist.job.fork`: Ranks from a head process, and forks that do not hang
- `fastdist.job.group`: A process joins its job, and leaves it
- `fastdist.job.options`: Options of Accelerate, honoured or refused
- `fastdist.job.pickling`: Functions, classes and tensors, sent between a head and its ranks
- `fastdist.job.spawn`: Ranks that a head process starts, watches and ends
- `fastdist.job.store`: Where the ranks of a job meet
- `fastdist.job.tracebacks`: Errors shown once, with the user's own code at a glance
- `fastdist.job.world`: Rank, local rank, world size, node, device and backend of a process, read from the environment of any launcher
- `fastdist.learner`: Contexts in which a Learner trains on N ranks, or on several GPUs of one process
- `fastdist.observe.bench`: Times of an exchange and of a step on this machine
- `fastdist.observe.desync`: A callback that finds the step after which ranks no longer train the same model
- `fastdist.observe.findings`: Facts of a job that are known beforehand, compared with what is found
- `fastdist.saving`: Files written once for all ranks, and read by any fastai
- `fastdist.state.files`: Files that are complete or not there, and state dicts with or without a wrapper's prefix
- `fastdist.state.growth`: A model that takes on the layers that another one has gained in training
- `fastdist.state.home`: The state that ranks have trained, written into the object that the head holds
- `fastdist.state.replicas`: Comparing what ranks hold, bit by bit
- `fastdist.state.snapshot`: The state of a Learner as one value: taken, put back, and listed by name
- `fastdist.state.values`: The attributes of an object that are state, and those that only refer to something
- `fastdist.train.accumulate`: Several batches, one step of the optimizer, one exchange
- `fastdist.train.agreement`: A callback that runs the Learner's events, so that all ranks do what one decides
- `fastdist.train.batchnorm`: Batch norm over all ranks, on any device, in the user's own modules
- `fastdist.train.buffers`: Buffers that forward passes change: as one process would have them, or named in a warning
- `fastdist.train.consistency`: Facts that all ranks must share when a fit begins, compared in one exchange
- `fastdist.train.context`: From joining a job to leaving it: the connections, the device, the precision, and who prints
- `fastdist.train.ddp`: Each rank holds the whole model, and `DistributedDataParallel` averages gradients, with two numbers among them
- `fastdist.train.events`: Callbacks decide; all ranks do what one decides
- `fastdist.train.gradients`: Gradients that the optimizer is about to use are those of all ranks
- `fastdist.train.layout`: Layout of parameters on ranks: the one interface between a Learner's training and DDP
- `fastdist.train.lr_find`: fastai's finder on N ranks, without a file and with as many steps as were asked for
- `fastdist.train.passes`: Every backward pass of a fit is seen, and what it adds becomes that of all ranks
- `fastdist.train.phase`: The training and the evaluation that run at the moment, and this rank's share of their loaders
- `fastdist.train.process`: Accelerate's object for this process, joined to its job when it is first needed
- `fastdist.train.proxy`: The user's model stays in the Learner; its forward pass in training goes through a wrapper
- `fastdist.train.running`: Running statistics of instance norm, as one process would have them
- `fastdist.train.terms`: Terms that callbacks add to a loss, recognised on its graph
- `fastdist.train.trainer`: The callback that lets a Learner train on N ranks as it would in one process
- `fastdist.train.weigh`: Gradients and losses of a step are those of the global batch
- `fastdist.train.weights`: Weight of this rank's batch in the global batch"""

from importlib.metadata import version
from torch.nn.parallel import DataParallel, DistributedDataParallel
from .job.errors import DesyncError, HomeError, OptionError, RankError, WorldError
from .job.world import World
from .job.group import this_world, setup_distrib, teardown_distrib
from .job.fork import on_ranks
from .comm.rank0 import rank0_first
from .data.loader import DistributedDL
from .accelerator import Accelerator
from .train.trainer import DistributedTrainer
from .learner import ParallelTrainer
from . import saving
from .observe.desync import DesyncCheck

__version__ = version('fastdist')
__all__ = ['DataParallel', 'DistributedDataParallel', 'World', 'WorldError', 'this_world', 'setup_distrib', 'teardown_distrib', 'RankError', 'on_ranks',
    'rank0_first', 'DistributedDL', 'OptionError', 'HomeError', 'Accelerator', 'ParallelTrainer', 'DistributedTrainer', 'DesyncCheck',
    'DesyncError']
