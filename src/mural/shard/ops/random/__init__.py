"""Random layers: the same numbers for every grid."""

from mural.shard.ops.random import lattice

__all__ = [
    "lattice",
]
