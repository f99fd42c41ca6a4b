"""The cost of halo exchanges, one by one or one for several layers: pure functions of a few measured numbers.

A layer that exchanges by itself waits for a message, unless its interior takes longer than the message. Layers that
share an exchange wait once, for a wider halo that is attached by a copy, and recompute the overlap. Their pieces have a
margin on one side and the image's border on the other, which torch pads by a copy too.

    alone     ─ exchange ─ layer 1 ─ exchange ─ layer 2 ─ exchange ─ layer 3
    together  ─ wide exchange ─ layer 1 with margin 2 ─ layer 2 with margin 1 ─ layer 3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import inf


@dataclass(frozen=True)
class Constants:
    """Seconds and rates of one device and its links, for one pass (forward, or backward)."""

    strips: float = 1e-3
    """Seconds of a small exchange by strips: packing, the message, and small kernels for the border."""
    fetch: float = 7e-4
    """Seconds of a small exchange that attaches the window."""
    latency: float = 5e-4
    """The part of these seconds in which the message is under way."""
    bandwidth: float = 1e9
    """Bytes per second between neighbours."""
    rate: float = 2e10
    """Floating-point operations per second of a convolution."""
    copying: float = 5e9
    """Bytes per second of a copy on the device."""
    piece: float = 2**22
    """The largest piece, in bytes, that is copied for it: with large images, memory is scarcer than time."""


@dataclass(frozen=True)
class Layer:
    """One windowed layer, on the rank with the largest piece."""

    flops: float
    """Floating-point operations for one output position, over all channels and images."""
    outputs: int
    """Output positions that the rank owns."""
    halo: int
    """Bytes that the layer fetches when it exchanges by itself."""
    exchanges: bool
    pads: bool = False
    """Whether windows reach beyond the image's border along a cut dim."""


@dataclass(frozen=True)
class FusedLayer:
    """One layer among those that share an exchange."""

    layer: Layer
    again: int
    """Output positions that it computes for its margin."""
    piece: int
    """Bytes of the piece that it reads, with its margin."""
    halo: int | None = None
    """Bytes that it fetches, if it is the one that exchanges."""


def alone(layer: Layer, constants: Constants, gradients: bool) -> float:
    """Seconds that a layer's own exchange adds: what its interior does not hide, in both passes."""
    if not layer.exchanges:
        return 0.0
    travel = constants.latency + layer.halo / constants.bandwidth
    interior = layer.flops * layer.outputs / constants.rate
    passes = (interior, 2 * interior) if gradients else (interior,)
    return sum(constants.strips - constants.latency + max(0.0, travel - hidden) for hidden in passes)


def together(parts: Sequence[FusedLayer], constants: Constants, gradients: bool) -> float:
    """Seconds that a shared exchange adds: its wait, the copies, and what is computed again."""
    if any(part.piece > constants.piece for part in parts):
        return inf
    fetched = [part for part in parts if part.halo is not None]
    waits = sum(constants.fetch + (part.halo or 0) / constants.bandwidth for part in fetched)
    copies = sum(2 * part.piece * (part.layer.pads + (part.halo is not None)) for part in parts) / constants.copying
    again = sum(part.layer.flops * part.again for part in parts) / constants.rate
    return (2 if gradients else 1) * (waits + copies) + (3 if gradients else 1) * again


def first_part(levels: int, price: Sequence[Sequence[float]]) -> int:
    """The number of levels that the first exchange serves, in the cheapest division of the chain.

    `price[i][j]` is the price of levels i, …, j as one part (infinite where they cannot be one).

    >>> first_part(3, [[2, 3, 9], [0, 2, 4], [0, 0, 2]])
    2
    """

    @cache
    def cheapest(start: int) -> tuple[float, int]:
        if start == levels:
            return 0.0, start
        return min((price[start][last] + cheapest(last + 1)[0], last + 1) for last in range(start, levels))

    total, stop = cheapest(0)
    return stop if total < inf else 1
