"""Random layers: the same numbers whatever the grid."""

from mural.shard.ops.random import lattice, random_activations

__all__ = ["lattice", "random_activations"]
