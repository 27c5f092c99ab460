# under: accelerate
# once: no, it has no Learner
# A loop of plain PyTorch, the way of Accelerate's complete examples: accumulation, scheduler, metrics of all samples, checkpoints
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader,Dataset
from fastdist import Accelerator
from _result import result

bs = 4
class Rows(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.xs = torch.randn(n, 6, generator=g)
        self.ys = (self.xs.sum(1)>0).long()
    def __len__(self): return len(self.xs)
    def __getitem__(self, i): return dict(x=self.xs[i], y=self.ys[i])

def collate(rows): return {k:torch.stack([o[k] for o in rows]) for k in ('x','y')}

torch.manual_seed(38)
accelerator = Accelerator()
accelerator.gradient_accumulation_steps = 2
train_dl = DataLoader(Rows(96, 0), shuffle=False, collate_fn=collate, batch_size=bs, num_workers=1)
eval_dl = DataLoader(Rows(37, 1), collate_fn=collate, batch_size=2*bs)
model = nn.Sequential(nn.Linear(6,8), nn.Tanh(), nn.Linear(8,2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = LinearLR(optimizer, 1., 0.1, total_iters=2*len(train_dl))
model,optimizer,train_dl,eval_dl,scheduler = accelerator.prepare(model, optimizer, train_dl, eval_dl, scheduler)
losses,n_steps = [],0
for epoch in range(2):
    model.train()
    for batch in train_dl:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(batch['x']), batch['y'])
            accelerator.backward(loss)
            if accelerator.sync_gradients: accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        n_steps += accelerator.sync_gradients
        losses.append(accelerator.gather(loss.detach()).mean().item())
    model.eval()
    hits = []
    for batch in eval_dl:
        with torch.no_grad(): pred = model(batch['x']).argmax(dim=-1)
        preds,targs = accelerator.gather_for_metrics((pred, batch['y']))
        hits.append((preds==targs).float())
    accelerator.print(f'epoch {epoch}: accuracy {torch.cat(hits).mean():.4f} of {len(torch.cat(hits))}')
    accelerator.save_state(f'epoch_{epoch}')
accelerator.wait_for_everyone()
accelerator.load_state('epoch_1')
model = accelerator.unwrap_model(model)
accelerator.end_training()
result(model=model, n_steps=n_steps, losses=losses)
