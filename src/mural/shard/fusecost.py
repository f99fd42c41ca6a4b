"""The cost of halo exchanges, one by one or one for several layers: pure functions of a few measured numbers.

A layer that exchanges by itself waits for a message, unless its interior takes longer than the message travels. Layers
that share an exchange wait once, for a wider halo that is attached by a copy, and compute the overlap again.

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

    latency: float = 3e-4
    """Seconds between posting a small message and its arrival."""
    strips: float = 5e-4
    """Seconds of work around an exchange by strips: packing, and the small kernels for the border."""
    fetch: float = 2e-4
    """Seconds of work around an exchange that attaches the window."""
    bandwidth: float = 1e9
    """Bytes a second between neighbours."""
    rate: float = 2e10
    """Floating point operations a second of a convolution."""
    copying: float = 5e9
    """Bytes a second of a copy on the device."""
    piece: float = 2**21
    """The largest piece, in bytes, that is copied to attach a window: large images lack memory more than time."""


@dataclass(frozen=True)
class Layer:
    """One windowed layer, on the rank with the largest piece."""

    flops: float
    """Operations for one output position, of all channels and images."""
    outputs: int
    """Own output positions."""
    halo: int
    """Bytes that the layer fetches when it exchanges by itself."""
    exchanges: bool


@dataclass(frozen=True)
class Wide:
    """One wide exchange that serves several layers, on the rank with the largest piece."""

    halo: int
    """Bytes that are fetched."""
    piece: int
    """Bytes of the attached piece."""


def alone(layer: Layer, constants: Constants, gradients: bool) -> float:
    """Seconds that a layer's own exchange adds: what its interior does not hide, in both passes."""
    if not layer.exchanges:
        return 0.0
    travel = constants.latency + layer.halo / constants.bandwidth
    interior = layer.flops * layer.outputs / constants.rate
    passes = (interior, 2 * interior) if gradients else (interior,)
    return sum(constants.strips + max(0.0, travel - hidden) for hidden in passes)


def together(
    exchanges: Sequence[Wide], extra: Sequence[tuple[Layer, int]], constants: Constants, gradients: bool
) -> float:
    """Seconds that shared exchanges add, with the output positions that each layer computes for its margin."""
    if any(e.piece > constants.piece for e in exchanges):
        return inf
    passes = 2 if gradients else 1
    waits = sum(
        constants.fetch + constants.latency + e.halo / constants.bandwidth + 2 * e.piece / constants.copying
        for e in exchanges
    )
    again = sum(layer.flops * positions for layer, positions in extra) / constants.rate
    return passes * waits + (3 if gradients else 1) * again


def first_part(levels: int, price: Sequence[Sequence[float]]) -> int:
    """How many levels of a chain the first exchange serves, in the cheapest division of the chain.

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
