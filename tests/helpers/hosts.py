"Two hosts that are reached by SSH: network namespaces of this machine, each with an sshd, on a network of their own"
import os,subprocess
from contextlib import ExitStack,contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from procs import *

sshd = """ListenAddress {at}
Port 2222
HostKey {d}/host
AuthorizedKeysFile {d}/key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
SetEnv PYTHONPATH={here}/cold:{top}
"""
client = """Host {names}
  Port 2222
  User root
  IdentityFile {d}/key
  IdentitiesOnly yes
  UserKnownHostsFile {d}/known
  StrictHostKeyChecking accept-new
  LogLevel ERROR
"""

names_here = [f'fd{os.getpid():x}{o}' for o in 'abt'] # of this process: several runs of the tests may be on one machine
nets_here = [f'10.{o}.{os.getpid()%250}' for o in (213,214)]

def why_no_hosts():
    "Why there can be no hosts here"
    if why := why_missing('sshd ssh ip', 'openssh-server', 'openssh-client', 'iproute2', path=f"{os.environ['PATH']}:/usr/sbin:/sbin"): return why
    if os.geteuid(): return 'only root can make network namespaces'
    try:
        with namespaces(names_here[2:], nets_here[1]): return
    except subprocess.CalledProcessError as e: return f'{" ".join(e.cmd)} failed: {e.stderr}'

def sh(cmd): subprocess.run(cmd.split(), check=True, capture_output=True, timeout=30)

@contextmanager
def namespaces(names, net):
    "A network namespace for each of `names`, at `net`.2 and on, joined by a bridge with this machine at `net`.1"
    with ExitStack() as stack:
        bridge = f'{names[0]}br'
        sh(f'ip link add {bridge} type bridge')
        stack.callback(sh, f'ip link del {bridge}')
        sh(f'ip addr add {net}.1/24 dev {bridge}')
        sh(f'ip link set {bridge} up')
        for i,o in enumerate(names, 2):
            sh(f'ip netns add {o}')
            stack.callback(sh, f'ip netns del {o}')
            sh(f'ip link add {o}v type veth peer name eth0 netns {o}')
            stack.callback(sh, f'ip link del {o}v') # else it lives as long as the last process in its namespace
            sh(f'ip link set {o}v master {bridge} up')
            for cmd in ('link set lo up','link set eth0 up',f'addr add {net}.{i}/24 dev eth0'): sh(f'ip -n {o} {cmd}')
        yield

@contextmanager
def ssh_hosts(names=names_here[:2], net=nets_here[0]):
    "Hosts by SSH; yields their names, and the daemon of each"
    with TemporaryDirectory() as d, namespaces(names, net), ExitStack() as stack:
        Path('/run/sshd').mkdir(exist_ok=True)
        for o in ('host','key'): subprocess.run(['ssh-keygen','-q','-t','ed25519','-N','','-f',f'{d}/{o}'], check=True)
        config = client.format(d=d, names=' '.join(names)) + ''.join(f'Host {o}\n  HostName {net}.{i}\n' for i,o in enumerate(names, 2))
        Path(d, 'config').write_text(config)
        Path(d, 'ssh').write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {d}/config "$@"\n')
        Path(d, 'ssh').chmod(0o755)
        daemons = {o:stack.enter_context(daemon(d, o, f'{net}.{i}')) for i,o in enumerate(names, 2)}
        path = os.environ['PATH']
        stack.callback(os.environ.update, PATH=path)
        os.environ['PATH'] = f'{d}:{path}'
        for o in names: await_that(lambda: not subprocess.run(['ssh',o,'true'], capture_output=True).returncode)
        yield SimpleNamespace(names=list(names), daemons=daemons, d=d, net=net)

@contextmanager
def daemon(d, name, at):
    Path(d, f'{name}.conf').write_text(sshd.format(d=d, at=at, here=here, top=top))
    p = start('ip','netns','exec',name,shutil.which('sshd', path=f"{os.environ['PATH']}:/usr/sbin"),'-D','-e','-f',f'{d}/{name}.conf', out=subprocess.DEVNULL)
    try: yield p
    finally:
        p.terminate()
        p.wait(10)
