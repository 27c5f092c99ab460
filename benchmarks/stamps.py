"Stamps of the clock around functions, and the time of each part of a step that they tell"
from collections import defaultdict
from functools import wraps
from statistics import median
from time import perf_counter_ns
from torch import nn

rest = 'dispatch and rest'

class Stamps:
    "Two stamps around each call; the time between two stamps belongs to the innermost call that is open then, or to `rest`"
    def __init__(self):
        self.on,self.log,self.keys,self.names,self.costs = False,[],{},[rest,'forward','forward'],{}
        self.forward = {True:1, False:2} # in training, and in validation

    def key(self, name):
        "The number of `name` in the log"
        if name not in self.keys:
            self.keys[name] = len(self.names)
            self.names.append(name)
        return self.keys[name]

    def wrap(self, f, key):
        "`f` with stamps; `key` is a function of the arguments"
        log,now = self.log.append,perf_counter_ns
        @wraps(f)
        def stamped(*args, **kwargs):
            if not self.on: return f(*args, **kwargs)
            log(key(*args))
            log(now())
            try: return f(*args, **kwargs)
            finally:
                end = now()
                log(-1)
                log(end)
        stamped.has_stamps = True
        return stamped

    def named(self, f, name):
        k = self.key(name)
        return self.wrap(f, lambda *_: k)

    def patch(self, owner, attr, name):
        "Put stamps on `attr` of a class or a module, where it is its own and has none; `name` may be a function of the arguments"
        f = vars(owner).get(attr)
        if not callable(f) or hasattr(f, 'has_stamps'): return
        setattr(owner, attr, self.wrap(f, lambda *args: self.key(name(*args))) if callable(name) else self.named(f, name))

    def patch_iter(self, cls, name):
        "Put stamps on each `next` of what `cls.__iter__` returns"
        f,done = vars(cls).get('__iter__'),object()
        if f is None or hasattr(f, 'has_stamps'): return
        fetch = self.named(next, name)
        @wraps(f)
        def stamped(dl):
            it = iter(f(dl))
            while (b := fetch(it, done)) is not done: yield b
        stamped.has_stamps = True
        cls.__iter__ = stamped

    def patch_made(self, module, attr, name):
        "Put stamps on the functions that `module.attr` returns; `name` is a function of its arguments"
        f = vars(module).get(attr)
        if f is None or hasattr(f, 'has_stamps'): return
        @wraps(f)
        def stamped(*args): return self.named(f(*args), name(*args))
        stamped.has_stamps = True
        setattr(module, attr, stamped)

    def hook(self, model):
        "Put stamps on calls of `model`, with which steps begin"
        keys,log,now = self.forward,self.log.append,perf_counter_ns
        def before(m, args):
            log(keys[m.training])
            log(now())
        def after(m, args, out):
            end = now()
            log(-1)
            log(end)
        model.register_forward_pre_hook(before)
        model.register_forward_hook(after)

    def calibrate(self):
        "Measure what stamps cost"
        f,m,hooked = lambda: None,nn.Identity(),nn.Identity()
        self.hook(hooked)
        self.on = True
        usual,mine = self._cost(self.wrap(f, lambda *_: 0), f),self._cost(lambda: hooked(0), lambda: m(0))
        self.on,self.costs = False,defaultdict(lambda: usual, {k:mine for k in self.forward.values()})

    def _cost(self, call, plain, n=3000):
        "Nanoseconds that two stamps add to a call, between them and outside of them, in a row of calls"
        base,total = [min(_per_call(f, n) for _ in range(3)) for f in (plain,call)]
        inside = median(b-a for a,b in zip(self.log[1::4], self.log[3::4]))
        self.log.clear()
        return inside-base,total-inside

    def steps(self):
        "For each step, from one forward pass to the next: whether it is of training, and nanoseconds by part; what stamps cost is a part of its own"
        res,stack,last,begins = [(None, defaultdict(float))],[0],0,{v:k for k,v in self.forward.items()}
        for k,t in zip(self.log[::2], self.log[1::2]):
            res[-1][1][self.names[stack[-1]]] += t-last
            if k in begins: res.append((begins[k], defaultdict(float)))
            if k>=0: self._less_cost(res[-1][1], self.names[stack[-1]], k)
            stack,last = stack+[k] if k>=0 else stack[:-1],t
        return res[1:]

    def _less_cost(self, step, outer, k):
        inside,outside = self.costs[k]
        step[outer] -= outside
        step[self.names[k]] -= inside
        step['stamps'] += inside+outside

def _per_call(f, n):
    start = perf_counter_ns()
    for _ in range(n): f()
    return (perf_counter_ns()-start)/n
