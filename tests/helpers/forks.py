"Forks that cost half: Linux copies one entry for 2 MB of a process, instead of 512"
import re
from ctypes import CDLL,c_size_t,c_void_p
from pathlib import Path

size,collapse = 1<<21,25 # of a huge page, and MADV_COLLAPSE

def huge_pages():
    "Move what this process has on its heap to huge pages, which a fork shares in fewer steps; return how many, 0 on a system that has none"
    maps,madvise = Path('/proc/self/maps'),getattr(CDLL(None), 'madvise', None)
    if not madvise or not maps.exists(): return 0
    heap = [[int(o, 16) for o in m] for m in re.findall(r'^(\w+)-(\w+) rw-p 00000000 00:00 0 *(?:\[heap\])?$', maps.read_text(), flags=re.M)]
    return sum(not madvise(c_void_p(o), c_size_t(size), collapse) for a,b in heap for o in range(-(-a//size)*size, b//size*size, size))
