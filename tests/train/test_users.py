"""Scripts as their authors write them, on ranks and in one process: the same numbers, and on the terminal what a person expects

Each file in `users/` is one, and is found by itself. Comments in its first lines say what is expected of it:

- `ranks: 3` instead of two, `start: python` where the script starts its ranks by itself, `under: torchrun, kernel` for launchers in place of forks, which do what those ranks do; an error of ranks is shown under a launcher and by forks
- `compared: steps` where augmentation or dropout is each rank's own, and only the number of steps must be that of one process
- `shows: REGEX` for what the terminal must show, which one process does not; `alone: no` where nothing can be compared
- `fails: REGEX` for an error that ends it within seconds and is shown once; `last: REGEX` for the line of the script that is the last one shown; `hides: REGEX` for what must not be
- `once: no, REASON` where `FASTDIST_NPROCS` changes nothing in it, or what it does cannot be that of one process; `once: fails` where it fails then too, `once: runs` where plain fastai fails, `once: 2, REASON` where three ranks are not compared

In a script, `bs` is the batch size of a rank; one process takes that of all ranks, and imports plain fastai or Accelerate. What `_result.result` prints at the end is compared,
and so is each line that the terminal shows.

By default those in `usual` run, which take different paths; with `--whole` all. With `FASTDIST_NPROCS` set from outside a script runs once, with its own `bs`, and shows what plain fastai shows in one process: all scripts with `--whole`, by default a few that take different paths."""
import io,json,math,os,re,sys,tarfile,threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from http.server import BaseHTTPRequestHandler,ThreadingHTTPServer
from types import SimpleNamespace
import pytest
from PIL import Image
from procs import *
sys.path.append(str(tests/'users'))
from _start import as_one,screen

pytestmark = [pytest.mark.slow]
folder = tests/'users'
scripts = {p.stem:p for p in sorted(folder.glob('[!_]*.py'))}
defaults = dict(ranks=['2'], start=['ranks'], under=[], compared=['all'], alone=['yes'], shows=[], hides=[], fails=[], last=[], once=['as one'])

def wishes(path):
    "What the comments in the first lines of the script at `path` say"
    head = re.match(r'(#.*\n)*', path.read_text())[0]
    said = {k:re.findall(rf'^# {k}: (.*)', head, re.M) or v for k,v in defaults.items()}
    return SimpleNamespace(path=path, n=int(said['ranks'][0]), alone=said['alone']==['yes'], shows=said['shows'], hides=said['hides'], fails=said['fails'], last=said['last'], start=said['start'][0],
        once=said['once'][0], exact=said['compared']==['all'], under=', '.join(said['under']).split(', ') if said['under'] else [])

def ways(w): return ['fork']*(not w.under or bool(w.fails) and w.start=='ranks')+w.under # a launcher ends the other ranks of one that fails, forks end by themselves

cases = [(name,how) for name,path in scripts.items() for how in ways(wishes(path))]
def once_ways(w): return [] if w.once.startswith('no') else ['once-2',*['once-3']*(not w.once.startswith('2')),*['cells-2']*(w.once!='fails')] # a kernel ends well after an error

once = [(name,how) for name,path in scripts.items() for how in once_ways(wishes(path))]
usual = '''caught_error-fork digits_cnn-torchrun download-fork error_in_callback-fork error_in_data-torchrun fine_tuning-fork hidden_cancels-fork
    inference-fork learned_loss-fork mixed_precision-fork parallel_ctx-fork predict_on_rank0-fork resumed-fork stream-fork tabular-fork two_passes-fork unseeded_split-accelerate'''.split()
by_default = 'inference-once-3','resumed-once-2','stream-once-3','trackers-once-2' # all calls; no context; a stream as data; callbacks of rank 0

def compared_with(how): return 'same' if how[:-2] in ('once','cells') else 'one' # one process with the script's own batches, or with those of all ranks

def command(how, path, n):
    "What a person types to start the script at `path` on `n` ranks"
    if how=='torchrun': return torchrun(path, n=n)
    if how=='accelerate': return accelerate('--multi_gpu', '--num_processes', n, path)
    return [sys.executable,*([folder/'_kernel.py'] if how=='kernel' else []),path]

# %%
def few_images():
    "An archive of a folder of images, for training and validation"
    res = io.BytesIO()
    with tarfile.open(fileobj=res, mode='w:gz') as tar:
        for i in range(32):
            png = io.BytesIO()
            Image.new('RGB', (8,8), (i*7,)*3).save(png, 'png')
            info = tarfile.TarInfo(f'few/{"val" if i%4==0 else "train"}/{"ab"[i//2%2]}/{i:02}.png')
            info.size = len(png.getvalue())
            tar.addfile(info, io.BytesIO(png.getvalue()))
    return res.getvalue()

