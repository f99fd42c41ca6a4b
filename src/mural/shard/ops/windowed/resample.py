"""Interpolation and pixel shuffling: outputs on a different lattice from inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import floor
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mural.errors import UnsupportedOp
from mural.geometry import Interval, Window
from mural.shard.autocasting import in_plain_type
from mural.shard.halo.fuse import through
from mural.shard.ops.call_arguments import bound
from mural.shard.ops.windowed.adaptive import adaptive
from mural.shard.ops.windowed.conv import crop_or_pad, each
from mural.shard.rules import Place, Windowed, of_whole_images
from mural.shard.table import name_of, register
from mural.shard.tensor import ShardedTensor

LINEAR = ("linear", "bilinear", "trilinear")
NEAREST = ("nearest", "nearest-exact")


@dataclass(frozen=True)
class Taps:
    """One dim of an interpolation: each output is a weighted sum of a few neighbouring inputs.

    `scale` is input positions per output position, as torch derives it from size or scale_factor.
    """

    extent: int
    out_extent: int
    mode: str
    align_corners: bool
    scale: float

    @property
    def copies(self) -> bool:
        """Whether torch copies along this dim: in the linear modes if the extent stays, whatever the scale."""
        return self.mode in LINEAR and not self.align_corners and self.extent == self.out_extent

    def source(self, o: int) -> float:
        """The position of an output among the inputs."""
        if self.copies:
            return o
        if self.mode == "nearest" or self.align_corners:
            return o * self.scale
        return (o + 0.5) * self.scale - 0.5

    def reads(self, out: Interval) -> tuple[Interval, ...]:
        """The inputs that an output interval reads, with one extra position for rounding."""
        if out.size == 0:
            return (Interval(0, 0),)
        reach = 3 if self.mode == "bicubic" else 2
        start = floor(self.source(out.start)) - reach + 1
        stop = floor(self.source(out.stop - 1)) + reach + 1
        start = min(max(0, start), self.extent - 1)
        return (Interval(start, max(start + 1, min(self.extent, stop))),)

    def taps(self, out: Interval, like: Tensor, dims: int) -> list[tuple[Tensor, Tensor | None]]:
        """For each tap, the input index of every output and its weight (None: 1), in torch's own arithmetic."""
        if self.mode in NEAREST:
            index = nearest_index(self, like.dtype, like.device, dims)[out.start : out.stop]
            return [(index, None)]
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        o = torch.arange(out.start, out.stop, dtype=dtype, device=like.device)
        scale = torch.tensor(self.scale, dtype=dtype, device=like.device)
        source = o if self.copies else o * scale if self.align_corners else (o + 0.5) * scale - 0.5
        last = self.extent - 1
        if self.mode == "bicubic":
            base = source.floor()
            return [
                ((base.long() + k).clamp(0, last), weight)
                for k, weight in zip((-1, 0, 1, 2), cubic(source - base), strict=True)
            ]
        source = source.clamp(min=0)
        base = source.floor().long().clamp(max=last)
        part = (source - base).clamp(0, 1)
        return [(base, 1 - part), ((base + 1).clamp(max=last), part)]


def cubic(t: Tensor) -> list[Tensor]:
    """The four weights of cubic convolution with a = −0.75, at a distance t after the second tap."""
    a = -0.75

    def near(x: Tensor) -> Tensor:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: Tensor) -> Tensor:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


@lru_cache(maxsize=256)
def nearest_index(taps: Taps, dtype: torch.dtype, device: torch.device, dims: int) -> Tensor:
    """The input that torch's nearest neighbour picks for every output, from torch itself, for the same rounding."""
    exact = torch.float64 if dtype == torch.float64 or taps.extent > 2**24 else torch.float32
    positions = torch.arange(taps.extent, dtype=exact, device=device).view(1, 1, -1, *(1,) * (dims - 1))
    factor = [1 / taps.scale] + [1.0] * (dims - 1)
    given = abs(taps.scale - taps.extent / taps.out_extent) > 1e-12
    size: Any = None if given else (taps.out_extent, *(1,) * (dims - 1))
    with torch.no_grad():
        found = F.interpolate(positions, size, factor if given else None, mode=taps.mode)
    return found.flatten()[: taps.out_extent].long()


def interpolate_rule(extents: Sequence[int], taps: tuple[Taps, ...]) -> Windowed:
    """The rule of interpolation with these taps."""
    n = len(extents)
    mode, align = taps[0].mode, taps[0].align_corners
    factors = [round(1 / t.scale) if t.scale > 0 else 0 for t in taps]
    whole = not align and all(
        t.out_extent == f * t.extent and t.scale * f == 1 for t, f in zip(taps, factors, strict=True)
    )
    if mode in NEAREST:
        whole = whole and all(f & (f - 1) == 0 for f in factors)

    def run(piece: Tensor, places: tuple[Place, ...]) -> Tensor:
        if whole:
            y = F.interpolate(piece, scale_factor=[float(f) for f in factors], mode=mode)
            amounts = [
                m
                for place, f in zip(places[::-1], factors[::-1], strict=True)
                for m in (place.have[0].start * f - place.out.start, place.out.stop - place.have[0].stop * f)
            ]
            return crop_or_pad(y, amounts)
        for dim, (place, tap) in enumerate(zip(places, taps, strict=True), piece.ndim - n):
            piece = weighted(piece, dim, place, tap.taps(place.out, piece, n))
        return piece

    return Windowed(f"interpolate({mode})", taps, run)


