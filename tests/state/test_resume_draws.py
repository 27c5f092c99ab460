"A data set that draws random numbers, in one process: what fastai looks up with the first batch of a process moves no random state of a training that goes on"
import pytest,torch
from fastai.basics import *
from fastdist import *

class Noisy:
    def __len__(self): return 32
    def __getitem__(self, i): return i+torch.rand(1),torch.zeros(1)

def noting(seen, at):
    "A callback that notes the samples of each step in `seen`, and raises an error instead of step `at`"
    class Note(Callback):
        def before_batch(self):
            if not self.training: return
            if self.train_iter==at: raise InterruptedError('cut off')
            seen[self.train_iter] = self.x.flatten().tolist()
    return Note()

def script(path, seen, fits, at=None):
    "A script of a user, in a process of its own"
    set_seed(1)
    learn = Learner(DataLoaders.from_dsets(Noisy(), Noisy(), bs=4, num_workers=0), nn.Linear(1,1), loss_func=MSELossFlat(), lr=1e-3)
    for i in range(fits):
        with learn.no_bar(), learn.no_logging(): learn.fit(2, cbs=[Checkpoint(path, every=1), noting(seen[i], at if i==fits-1 else None)])

@pytest.mark.parametrize('fits,at', [(1,5),(1,8),(1,13),(2,0),(2,11)])
def test_the_first_batch_of_a_process_draws_no_item_more(tmp_path, fits, at):
    whole,cut = [[{} for _ in range(fits)] for _ in range(2)]
    script(tmp_path/'whole', whole, fits)
    with pytest.raises(InterruptedError): script(tmp_path/'cut', cut, fits, at)
    script(tmp_path/'cut', cut, fits)
    assert cut==whole
