"""Random layers: the same numbers whatever the grid."""

from mural.shard.ops.random import lattice

__all__ = [
    "lattice",
]
