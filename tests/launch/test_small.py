"A node that has little of everything: 64 MB of shared memory, 256 open files, one core, no IPv6, a name without an address, a home that cannot be written, a `TMPDIR` of a hundred characters"
import pytest,re,subprocess,sys
from procs import *

pytestmark = pytest.mark.launcher

place = '''
set -e
mount -t tmpfs -o size=64m tmpfs /dev/shm
hostname nowhere.invalid
ip link set lo up || ifconfig lo up
echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6
mkdir -p home $TMPDIR
mount -t tmpfs -o size=1m tmpfs home && mount -o remount,ro home
ulimit -n 256
export HOME=$PWD/home
exec taskset -c $(taskset -cp $$ | sed 's/.*: *//; s/[,-].*//') "$@"
'''

def why_not():
    if (why := why_missing('unshare taskset ip', 'util-linux', 'iproute2')): return why
    p = subprocess.run('unshare --mount --uts --net true'.split(), capture_output=True, text=True)
    if p.returncode: return f'this machine lets nobody take a part of itself away: {p.stderr.strip()}'

@pytest.fixture(scope='module')
def small(tmp_path_factory):
    if why := why_not(): pytest.skip(why)
    d = tmp_path_factory.mktemp('small')
    tmp = f'{d}/'.ljust(100, 'x')
    return lambda *cmd: run('unshare', '--mount', '--uts', '--net', 'bash', '-c', f'cd {d}{place}', 'bash', *cmd, TMPDIR=tmp)

@pytest.mark.whole
def test_two_ranks_with_data_workers_train(small):
    out,_ = small(sys.executable, examples/'digits.py')
    assert re.search(r'^accuracy: 0\.9', out, re.M), out[-2000:]
