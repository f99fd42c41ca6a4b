"""Where things are: intervals, windows, cuts and moves, in pure Python."""

from mural.geometry.cuts import Cuts, check_bounds
from mural.geometry.interval import Box, Interval, broadcast, overlap, subtract, volume, whole
from mural.geometry.moves import Move, Needs, boxes, moves, place, traffic
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
    "place",
    "subtract",
    "traffic",
    "volume",
    "whole",
]
