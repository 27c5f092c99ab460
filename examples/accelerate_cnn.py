"A loop of plain PyTorch: `accelerate launch --config_file examples/accelerate_config.yaml examples/accelerate_cnn.py`, torchrun, or plain python"
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader,TensorDataset
from fastdist import Accelerator

def get_dls(bs=32):
    xs,ys = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(xs, dtype=torch.float32).view(-1,1,8,8)/16, torch.tensor(ys))
    train,valid = torch.utils.data.random_split(data, [1500,297], torch.Generator().manual_seed(0))
    return DataLoader(train, bs, shuffle=True),DataLoader(valid, 2*bs)

def get_model():
    convs = nn.Conv2d(1,16,3,padding=1),nn.ReLU(),nn.Conv2d(16,32,3,2,1),nn.ReLU(),nn.Conv2d(32,64,3,2,1),nn.ReLU()
    return nn.Sequential(*convs, nn.Flatten(), nn.Linear(256,10))

def train_epoch(accelerator, model, optimizer, scheduler, dl):
    model.train()
    for x,y in dl:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        scheduler.step()

@torch.no_grad()
def accuracy(accelerator, model, dl):
    "Share of the samples of all ranks that are right"
    model.eval()
    hits = [accelerator.gather_for_metrics(model(x).argmax(1)==y) for x,y in dl]
    return torch.cat(hits).float().mean().item()

def main(epochs=3):
    torch.manual_seed(1)
    accelerator = Accelerator()
    model,(dl,valid_dl) = get_model(),get_dls()
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = OneCycleLR(optimizer, 1e-2, total_steps=epochs*len(dl))
    model,optimizer,dl,valid_dl,scheduler = accelerator.prepare(model, optimizer, dl, valid_dl, scheduler)
    for epoch in range(epochs):
        train_epoch(accelerator, model, optimizer, scheduler, dl)
        acc = accuracy(accelerator, model, valid_dl)
        if accelerator.is_main_process: print(f'epoch {epoch}, {accelerator.num_processes} ranks in {accelerator.mixed_precision}: accuracy {acc:.3f}')
    accelerator.end_training()

if __name__=='__main__': main()
