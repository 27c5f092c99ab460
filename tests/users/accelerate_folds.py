# once: no, it has no Learner
# Cross-validation, trackers, triggers to stop early, in a loop of plain PyTorch with a stream as data
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader,IterableDataset
from fastdist import Accelerator
from _result import result

bs = 4
class Stream(IterableDataset):
    "Nobody knows how long it is"
    def __init__(self, lo, hi): self.lo,self.hi = lo,hi
    def __iter__(self):
        for i in range(self.lo, self.hi):
            x = torch.tensor([i%7,i%5,i%3]).float()
            yield x,x.sum().view(1)

accelerator = Accelerator(project_dir='.')
sums,stops = [],[]
for fold in range(2):
    torch.manual_seed(39+fold)
    model = nn.Linear(3,1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    dl,model,optimizer = accelerator.prepare(DataLoader(Stream(fold*40, fold*40+40), batch_size=bs), model, optimizer)
    for epoch in range(6):
        total = torch.zeros(1)
        for x,y in dl:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_value_(model.parameters(), 5.)
            optimizer.step()
            total += loss.detach()
        if accelerator.is_main_process and epoch==3: accelerator.set_trigger()
        if accelerator.check_trigger(): break
    stops.append(epoch)
    sums.append(accelerator.reduce(total, 'mean').item())
    accelerator.wait_for_everyone()
    model = accelerator.unwrap_model(model)
    model,optimizer = accelerator.free_memory(model, optimizer) if fold==0 else (model,optimizer)
accelerator.print('stopped after', *stops)
accelerator.end_training()
result(model=model, sums=sums, stops=stops)