class Site(ThreadingHTTPServer):
    "Serves the same archive at each address, and counts"
    def __init__(self):
        super().__init__(('127.0.0.1', 0), Archive)
        self.gets,self.data,self.url = Counter(),few_images(),f'http://127.0.0.1:{self.server_port}'
        threading.Thread(target=self.serve_forever, daemon=True).start()

class Archive(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.gets[self.path] += 1
        self.send_response(200)
        self.send_header('Content-Length', str(len(self.server.data)))
        self.end_headers()
        self.wfile.write(self.server.data)
    def log_message(self, *args): pass

# %%
class Terminals:
    "Starts all that will be asked for, two at a time, in that order"
    def __init__(self, asked):
        self.site = Site()
        self.warm = Warm(PYTHONWARNINGS='', COLUMNS='', MPLBACKEND='agg', SITE=self.site.url)
        self.pool,self.shown = ThreadPoolExecutor(2),{}
        for o in dict.fromkeys(a for name,how in asked for a in ((name,how),(name,compared_with(how)))): self.shown[o] = self.pool.submit(self._play, *o)

    def _play(self, name, how):
        w = wishes(scripts[name])
        if how=='one' and not w.alone or how=='same' and w.once in ('fails','runs'): return
        if how[:-2] in ('once','cells'): return self._play_once(w, *how.split('-'))
        text = as_one(w.path.read_text(), w.n if how=='one' else 1) if how in ('one','same') else w.path.read_text()
        job = dict(path=w.path, text=text, n=w.n if how=='fork' and w.start=='ranks' else 0, plain=how in ('one','same'))
        return self.warm.ask(**job if how in ('fork','one','same') else dict(cmd=list(map(str, command(how, w.path, w.n))), real=bool(w.fails), timeout=150))

    def _play_once(self, w, how, n):
        job = dict(path=w.path, text=w.path.read_text()) if how=='once' else dict(cmd=list(map(str, command('kernel', w.path, 1))), timeout=150)
        return self.warm.ask(**job, env=dict(FASTDIST_NPROCS=n))

    def __call__(self, name, how): return self.shown[name,how].result()

    def close(self):
        self.site.shutdown()
        self.site.server_close()
        self.pool.shutdown(cancel_futures=True)
        if os.environ.get('COSTS'):
            for k,f in self.shown.items():
                if f.done() and f.result(): print(*k, f'{f.result().seconds:.1f}s', f'cpu {f.result().cpu:.1f}s')
        self.warm.close()

@pytest.fixture(scope='module')
def terminal(request):
    asked = [o.callspec.params['case'] for o in request.session.items if o.function.__name__ in ('test_users','test_once')]
    res = Terminals(asked)
    yield res
    res.close()

# %%
result,started = re.compile(r'RESULT (\{.*\})\s*$', re.M),re.compile(r'fastdist: \d+ ranks on')
number = re.compile(r'(?<![\w.])-?\d+(?:\.\d+)?(?:e-?\d+)?\b|\bnan\b|\binf\b')
bar = re.compile(r'Epoch \d+/\d+ : *(?=[^ |])|(Epoch \d+/\d+ : *)?\|?[█-]*\|? *[\d.]+% \[[^\]]*\]( -?[\d.]+(?= *$))?█*', re.M)
warning = re.compile(r'^\S+\.py:\d+: \w*Warning: (?:.|\n)*?\n  .*$', re.M) # each rank has its own
of_launchers = 'IPKernelApp|<Figure size|tqdm|Task was destroyed|^task: <Task|Launching training on|^\\*{20}|OMP_NUM_THREADS|torch.distributed.run|^warnings?$|The following values were not passed|was set to a value of|--\\w+. was set|' \
    'To avoid this warning pass|_script.py:\\d+: FutureWarning|^warnings.warn.$|reducer.cpp|^█+$'

of_gloo = re.compile(r'\[Gloo\] Rank |\bis connected to |peer ranks\. ?|Expected number of connected peer ranks is : ') # torch 2.10 prints it for each group, in pieces that mix

def without_gloo(text): return re.sub(r'(?m)^[\d |█]+$', '', of_gloo.sub('', text)) if '[Gloo]' in text else text

def results(shown): return sorted(map(json.loads, result.findall(shown.raw)), key=lambda o: o['rank'])

def near(a, b, eps=1e-4):
    "Are `a` and `b` the same, numbers in any nesting up to a relative `eps`?"
    if isinstance(a, dict): return isinstance(b, dict) and a.keys()==b.keys() and all(near(a[k], b[k], eps) for k in a)
    if isinstance(a, list): return isinstance(b, list) and len(a)==len(b) and all(near(x, y, eps) for x,y in zip(a, b))
    if isinstance(a, float) or isinstance(b, float): return a==b or math.isnan(a) and math.isnan(b) or math.isclose(a, b, rel_tol=eps, abs_tol=eps)
    return a==b

def lines(shown, exact):
    "What the terminal shows but for results and what launchers say, as text and numbers; no times"
    text = without_gloo(bar.sub('', result.sub('', '\n'.join(screen(shown.raw)))))
    rest = [o.strip() for o in warning.sub('', text).split('\n') if not started.search(o)]+sorted(set(warning.findall(text)))
    rest = [re.sub(r'\b\d+:\d\d\b', '', o).strip() for o in rest if not re.search(of_launchers, o)]
    return sorted((re.sub(r' +', ' ', number.sub('#', o)), [float(x) for x in number.findall(o)] if exact else []) for o in rest if o)

# %%
def check_numbers(w, ranks, one, once):
    "Each rank did what one process did"
    told = 1 if once or '.distribute(' in w.path.read_text() else w.n # a head tells alone
    assert [o['rank'] for o in ranks]==list(range(told)), f'results of {len(ranks)} ranks of {told}'
    for o in ranks:
        for k,v in one.items():
            if k!='rank' and (w.exact or k=='n_steps'): assert near(o[k], v), f'{k} of rank {o["rank"]}: {o[k]}\nin one process: {v}'
        for k,v in ranks[0].items(): assert k=='rank' or near(o[k], v, 1e-6), f'{k} of rank {o["rank"]}: {o[k]}\nof rank 0: {v}'

def check_text(w, shown, one, how, once):
    "The terminal shows each line that one process shows, once; those that are to be there besides; and no others"
    text = lines(shown, w.exact)
    for o in w.shows:
        assert once or any(re.search(o, line) for line in screen(shown.raw)), f'not shown: {o}'
        text = [t for t in text if not re.search(number.sub('#', o), t[0])]
    want = lines(one, w.exact) if one else text
    assert [o[0] for o in text]==[o[0] for o in want], f'ranks show {sorted(set(map(str, text))^set(map(str, want)))}'
    assert near(json.loads(json.dumps(text)), json.loads(json.dumps(want)), 1e-4)
    assert not one or bool(bar.search(shown.raw))==bool(bar.search(one.raw)) or how in ('kernel','cells-2'), 'a progress bar'
    tables = sum('train_loss' in o for o in screen(shown.raw))
    n = len(started.findall(shown.raw))
    assert 1-once<=n<=tables*(not once) or not tables or 'distrib' not in w.path.read_text(), 'how many ranks there are is said once'

def check_error(w, shown, once):
    "The terminal shows one error, soon, as it happened in the script"
    text = '\n'.join(re.split(r'Traceback \(most recent call last\):\s+File "[^"]*/bin/', '\n'.join(screen(shown.raw)))[:1])
    assert shown.code, 'it ended well'
    for o in w.fails: assert re.search(o.replace('rank ?1', 'rank ?[01]') if once else o, text), f'not shown: {o}' # the part of a batch is another
    n = len(re.findall(r'(?<!Original )(?<!failed:\n)(?<!same error:\n)Traceback \(most recent call last\)', text))
    assert n==1, f'{n} tracebacks'
    for o in w.hides: assert not re.search(o, text), f'shown: {o}'
    for o in w.last:
        file,line = re.findall(r'File "([^"]+)", line \d+, in .*\n(.*)', text)[-1]
        assert Path(file)==w.path and re.search(o, line), f'the last frame is {line}'

def check_case(terminal, name, how, once=False):
    "The script ends as expected, and leaves nothing"
    w,shown,one = wishes(scripts[name]),terminal(name, how),terminal(name, compared_with(how))
    try:
        if one: assert one.code==0 and (once or len(results(one))==1), f'one process fails, with {one.code}: {screen(one.raw)}'
        assert shown.code is not None, f'it did not end within {shown.seconds:.0f} s'
        assert not shown.left, f'it left running: {shown.left}'
        if w.once=='fails' if once else w.fails: return check_error(w, shown, once)
        assert shown.code==0, f'exit code {shown.code}'
        if one and results(one): check_numbers(w, results(shown), results(one)[0], once)
        check_text(w, shown, one, how, once)
    except AssertionError as e: raise AssertionError('\n'.join([str(e), f'The terminal shows, after {shown.seconds:.1f} s:', *screen(shown.raw)])) from None

@pytest.mark.parametrize('case', cases, ids='-'.join)
@pytest.mark.by_default(*usual)
def test_users(terminal, case): check_case(terminal, *case)

@pytest.mark.parametrize('case', once, ids='-'.join)
@pytest.mark.by_default(*by_default)
def test_once(terminal, case): check_case(terminal, *case, once=True)

def test_one_download_for_all_ranks(terminal):
    for f in terminal.shown.values(): f.result()
    assert set(terminal.site.gets.values())<={1}
