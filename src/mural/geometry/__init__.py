"""Where things are: intervals, windows, cuts, moves and local coordinates, in pure Python."""

from mural.geometry.cuts import Cuts, check_bounds
from mural.geometry.interval import Box, Interval, broadcast, disjoint, overlap, subtract, volume, whole
from mural.geometry.local import slice_of, slices
from mural.geometry.moves import Move, Needs, boxes, moves, needs_of, traffic
from mural.geometry.window import Reads, Remap, Segment, Window

__all__ = [
    "Box",
    "Cuts",
    "Interval",
    "Move",
    "Needs",
    "Reads",
    "Remap",
    "Segment",
    "Window",
    "boxes",
    "broadcast",
    "check_bounds",
    "disjoint",
    "moves",
    "needs_of",
    "overlap",
    "slice_of",
    "slices",
    "subtract",
    "traffic",
    "volume",
    "whole",
]
