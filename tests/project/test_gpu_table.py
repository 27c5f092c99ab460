"The table of what a GPU has to confirm, made on the CPU"
import json,os,pytest,sys
from fastcore.test import test_eq
from procs import here,run,top

command = top/'benchmarks/gpu.py'

def table(path, *args, **kw):
    out,_ = run(sys.executable, command, '--out', path, *args, **(dict(CUDA_VISIBLE_DEVICES='')|kw))
    rows = json.loads(path.read_text())['rows']
    assert all(o['check'] in out for o in rows)
    return {(o['check'],o['where']):o for o in rows}

@pytest.mark.whole
@pytest.mark.launcher
def test_what_holds_on_the_cpu(tmp_path):
    res = table(tmp_path/'rows.json', '--only', 'whole|carried|scaler')
    test_eq({k:o['result'] for k,o in res.items()}, {('carried_numbers','one rank, gloo'):'held', ('shards_kept_whole','2 CPU ranks'):'held', ('shards_with_a_scaler','2 CPU ranks'):'not here'})

@pytest.mark.whole
@pytest.mark.launcher
def test_a_failure_hides_no_other(tmp_path):
    "A process that dies, and one that is wrong, with its traceback"
    res = {k:o for (k,_),o in table(tmp_path/'rows.json', '--module', 'gpu_broken', rc=1, PYTHONPATH=os.pathsep.join([str(here),os.environ.get('PYTHONPATH', '')])).items()}
    test_eq({k:o['result'] for k,o in res.items()}, dict(wrong='did not hold', dies='did not hold', elsewhere='not here', right='held'))
    assert 'on purpose' in res['wrong']['trace'] and 'without an error message' in res['dies']['figure']
