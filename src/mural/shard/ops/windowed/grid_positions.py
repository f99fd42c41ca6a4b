"""The positions of a grid's coordinates in an image, bit for bit as torch computes them, and the pixels they read."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor
from typing import Any

import torch
from torch import Tensor

from mural.comm.exchange import first_order
from mural.geometry import Interval


@dataclass(frozen=True)
class Lattice:
    """One dim of an image that is sampled. `fused` says that torch's kernel rounds a product and a sum at once."""

    extent: int
    mode: str
    padding: str
    align_corners: bool
    fused: bool

    def window(self, positions: Tensor) -> Interval:
        """The lattice points that positions read; beyond the border if it repeats or mirrors the image."""
        known = positions.detach()
        known = known[known.isfinite()]
        low, high = (float(v) for v in torch.aminmax(known)) if known.numel() else (0.0, 0.0)
        before, after = {"nearest": (0, 1), "bilinear": (0, 2), "bicubic": (-1, 3)}[self.mode]
        limit = float(self.extent + 8)
        start = floor(min(max(low, -8.0), limit)) + before
        stop = floor(min(max(high, -8.0), limit)) + after
        if self.extends:
            return Interval(start, stop)
        start = min(max(0, start), self.extent - 1)
        return Interval(start, max(start + 1, min(stop, self.extent)))

    @property
    def extends(self) -> bool:
        """Whether points outside the image are read: other padding modes fill with zeros, or move positions inside."""
        return self.mode == "bicubic" and self.padding != "zeros"

    def source(self, point: int) -> int:
        """The pixel at a lattice point, which may be outside."""
        if self.padding == "border":
            return min(max(0, point), self.extent - 1)
        edge = 0 if self.align_corners else 1  # mirrored without or with the edge itself
        period = 2 * (self.extent - 1 + edge)
        if period == 0:
            return 0
        point = (point if point >= 0 else -point - edge) % period
        return min(point, period - edge - point)

    def reads(self, window: Interval) -> Interval:
        """The pixels at the points of a window."""
        if not self.extends:
            return window
        sources = [self.source(i) for i in range(*window)]
        return Interval(min(sources), max(sources) + 1)


class _Moved(torch.autograd.Function):
    """Known values, with their slope over some positions."""

    @staticmethod
    def forward(ctx: Any, positions: Tensor, values: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        return values

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return grad * slope, None, None


def positions_of(lattice: Lattice, coordinates: Tensor) -> Tensor:
    """The positions of normalised coordinates among the pixels, moved inside if the padding mode says so."""
    wide = coordinates.float() if coordinates.dtype in (torch.float16, torch.bfloat16) else coordinates
    shifted, extent = wide + 1, lattice.extent
    if lattice.align_corners:
        position = shifted * ((extent - 1) / 2)
    elif lattice.fused:
        position = moved(shifted, fused(shifted.detach(), extent / 2, -0.5), torch.tensor(extent / 2))
    else:
        position = shifted * (extent / 2) - 0.5
    if lattice.mode == "bicubic":
        if lattice.padding == "border":  # beyond these all four pixels are the edge
            return position.clamp(-1.5, extent + 0.5)
        return mirrored(position, lattice) if lattice.padding == "reflection" else position
    if lattice.padding == "reflection":
        position = mirrored(position, lattice)
    if lattice.padding != "zeros":
        # On the edge itself the slope is zero, unlike that of `clamp`.
        inside = (position > 0) & (position < extent - 1)
        known = position.detach()
        position = moved(position, torch.where(known.isnan(), 0, known).clamp(0, extent - 1), inside)
    return position.round() if lattice.mode == "nearest" else position


def moved(position: Tensor, values: Tensor, slope: Tensor) -> Tensor:
    """The values, with the gradient of the positions times a slope."""
    result: Tensor = _Moved.apply(position, values, slope.to(position.device, position.dtype))  # type: ignore[assignment]
    return result


def mirrored(position: Tensor, lattice: Lattice) -> Tensor:
    """Positions reflected at the image's border until they are inside."""
    low, span = (0.0, lattice.extent - 1) if lattice.align_corners else (-0.5, lattice.extent)
    known = position.detach() - low
    if span == 0:
        return moved(position, torch.zeros_like(known), torch.zeros_like(known))
    within = torch.fmod(known.abs(), 2 * span)
    values = torch.minimum(within, 2 * span - within) + low
    return moved(position, values, torch.where((known >= 0) == (within < span), 1, -1))


def fused(a: Tensor, b: float, c: float) -> Tensor:
    """a·b + c, rounded once, as by a fused multiply-add; `a` and `b` are split exactly into halves if need be.

    torch's kernels are compiled to such instructions. At a pixel's exact position the last bit decides which
    neighbours are read, and so the gradient.
    """
    if a.dtype != torch.float64:
        return (a.double() * b + c).to(a.dtype)
    product = a * b
    high, low = split(a)
    b_high, b_low = (float(v) for v in split(torch.tensor(b, dtype=torch.float64)))
    error = ((high * b_high - product) + high * b_low + low * b_high) + low * b_low
    return torch.where(error.isfinite(), (product + c) + error, product + c)


def split(a: Tensor) -> tuple[Tensor, Tensor]:
    """A number as a sum of two with half as many digits, whose products are exact."""
    scaled = a * 134217729.0  # 2**27 + 1
    high = scaled - (scaled - a)
    return high, a - high
