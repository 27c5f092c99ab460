"Half precision on the CPU, where fastai's own `to_fp16` and `to_bf16` compute in float32"
from fastai.basics import *
from fastai.callback.fp16 import AMPMode,GradScaler,MixedPrecision

class CpuHalf(MixedPrecision):
    "fastai's `MixedPrecision`, made for the CPU"
    def before_fit(self):
        fp16 = self.amp_mode==AMPMode.FP16
        self.autocast,self.scales = torch.autocast('cpu', dtype=torch.float16 if fp16 else torch.bfloat16),L()
        self.learn.scaler = GradScaler('cpu', **self.kwargs | dict(enabled=fp16))

def halved(
    learn:Learner, # Trained on the CPU
    mode='fp16', # Or 'bf16'
    **kw # Of a `GradScaler`
)->Learner: # `learn`
    "Train `learn` in half precision on the CPU"
    return learn.add_cb(CpuHalf(mode, **kw))
