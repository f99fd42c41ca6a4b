"""Max-pooling that also returns where each maximum was: its position in the whole flattened plane, as in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mural.errors import UnsupportedOp
from mural.geometry import Box, Interval, Window, slices
from mural.shard.autocasting import in_plain_type
from mural.shard.layout import Layout
from mural.shard.ops.call_arguments import bound
from mural.shard.ops.reduce.extremes import lowest
from mural.shard.ops.windowed.conv import each
from mural.shard.ops.windowed.data_windows import empty_piece
from mural.shard.ops.windowed.pool import MAX, max_pool_rule
from mural.shard.relayout import pull, stacked
from mural.shard.rules import Place, output_layout, pad_border, wants_of, windowed
from mural.shard.table import name_of, register
from mural.shard.tensor import ShardedTensor

Pair = tuple[Tensor, Tensor]
"""Values, and their positions."""
NOWHERE = torch.iinfo(torch.int64).max
ADAPTIVE: dict[int, Callable[..., Any]] = {
    1: F.adaptive_max_pool1d,
    2: F.adaptive_max_pool2d,
    3: F.adaptive_max_pool3d,
}


def unravelled(index: Tensor, shape: Sequence[int]) -> list[Tensor]:
    """The coordinates of flat positions.

    >>> [int(c) for c in unravelled(torch.tensor(17), (3, 5))]
    [3, 2]
    """
    found: list[Tensor] = []
    for n in reversed(shape[1:]):
        found.append(index % n)
        index = index // n
    return [index, *reversed(found)]


def ravelled(coordinates: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """The flat positions of coordinates."""
    index = coordinates[0]
    for coordinate, n in zip(coordinates[1:], shape[1:], strict=True):
        index = index * n + coordinate
    return index


def first_inside(coordinate: Tensor, step: int) -> Tensor:
    """A window's first position inside the image, for a window of lowest values that begins before the image."""
    return torch.where(coordinate < 0, coordinate + (step - 1 - coordinate) // step * step, coordinate)


def max_pair(x: ShardedTensor, n: int, *arguments: Any) -> Pair:
    """Max-pooling of the last n dims with positions; the arguments are those of the pool."""
    extents = tuple(x.shape[x.ndim - n :])
    rule = max_pool_rule(extents, *arguments)
    kernel, _, padding, dilation, _ = arguments
    kernels, steps = each(kernel, n), each(dilation, n)
    strides = tuple(w.num for w in rule.dims if isinstance(w, Window))
    may_miss = any(p and d > 1 for p, d in zip(each(padding, n), steps, strict=True))
    found: list[Tensor] = []

    def run(piece: Tensor, places: tuple[Place, ...]) -> Tensor:
        shape, low = tuple(piece.shape[piece.ndim - n :]), lowest(piece.dtype, True)
        padded = pad_border(piece.detach(), places, low)
        _, flat = MAX[n](padded, kernels, strides, 0, steps, False, True)
        starts = [p.have[0].start - p.border[0] for p in places]
        at = unravelled(flat, padded.shape[padded.ndim - n :])
        at = [first_inside(c + start, step) for c, start, step in zip(at, starts, steps, strict=True)]
        found.append(ravelled(at, extents))
        own = [c - p.have[0].start for c, p in zip(at, places, strict=True)]
        values = picked(piece, ravelled([c.clamp(max=s - 1) for c, s in zip(own, shape, strict=True)], shape), n)
        if may_miss:  # a dilated window may step over a narrow image
            outside = torch.stack([c >= s for c, s in zip(own, shape, strict=True)]).any(0)
            values = values.masked_fill(outside, low)
        return values

    values = windowed(x, replace(rule, run=run))
    index = found[-1][tuple(slice(0, size) for size in values.local.shape)]
    return values, ShardedTensor(index, values.placement)


def picked(piece: Tensor, flat: Tensor, n: int) -> Tensor:
    """The values at flat positions of the last n dims."""
    lead = piece.ndim - n
    return piece.flatten(lead).gather(-1, flat.flatten(lead)).view(flat.shape)


@register("windowed", *(f"max_pool{n}d_with_indices" for n in (1, 2, 3)))
def max_pool_with_indices(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pair:
    """Max-pooling and the position of each maximum."""
    names = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
    x, *rest, _ = bound(args, kwargs, names, None, 0, 1, False, True)
    n = int(name_of(func).removeprefix("max_pool")[0])
    if x.ndim not in (n + 1, n + 2):
        raise RuntimeError(f"{name_of(func)} takes {n + 1} or {n + 2} dims, not a tensor of shape {tuple(x.shape)}")
    return max_pair(in_plain_type(x, lambda small: MAX[n](small, 1)), n, *rest)


@register("windowed", *(f"adaptive_max_pool{n}d_with_indices" for n in (1, 2, 3)))
def adaptive_max_pool_with_indices(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pair:
    """Adaptive max-pooling and the position of each maximum."""
    x, size, _ = bound(args, kwargs, ("input", "output_size", "return_indices"), True)
    name = name_of(func)
    n = int(name.removeprefix("adaptive_max_pool")[0])
    extents = tuple(x.shape[x.ndim - n :])
    wanted = (size,) * n if isinstance(size, int) or size is None else tuple(size) * (n if len(tuple(size)) == 1 else 1)
    sizes = tuple(e if s is None else int(s) for e, s in zip(extents, wanted, strict=True))
    if x.ndim not in (n + 1, n + 2) or min(sizes) < 1 or not x.is_floating_point():
        raise UnsupportedOp(f"{name} of {x.dtype} of shape {tuple(x.shape)} to {sizes}: it takes floats, to at least 1")
    return adaptive_pair(in_plain_type(x, lambda small: ADAPTIVE[n](small, (3,) * n)), sizes, name)


def adaptive_pair(x: ShardedTensor, sizes: tuple[int, ...], name: str) -> Pair:
    """Adaptive max-pooling of the last dims with positions.

    Along a dim whose output is too small to cut, each rank searches its own pixels and the winners are merged; along
    the others it fetches what its outputs read.
    """
    n = len(sizes)
    lead = x.ndim - n
    windows = tuple(Window.adaptive(e, o) for e, o in zip(x.shape[lead:], sizes, strict=True))
    target = output_layout(x.placement, windows)
    gone = [d for d in range(lead, x.ndim) if x.placement.is_cut(d) and not target.is_cut(d)]
    wants = list(wants_of(x.placement, target, windows))
    have = [w.reads(o)[0] for w, o in zip(windows, target.box[lead:], strict=True)]
    for d in gone:
        wants[d], have[d - lead] = x.placement.wants()[d], x.box[d]
    piece = pull(x, tuple(wants), name)
    values, index = adaptive_cells(piece, windows, target, tuple(have))
    if gone:
        axes = x.placement.axes_of(gone)
        values, index = first_largest(stacked(values, x.mesh, axes, name), stacked(index, x.mesh, axes, name))
    return ShardedTensor(values, target), ShardedTensor(index, target)


def adaptive_cells(piece: Tensor, windows: tuple[Window, ...], target: Layout, have: Box) -> Pair:
    """The maximum of each of this rank's outputs over the pixels that the piece holds, and where it is."""
    n, extents = len(windows), tuple(w.extent for w in windows)
    lead = piece.ndim - n
    outs = target.box[lead:]
    spans = [
        [w.span(Interval(o, o + 1)) & h for o in range(*out)] for w, out, h in zip(windows, outs, have, strict=True)
    ]
    values: list[Tensor] = []
    index: list[Tensor] = []
    for cell in product(*spans):
        part = piece[(..., *slices(cell, have))]
        if part.numel():
            best, flat = ADAPTIVE[n](part, 1, return_indices=True)
            at = unravelled(flat.flatten(lead).squeeze(-1), part.shape[lead:])
            values.append(best.flatten(lead).squeeze(-1))
            index.append(ravelled([a + c.start for a, c in zip(at, cell, strict=True)], extents))
        else:
            values.append(part.flatten(lead).sum(-1) + float("-inf"))
            index.append(torch.full(values[-1].shape, NOWHERE, device=piece.device))
    shape = target.local_shape
    if not prod(shape[lead:]):
        return empty_piece(target, piece), torch.zeros(shape, dtype=torch.int64, device=piece.device)
    return torch.stack(values, -1).view(shape), torch.stack(index, -1).view(shape)


def first_largest(values: Tensor, index: Tensor) -> Pair:
    """The largest over the first dim; of equal values the first position, of NaNs the last."""
    known = values.detach()
    lost = known.isnan()
    first = torch.where(known == known.amax(0, keepdim=True), index, NOWHERE)
    last = torch.where(lost, -index, NOWHERE)
    winner = torch.where(lost.any(0, keepdim=True), last, first).argmin(0, keepdim=True)
    return values.gather(0, winner)[0], index.gather(0, winner)[0]
