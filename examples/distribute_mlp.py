"Four ranks from a plain script: `python examples/distribute_mlp.py`"
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader,TensorDataset
from fastdist import Accelerator

accelerator = Accelerator(nprocs=4, compute_setup='cpu', backend='gloo')

def get_data():
    xs,ys = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(xs, dtype=torch.float32)/16, torch.tensor(ys))

def train_epoch(n_epochs, model, dataloader, optimizer, accelerator):
    model,optimizer,dataloader = accelerator.prepare(model, optimizer, dataloader)
    for epoch in range(n_epochs):
        total = 0.
        for batch in dataloader:
            x,y = accelerator.prepare_batch(batch)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            total += loss.item()
        logs = accelerator.all_reduce_dict(dict(loss=total/len(dataloader)))
        accelerator.print(f'epoch {epoch}, {accelerator.world_size} ranks: loss {logs["loss"]:.3f}')
    return model

torch.manual_seed(1)
data = get_data()
model = nn.Sequential(nn.Linear(64,64), nn.ReLU(), nn.Linear(64,10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
trained = accelerator.distribute(train_epoch)(5, model, DataLoader(data, 16, shuffle=True), optimizer, accelerator)
xs,ys = data.tensors
print(f'accuracy: {(trained(xs).argmax(1)==ys).float().mean():.3f}')
