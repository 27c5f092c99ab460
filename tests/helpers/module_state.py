"What modules outside of fastdist hold, to be compared; without fastdist, whose import it is to tell of"
import signal,sys
from types import ModuleType

def held():
    "What modules outside of fastdist hold, and their classes: name -> object"
    theirs = lambda name: name.partition('.')[0] not in ('fastdist','__main__','__mp_main__')
    mods = {k:m for k,m in [*sys.modules.items()] if isinstance(m, ModuleType) and theirs(k)}
    own = {f'{name}.{k}':v for name,m in mods.items() for k,v in vars(m).items() if not (k.startswith('__') and k.endswith('__'))}
    classes = {}
    for k,c in own.items():
        if isinstance(c, type) and theirs(str(c.__module__)): classes.setdefault(c, k)
    own |= {f'{k}.{a}':v for c,k in classes.items() for a,v in vars(c).items()}
    return own|{f'signal {s}':signal.getsignal(s) for s in signal.valid_signals()}

def changed(before, after):
    "Names that are new or hold another object, without the copies that fastcore's `patch` keeps"
    diff = {k for k,v in after.items() if k not in before or before[k] is not v}
    return sorted(k for k in diff if '._orig_' not in k)
