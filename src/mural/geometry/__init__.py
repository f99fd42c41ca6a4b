"""Where things are: intervals, windows, cuts, moves and local coordinates, in pure Python."""

from mural.geometry.cuts import Cuts, check_bounds
from mural.geometry.interval import Box, Interval, broadcast, overlap, subtract, volume, whole
from mural.geometry.local import slice_of, slices
from mural.geometry.moves import Move, Needs, boxes, moves, traffic
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
    "moves",
    "overlap",
    "slice_of",
    "slices",
    "subtract",
    "traffic",
    "volume",
    "whole",
]
