"""Which process is which rank, and the mesh that ranks are arranged in."""

from mural.ranks.identity import Placement, resolve
from mural.ranks.join import placement
from mural.ranks.mesh import AXES, SPATIAL, Mesh, choose_grid, init
from mural.ranks.spawn import RankError, run_local
from mural.ranks.spawned import attempt
from mural.ranks.store import free_port

__all__ = [
    "AXES",
    "SPATIAL",
    "Mesh",
    "Placement",
    "RankError",
    "attempt",
    "choose_grid",
    "free_port",
    "init",
    "placement",
    "resolve",
    "run_local",
]
