"""How ranks find each other and exchange data."""

from mural.comm.allreduce import all_gather, all_reduce, broadcast, explain, reduce, reduce_scatter
from mural.comm.environment import Placement, resolve
from mural.comm.exchange import fetch, mark, stack
from mural.comm.launch import placement
from mural.comm.local import RankError, run_local
from mural.comm.local_rank import attempt
from mural.comm.meeting import free_port
from mural.comm.mesh import AXES, SPATIAL, Mesh, choose_grid, init
from mural.comm.transport import Record, Transport
from mural.comm.watchdog import Watchdog

__all__ = [
    "AXES",
    "SPATIAL",
    "Mesh",
    "Placement",
    "RankError",
    "Record",
    "Transport",
    "Watchdog",
    "all_gather",
    "all_reduce",
    "attempt",
    "broadcast",
    "choose_grid",
    "explain",
    "fetch",
    "free_port",
    "init",
    "mark",
    "placement",
    "reduce",
    "reduce_scatter",
    "resolve",
    "run_local",
    "stack",
]
