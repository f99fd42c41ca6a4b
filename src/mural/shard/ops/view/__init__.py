"""Views and rearrangements: data stay where they are wherever that is possible."""

from mural.shard.ops.view import (
    broadcast,
    concatenate,
    gather_scatter,
    getitem,
    repeats,
    shapes,
    slices,
    triangle,
    turn,
)

__all__ = ["broadcast", "concatenate", "gather_scatter", "getitem", "repeats", "shapes", "slices", "triangle", "turn"]