def weighted(piece: Tensor, dim: int, place: Place, taps: list[tuple[Tensor, Tensor | None]]) -> Tensor:
    """The sum of the taps along one dim, in the piece's type."""
    total: Tensor | None = None
    for index, weight in taps:
        term = piece.index_select(dim, index - place.have[0].start)
        if weight is not None:
            term = term * weight.to(piece.dtype).view(-1, *(1,) * (piece.ndim - 1 - dim))
        total = term if total is None else total + term
    return piece if total is None else total


def target_sizes(
    extents: Sequence[int], size: Any, factor: Any, recompute: bool | None
) -> tuple[list[int], list[float]]:
    """Output extents, and input positions per output position, as `F.interpolate` derives them."""
    n = len(extents)
    if (size is None) == (factor is None):
        raise ValueError("interpolate needs either size or scale_factor, and not both")
    if size is not None:
        outs = list(each(size, n))
        check_extents(outs)
        return outs, [e / o for e, o in zip(extents, outs, strict=True)]
    factors = [float(factor)] * n if isinstance(factor, (int, float)) else [float(f) for f in factor]
    outs = [floor(float(e) * f) for e, f in zip(extents, factors, strict=True)]
    check_extents(outs)
    if recompute:
        return outs, [e / o for e, o in zip(extents, outs, strict=True)]
    return outs, [1 / f for f in factors]


def check_extents(outs: Sequence[int]) -> None:
    """Raise if the output would be empty."""
    if min(outs) < 1:
        raise RuntimeError(f"interpolate: the output would have extents {tuple(outs)}; each must be at least 1")


@register("windowed", "interpolate", "upsample")
def interpolate(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Interpolation in every mode but antialias."""
    names = ("input", "size", "scale_factor", "mode", "align_corners", "recompute_scale_factor", "antialias")
    x, size, factor, mode, align, recompute, antialias = bound(
        args, kwargs, names, None, None, "nearest", None, None, False
    )
    if antialias:
        raise UnsupportedOp("interpolate with antialias=True has no rule: see src/mural/shard/ops/windowed/resample.py")
    if recompute and size is not None:
        raise ValueError("recompute_scale_factor is not meaningful with an explicit size")
    if not (x.is_floating_point() or (x.dtype == torch.uint8 and mode in NEAREST)):
        raise UnsupportedOp(f"interpolate({mode!r}) of {x.dtype}: convert it to a floating point type")
    n = x.ndim - 2
    dims = {"linear": 1, "bilinear": 2, "bicubic": 2, "trilinear": 3}.get(mode, n)
    if mode not in (*LINEAR, *NEAREST, "bicubic", "area") or dims != n:
        raise NotImplementedError(f"interpolate: mode {mode!r} does not fit a tensor of {x.ndim} dims")
    if align is not None and mode in (*NEAREST, "area"):
        raise ValueError(f"align_corners belongs to the linear and cubic modes, not to {mode!r}")
    extents = tuple(x.shape[2:])
    outs, scales = target_sizes(extents, size, factor, recompute)
    x = in_plain_type(x, lambda small: F.interpolate(small, scale_factor=2, mode=mode))
    if mode == "area":
        return adaptive(x, tuple(outs), False)
    if align:
        scales = [(e - 1) / (o - 1) if o > 1 else 0.0 for e, o in zip(extents, outs, strict=True)]
    taps = tuple(Taps(e, o, mode, bool(align), s) for e, o, s in zip(extents, outs, scales, strict=True))
    rule = interpolate_rule(extents, taps)
    whole = of_whole_images(x, rule, lambda piece: F.interpolate(piece, size, factor, mode, align, recompute))
    return through(x, rule, None, None, 2.0 * 2**n * x.shape[1]) if whole is None else whole


def shuffle_rule(extents: Sequence[int], factor: int) -> Windowed:
    """The rule of pixel shuffle: channels become positions, `factor` times as many along each dim."""
    windows = tuple(Window(e, e * factor, den=factor, hi=factor) for e in extents)

    def run(piece: Tensor, places: tuple[Place, ...]) -> Tensor:
        amounts = [
            m
            for place in places[::-1]
            for m in (
                place.have[0].start * factor - place.out.start,
                place.out.stop - place.have[0].stop * factor,
            )
        ]
        return crop_or_pad(F.pixel_shuffle(piece, factor), amounts)

    return Windowed("pixel_shuffle", windows, run)


def unshuffle_rule(extents: Sequence[int], factor: int) -> Windowed:
    """The rule of pixel unshuffle: positions become channels."""
    windows = tuple(Window(e, e // factor, num=factor, hi=factor) for e in extents)
    return Windowed("pixel_unshuffle", windows, lambda piece, places: F.pixel_unshuffle(piece, factor))


@register("windowed", "pixel_shuffle", "pixel_unshuffle")
def shuffle(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Pixel shuffle and unshuffle."""
    name = name_of(func)
    x, *rest = args
    factor = rest[0] if rest else next(iter(kwargs.values()))
    extents = tuple(x.shape[-2:])
    if name == "pixel_shuffle":
        if x.shape[-3] % factor**2:
            raise RuntimeError(f"pixel_shuffle: {x.shape[-3]} channels are not a multiple of {factor}² = {factor**2}")
        return through(x, shuffle_rule(extents, factor))
    if any(e % factor for e in extents):
        raise RuntimeError(f"pixel_unshuffle: extents {extents} are not multiples of {factor}")
    return through(x, unshuffle_rule(extents, factor))
