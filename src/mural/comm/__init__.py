"""How ranks find each other and exchange data."""

from mural.comm.exchange import fetch, mark, stack
from mural.comm.launch import free_port, run_local
from mural.comm.mesh import AXES, SPATIAL, Mesh, choose_grid, init
from mural.comm.transport import Record, Transport

__all__ = [
    "AXES",
    "SPATIAL",
    "Mesh",
    "Record",
    "Transport",
    "choose_grid",
    "fetch",
    "free_port",
    "init",
    "mark",
    "run_local",
    "stack",
]
