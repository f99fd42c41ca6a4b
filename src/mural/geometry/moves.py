"""Moves: the messages that bring everyone from what they have to what they need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from typing import NamedTuple

from mural.geometry.interval import Box, Interval, overlap, volume

Needs = tuple[tuple[Interval, ...], ...]
"""For each dim, the disjoint ascending intervals that are needed: the box of a piece, gaps left out."""


class Move(NamedTuple):
    """A box of data that goes from one owner to another (or stays, if the two are the same)."""

    source: int
    destination: int
    box: Box


def boxes(needs: Needs) -> tuple[Box, ...]:
    """The boxes that a product of interval lists stands for.

    >>> len(boxes(((Interval(0, 2),), (Interval(0, 1), Interval(5, 6)))))
    2
    """
    return tuple(product(*needs))


def needs_of(box: Box) -> Needs:
    """The needs of a rank that needs a single box."""
    return tuple((interval,) for interval in box)


def moves(have: Mapping[int, Box], need: Mapping[int, Needs], rank: int | None = None) -> tuple[Move, ...]:
    """All data movements, or only those from and to one rank, ordered by source, then destination, then position.

    Halo exchange, gather, re-layout, delivery to another stage and the reading of a checkpoint are all this one
    function. What a destination holds comes from itself; the other owners' boxes are disjoint, so each remaining
    position has one source. Ranks that need data and ranks that have it may differ.

    >>> have = {0: (Interval(0, 4),), 1: (Interval(4, 8),)}
    >>> halo = {0: ((Interval(0, 5),),), 1: ((Interval(3, 8),),)}
    >>> for move in moves(have, halo):
    ...     print(move.source, "to", move.destination, *move.box)
    0 to 0 Interval(start=0, stop=4)
    0 to 1 Interval(start=3, stop=4)
    1 to 0 Interval(start=4, stop=5)
    1 to 1 Interval(start=4, stop=8)
    """
    found: list[Move] = []
    wanted = {destination: boxes(needs) for destination, needs in need.items()}
    for source, owned in have.items():
        for destination in wanted if rank in (None, source) else [d for d in wanted if d == rank]:
            own = have.get(destination) if source != destination else None
            for box in wanted[destination]:
                part = overlap(owned, box)
                if volume(part) and (own is None or not volume(overlap(own, part))):
                    found.append(Move(source, destination, part))
    return tuple(found)


def traffic(found: Iterable[Move], width: int = 1) -> dict[tuple[int, int], int]:
    """The bytes that travel between each pair, `width` bytes per position; data that stay do not count."""
    total: dict[tuple[int, int], int] = {}
    for move in found:
        if move.source != move.destination:
            pair = (move.source, move.destination)
            total[pair] = total.get(pair, 0) + volume(move.box) * width
    return total
