"Stamps of the clock around functions, and the time of each part of a step that they tell"
from collections import defaultdict
from functools import wraps
from statistics import median
from time import perf_counter_ns

rest = 'dispatch and rest'

class Stamps:
    "Two stamps around each call; the time between two stamps belongs to the innermost call that is open then, or to `rest`"
    def __init__(self):
        self.on,self.log,self.names,self.costs = False,[],[rest],{}
        self.forward = {k:self.key('forward') for k in (True,False)} # in training, and in validation

    def key(self, name):
        "A number for `name` in the log"
        self.names.append(name)
        return len(self.names)-1

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

    def patch(self, owner, attr, name=None, key=None):
        "Put stamps on `attr` of a class or a module, where it is its own; not twice"
        f = vars(owner).get(attr)
        if not callable(f) or hasattr(f, 'has_stamps'): return
        k = None if key else self.key(name)
        setattr(owner, attr, self.wrap(f, key or (lambda *_: k)))

    def patch_iter(self, cls, name):
        "Put stamps on each `next` of what `cls.__iter__` returns"
        if hasattr(f := cls.__iter__, 'has_stamps'): return
        fetch,done = self.wrap(next, lambda *_, k=self.key(name): k),object()
        @wraps(f)
        def stamped(dl):
            it = iter(f(dl))
            while (b := fetch(it, done)) is not done: yield b
        stamped.has_stamps = True
        cls.__iter__ = stamped

    def hook(self, model):
        "Put stamps on calls of `model`, with which steps begin; what they cost is measured beside"
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

    def cost(self, call, plain, n=3000):
        "Nanoseconds that two stamps add, between them and outside of them, as calls in a row show it"
        def per_call(f):
            start = perf_counter_ns()
            for _ in range(n): f()
            return (perf_counter_ns()-start)/n
        self.log.clear()
        base,total = min(per_call(plain) for _ in range(3)),min(per_call(call) for _ in range(3))
        inside = median(b-a for a,b in zip(self.log[1::4], self.log[3::4]))
        self.log.clear()
        return inside-base,total-inside

    def calibrate(self):
        "Measure what stamps cost"
        from torch import nn
        self.on,f,m = True,lambda: None,nn.Identity()
        usual,hooked = self.cost(self.wrap(f, lambda *_: 0), f),nn.Identity()
        self.hook(hooked)
        mine = self.cost(lambda: hooked(0), lambda: m(0))
        self.costs,self.on = defaultdict(lambda: usual, {k:mine for k in self.forward.values()}),False

    def steps(self, log):
        "For each step in `log`, from one forward pass to the next: whether it is of training, and nanoseconds by part without those of stamps"
        res,stack,last,keys = [],[0],None,{v:k for k,v in self.forward.items()}
        for k,t in zip(log[::2], log[1::2]):
            if res: res[-1][1][self.names[stack[-1]]] += t-last
            last = t
            if k in keys: res.append((keys[k], defaultdict(float)))
            if res and k>=0:
                inside,outside = self.costs[k]
                res[-1][1][self.names[stack[-1]]] -= outside
                res[-1][1][self.names[k]] -= inside
                res[-1][1]['stamps'] += inside+outside
            stack = stack+[k] if k>=0 else stack[:-1]
        return res
