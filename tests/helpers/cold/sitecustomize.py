"""Python reads this as it starts, in processes that tests start: nobody looks for garbage among what is imported, neither meanwhile nor at the end

That is a third of what a process costs that imports torch and fastai and does little. What a script makes is collected as ever."""
import atexit,gc,sys
from functools import wraps
from importlib.machinery import PathFinder

def _quiet(load, freeze):
    @wraps(load)
    def _f(module):
        on = gc.isenabled()
        gc.disable()
        try: load(module)
        finally:
            if freeze:
                gc.freeze()
                atexit.register(gc.unfreeze) # or nanobind tells of leaks
            if on: gc.enable()
    return _f

class _Finder:
    "Finds packages as Python does"
    @staticmethod
    def find_spec(name, path=None, target=None):
        if not gc.isenabled() or name.partition('.')[0] not in ('torch','fastai','fastdist'): return
        spec = PathFinder.find_spec(name, path, target)
        if spec and spec.loader: spec.loader.exec_module = _quiet(spec.loader.exec_module, name=='fastdist')
        return spec

sys.meta_path.insert(0, _Finder)
