"Whatever goes wrong on one rank, wherever: all ranks end or go on together, soon, and know why"
import faults,pandas as pd,pytest,subprocess,sys
from faults import *
from fastcore.test import test_eq,test_close
from procs import processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# a worker is ahead by as much as it happens to be; one process spoils all samples of the batch, not those of one rank
unlike_one_process = [('SIGINT','data worker'), ('NaN','forward'), ('NaN','backward')]

@pytest.fixture(scope='module')
def whole(request): return request.config.getoption('--whole') is not None

@pytest.fixture(scope='module')
def all_cells(whole, tmp_path_factory):
    "Ranks are forked by a process that has imported less than this one, which is faster"
    return run_cells(tmp_path_factory.mktemp('faults'), *([] if whole else ['--divided']))

def run_cells(folder, *args):
    subprocess.run([sys.executable, faults.__file__, '--folder', folder, *args], check=True, timeout=500)
    end = time.monotonic()+60
    while processes(folder) and time.monotonic()<end: time.sleep(0.2)
    return found(folder),processes(folder)

def names(text, o): return f'rank {o["culprit"]} failed' in text

def check_survivable(o):
    alone,mine = o['alone'],o['ranks'][o['culprit']]
    for r in o['ranks']:
        assert r['whole'] and r['seconds']<60
        if hidden(o['kind'], o['place']): assert r['how']=='RankError' and names(r['text'], o)
        elif alone['how']=='went on': test_eq((r['how'], r['n']), ('went on', alone['n']))
        elif r is mine: assert r['how']==alone['how'] or o['place']=='data worker'
        else: assert r['how']==alone['how'] or r['how']=='RankError' and names(r['text'], o)
        same = o['ranks'][0] if (o['kind'], o['place']) in unlike_one_process else alone
        for a,b in zip(r['weights'], same['weights']): test_close(a, b, 1e-5)

def check_fatal(o):
    saw = {int(k):v for k,v in o['saw'].items()}
    told = {r:v for r,v in saw.items() if r!=o['culprit']}
    test_eq(len(told), o['size']-1)
    for how,text,seconds in told.values(): assert how=='RankError' and names(text, o) and seconds<60
    assert o['seconds']<60 and names(o['head'], o)
    if o['kind']=='dead loop': assert 'did not move' in saw[o['culprit']][1]
    elif o['place']!='data worker': assert o['culprit'] not in saw and 'without an error message' in first(told.values())[1]

@pytest.mark.parametrize('kind', survivable+fatal)
def test_faults(all_cells, whole, kind):
    cells = [o for o in all_cells[0] if o['kind']==kind]
    kinds = survivable if kind in survivable else fatal
    n = 4*len(places) if whole else sum(by_default(kinds.index(kind), kind, j, p) for j,p in enumerate(places))
    test_eq(len({(o['place'],o['size'],o['culprit']) for o in cells}), n)
    assert n>=3
    for o in cells:
        try: (check_survivable if kind in survivable else check_fatal)(o)
        except BaseException: raise AssertionError(f'{kind} in {o["place"]} on rank {o["culprit"]} of {o["size"]}: {o}')

def test_nothing_is_left_running(all_cells):
    rows = pd.DataFrame(times(all_cells[0]))
    print(rows.pivot_table(index='fault', columns='place', values='seconds', aggfunc='max', sort=False).round(1).to_string())
    test_eq(all_cells[1], [])

@pytest.mark.whole
def test_faults_with_shards(tmp_path, request):
    "Some cells; all of them with `--whole`"
    cells,left = run_cells(tmp_path, '--shard', *(['--few'] if request.config.getoption('whole') is None else []))
    test_eq(left, [])
    assert len(cells)>=len(some) and all(o['shard'] for o in cells)
    for o in cells:
        try: (check_survivable if o['kind'] in survivable else check_fatal)(o)
        except BaseException: raise AssertionError(f'{o["kind"]} in {o["place"]} on rank {o["culprit"]} of {o["size"]}: {o}')
