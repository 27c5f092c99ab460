"A script that runs once, in a kernel: cut into cells, as one cell, and interrupted"
import re,time,psutil,pytest
from jupyter_client.manager import start_new_kernel
from procs import here

pytestmark = [pytest.mark.launcher, pytest.mark.slow, pytest.mark.timeout(240)]
cells = f'''import sys; sys.path.append({str(here)!r})
from fastai.basics import *
from fastai.callback.all import *
from fastdist import *
from learners import digits
# %%
set_seed(7)
class Seen(Callback):
    def after_fit(self): self.learn.said = 'first'
learn = digits(n=190, bs=24, cbs=Seen())
# %%
with learn.distrib_ctx(nprocs=2):
    learn.fit_one_cycle(1)
    print(learn.said)
# %%
class Seen(Callback):
    def after_fit(self): self.learn.said = 'second'
learn.remove_cbs([o for o in learn.cbs if type(o).__name__=='Seen'])
learn.add_cb(Seen())
learn.to_distributed(nprocs=2);
# %%
learn.fit(1)
# %%
print('said', learn.said, [round(float(o), 3) for o in learn.recorder.losses+learn.validate()])
# %%
class Slow(Callback):
    def after_batch(self):
        if not rank_distrib(): print('in a step', flush=True)
        time.sleep(.1)
learn.fit(100, cbs=Slow())
# %%
print(learn.epoch<100, sum(o.is_alive() for o in __import__('multiprocessing').active_children()), len(learn.cbs))
'''.split('# %%\n')

class Kernel:
    "A kernel that stands in `path`, and what its cells show"
    def __init__(self, path): self.manager,self.client = start_new_kernel(cwd=str(path))

    def __call__(self, code, when=None):
        "Return what cell `code` shows, each as a type and a text; the kernel is interrupted as soon as it prints `when`"
        res,id_ = [],self.client.execute(code)
        while True:
            msg = self.client.get_iopub_msg(timeout=100)
            if msg['parent_header'].get('msg_id')!=id_: continue
            kind,content = msg['msg_type'],msg['content']
            if kind=='status' and content['execution_state']=='idle': return res
            if kind=='stream': res.append((content['name'],content['text']))
            if kind in ('display_data','update_display_data','execute_result'): res.append((kind,content['data'].get('text/html', content['data'].get('text/plain', ''))))
            if kind=='error': res.append((content['ename'],'\n'.join(content['traceback'])))
            if when and kind=='stream' and when in content['text']:
                self.manager.interrupt_kernel()
                when,self.pressed = None,time.monotonic()

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

def shown(kernel, codes): return [[(k,re.sub(r'\d\d:\d\d|[\w-]{36}', '', s)) for k,s in kernel(o) if k!='stderr'] for o in codes]

def text_of(out): return ''.join(s for k,s in out if k=='stdout').strip()

def kinds(out): return {k for k,s in out if s},['<table' in s for _,s in out][-1:],any('<progress' in s for _,s in out)

@pytest.fixture
def kernel(tmp_path):
    started = []
    def start():
        started.append(Kernel(tmp_path))
        return started[-1]
    yield start
    for o in started: o.close()

def test_a_script_in_a_kernel(kernel):
    "Cells show what they show in one process, and a script as one cell has the same numbers; Ctrl-C is one line and leaves a Learner that goes on"
    many,one = kernel(),kernel()
    plain = [o.replace('nprocs=2', 'nprocs=1') for o in cells[:6]]
    a,b = shown(many, cells[:6]),shown(one, plain)
    for x,y in zip(a, b): assert kinds(x)==kinds(y), (x,y)
    assert not any(k=='execute_result' for o in a for k,_ in o)
    said = [text_of(o) for o in (a[5],b[5])]
    assert said[0]==said[1] and said[0].startswith('said second'), said
    began = psutil.Process(many.manager.provisioner.pid)
    out = many(cells[6], 'in a step')
    assert time.monotonic()-many.pressed<30
    (name,text), = [o for o in out if o[0] not in ('stdout','stderr','display_data','update_display_data')]
    assert name=='KeyboardInterrupt' and 'parent.py' not in text, text
    assert text_of(many(cells[7]))=='True 0 5' and not began.children()
    assert text_of(shown(many, [''.join(cells[:6])])[0])==text_of(shown(one, [''.join(plain)])[0])
