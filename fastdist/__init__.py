"""Modules:

- `fastdist.comm`: Collectives over nested structures, and who goes first
- `fastdist.data`: Which sample goes where: a data loader's share for each rank
- `fastdist.launch`: Ranks from a head process, and forks that do not hang
- `fastdist.world`: Who am I: rank, local rank, world size, node, device and backend, from any launcher"""

from .world import *
from .launch import *
