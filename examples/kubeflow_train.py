"A training as a TrainJob of Kubeflow: `python examples/kubeflow_train.py` sends the source of `train`, and nothing else, to two nodes"

def train(epochs=3, folder='/mnt/digits'):
    "All that it needs is in it; dollars, backquotes and backslashes are not, since a shell reads them first"
    from fastai.basics import CrossEntropyLossFlat,DataLoaders,Learner,accuracy,nn,set_seed,torch
    from sklearn.datasets import load_digits
    from fastdist import Checkpoint,this_world
    set_seed(42)
    data = [(torch.tensor(x).float()/16, int(y)) for x,y in zip(*load_digits(return_X_y=True))]
    dls = DataLoaders.from_dsets(data[:1400], data[1400:], bs=64//this_world().size, num_workers=0)
    model = nn.Sequential(nn.Linear(64,64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64,10))
    learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), metrics=accuracy, path=folder)
    with learn.distrib_ctx(), learn.no_bar():
        learn.fit_one_cycle(epochs, 3e-2, cbs=Checkpoint(f'{folder}/states'))
        learn.save('digits', with_opt=False)
    if this_world().rank==0: print(f'accuracy: {learn.recorder.values[-1][-1]:.3f}')

def submit():
    "Submit the job, and show what its first node prints"
    from kubeflow.trainer import CustomTrainer,TrainerClient
    client = TrainerClient()
    packages = ['fastai-dist','scikit-learn']
    job = client.train(runtime='torch-distributed', trainer=CustomTrainer(func=train, num_nodes=2, resources_per_node=dict(gpu=2), packages_to_install=packages))
    client.wait_for_job_status(job, status={'Running','Complete'})
    for o in client.get_job_logs(job, follow=True): print(o, end='')

if __name__=='__main__': submit()
