"A training on two GPUs of one container of Modal's: `modal run examples/modal_train.py`"
import modal
from pathlib import Path

image = modal.Image.debian_slim(python_version='3.12').pip_install('fastai-dist', 'scikit-learn')
app,states = modal.App('digits', image=image),modal.Volume.from_name('digits', create_if_missing=True)

@app.function(gpu='L4:2', timeout=3600, volumes={'/states':states})
def train(epochs=3, folder='/states'):
    "Accuracy, and the weights as bytes: Modal returns what the function returns"
    import io
    from fastai.basics import CrossEntropyLossFlat,DataLoaders,Learner,accuracy,nn,set_seed,torch
    from sklearn.datasets import load_digits
    from fastdist import Accelerator,Checkpoint
    set_seed(42)
    n = torch.cuda.device_count() or 2
    data = [(torch.tensor(x).float()/16, int(y)) for x,y in zip(*load_digits(return_X_y=True))]
    dls = DataLoaders.from_dsets(data[:1400], data[1400:], bs=64//n, num_workers=0)
    model = nn.Sequential(nn.Linear(64,64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64,10))
    learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), metrics=accuracy)
    Accelerator(nprocs=n).distribute(learn.fit_one_cycle)(epochs, 3e-2, cbs=Checkpoint(f'{folder}/digits'))
    torch.save(learn.model.state_dict(), f := io.BytesIO())
    return float(learn.recorder.values[-1][-1]),f.getvalue()

@app.local_entrypoint()
def main(epochs:int=3):
    acc,weights = train.remote(epochs)
    Path('digits.pth').write_bytes(weights)
    print(f'accuracy: {acc:.3f}')
