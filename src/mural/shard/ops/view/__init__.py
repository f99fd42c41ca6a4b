"""Views and rearrangements: data stay where they are if possible."""

from mural.shard.ops.view import concatenate, gather_scatter, getitem, shapes, slices

__all__ = [
    "concatenate",
    "gather_scatter",
    "getitem",
    "shapes",
    "slices",
]
