"A fit on several ranks: with metrics of training states are made between epochs only, and a signal stops there; what the job hands over answers as in one process"
import os,signal
from fastcore.test import test_eq
from fastai.basics import *
from fastai.test_utils import synth_learner
from fastdist import *
from fastdist.launch.callbacks import JobCallback
from fastdist.state.resume import LocalLayout,LocalLoaders

class Ask(Callback):
    "Sends rank 1 a signal in the second epoch, before its last steps"
    def after_batch(self):
        if not self.training or self.epoch!=1: return
        if rank_distrib() and self.iter==1: os.kill(os.getpid(), signal.SIGUSR1)

def train(rank, path, ask):
    set_seed(1)
    data = list(zip(torch.randn(40,4), torch.randn(40,1)))
    dls = DataLoaders.from_dsets(data[:30], data[30:], bs=3, num_workers=0)
    learn = Learner(dls, nn.Linear(4,1), loss_func=MSELossFlat(), metrics=mae, cbs=[Checkpoint(path, every=1), *([Ask()] if ask else [])])
    learn.recorder.train_metrics = True
    with learn.distrib_ctx(), learn.no_bar(), learn.no_logging():
        try: learn.fit(4)
        except Preempted as e: return learn.epoch,e.signum
    return [list(o) for o in learn.recorder.values],[p.detach().clone() for p in learn.model.parameters()]

def test_a_signal_stops_at_the_end_of_its_epoch_though_states_are_due_after_it(tmp_path):
    whole = on_ranks(lambda rank: train(rank, tmp_path/'whole', False), join=False)
    test_eq(on_ranks(lambda rank: train(rank, tmp_path/'cut', True), join=False), [(1,signal.SIGUSR1)]*2)
    test_eq(on_ranks(lambda rank: train(rank, tmp_path/'cut', False), join=False), whole)

class Lacking(Callback):
    "Notes the names that a fit in one process asks for, and that what the job has handed over lacks"
    def before_fit(self):
        *handed,helpers = self.checkpoint.handed
        self.names = [k for o,local in zip(handed, (LocalLoaders,LocalLayout), strict=True) for k in vars(local) if k[0]!='_' and not hasattr(o, k)]
        assert len(helpers)>2 and all(isinstance(o, JobCallback) for o in helpers)

def test_what_a_job_hands_over_answers_as_one_process_does(tmp_path):
    def run(rank):
        learn = synth_learner(cbs=[Checkpoint(tmp_path),Lacking()])
        with learn.distrib_ctx(), learn.no_bar(), learn.no_logging(): learn.fit(1)
        return learn.lacking.names,[*filter(None, learn.checkpoint.handed)]
    test_eq(on_ranks(run, join=False), [([],[])]*2)
