# start: python
# once: no, `distribute` has its own number of ranks
# A function of the script, with a loop of its own, on two ranks
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader,TensorDataset
from fastdist import Accelerator
from _result import result

bs = 8
accelerator = Accelerator(nprocs=2)
def train(epochs, model, dl):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 0.9**i)
    model,optimizer,dl = accelerator.prepare(model, optimizer, dl)
    for epoch in range(epochs):
        for x,y in dl:
            optimizer.zero_grad()
            accelerator.backward(F.mse_loss(model(x), y))
            optimizer.step()
        scheduler.step()
        accelerator.print(f'epoch {epoch} done')
    return accelerator.unwrap_model(model)

torch.manual_seed(42)
xs = torch.randn(64, 3)
trained = accelerator.distribute(train)(3, nn.Linear(3,1), DataLoader(TensorDataset(xs, xs.sum(1, keepdim=True)), bs, num_workers=1))
result(model=trained)
