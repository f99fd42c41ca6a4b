"""Max-unpooling: each value goes to the position that its index names, on whichever rank that is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mural.geometry import Interval
from mural.shard.layout import Layout, Want
from mural.shard.ops.call_arguments import bound
from mural.shard.ops.pointwise.elementwise import piece_of
from mural.shard.ops.windowed.conv import each
from mural.shard.ops.windowed.data_windows import empty_piece
from mural.shard.ops.windowed.pool_indices import ravelled, unravelled
from mural.shard.relayout import pull, stacked
from mural.shard.table import name_of, register
from mural.shard.tensor import ShardedTensor


@register("windowed", "max_unpool1d", "max_unpool2d", "max_unpool3d")
def max_unpool(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Zeros with the input's values at the positions of `indices`, which count in the whole flattened plane."""
    name = name_of(func)
    n = int(name[-2])
    if func is getattr(F, name):
        names = ("input", "indices", "kernel_size", "stride", "padding", "output_size")
        x, indices, kernel, stride, padding, size = bound(args, kwargs, names, None, 0, None)
        outs = unpooled_extents(tuple(x.shape[x.ndim - n :]), kernel, stride, padding, size)
    else:  # the builtin below it
        x, indices, size, *_ = bound(args, kwargs, ("input", "indices", "output_size", "stride", "padding"), None, None)
        outs = each(size, n)
    if not isinstance(x, ShardedTensor):
        return func(x, indices.full(), *args[2:], **kwargs)
    if tuple(indices.shape) != tuple(x.shape) or indices.dtype != torch.int64:
        raise RuntimeError(
            f"{name}: indices of shape {tuple(indices.shape)} and type {indices.dtype} must be int64 of the input's "
            f"shape {tuple(x.shape)}"
        )
    if x.ndim not in (n + 1, n + 2):
        raise RuntimeError(f"{name} takes {n + 1} or {n + 2} dims, not a tensor of shape {tuple(x.shape)}")
    return unpooled(x, ShardedTensor(piece_of(indices, x.placement, name), x.placement), outs, name)


def unpooled_extents(extents: Sequence[int], kernel: Any, stride: Any, padding: Any, size: Any) -> tuple[int, ...]:
    """The output's extents: the smallest that the pool could have come from, or the requested ones if close."""
    n = len(extents)
    kernels, pads = each(kernel, n), each(padding, n)
    strides = kernels if stride is None else each(stride, n)
    usual = tuple((e - 1) * s + k - 2 * p for e, s, k, p in zip(extents, strides, kernels, pads, strict=True))
    if size is None:
        return usual
    outs = tuple(int(s) for s in size)
    outs = outs[2:] if len(outs) == n + 2 else outs
    if len(outs) != n or any(abs(o - u) >= s for o, u, s in zip(outs, usual, strides, strict=True)):
        raise ValueError(f"output_size {tuple(size)} must be within less than the stride {strides} of {usual}")
    return outs


def unpooled(x: ShardedTensor, indices: ShardedTensor, outs: tuple[int, ...], name: str) -> ShardedTensor:
    """Values at their positions in planes of these extents: every rank fetches what may fall into its box."""
    lead = x.ndim - len(outs)
    target = x.placement.resized({lead + d: o for d, o in enumerate(outs)})
    wants = landing(indices, target, outs, name)
    values, flat = pull(x, wants, name), pull(indices, wants, name)
    box = target.box[lead:]
    inside = torch.ones_like(flat, dtype=torch.bool)
    local: list[Tensor] = []
    for coordinate, own in zip(unravelled(flat, outs), box, strict=True):
        inside &= (coordinate >= own.start) & (coordinate < own.stop)
        local.append(coordinate - own.start)
    shape = tuple(own.size for own in box)
    count = prod(shape)
    position = torch.where(inside, ravelled(local, shape), count).flatten(lead)
    if not values.numel():
        return ShardedTensor(empty_piece(target, values), target)
    # torch's own kernel, so that the same value wins if several go to one position; values for other ranks go to an
    # extra position, which is dropped.
    plane = torch.ops.aten.max_unpool2d(values.flatten(lead).unsqueeze(-1), position.unsqueeze(-1), (count + 1, 1))
    return ShardedTensor(plane[..., :count, 0].reshape(target.local_shape), target)


def landing(indices: ShardedTensor, target: Layout, outs: tuple[int, ...], name: str) -> tuple[Want, ...]:
    """What every rank needs of the input: along each cut dim, the rows with an index in its part of the output."""
    flat, lead, layout = indices.local, indices.ndim - len(outs), indices.placement
    if flat.numel() and (int(flat.min()) < 0 or int(flat.max()) >= prod(outs)):
        raise RuntimeError(f"{name}: an index is outside the output's {prod(outs)} positions of extents {outs}")
    wants = list(target.wants())
    cut = [d for d in range(lead, target.ndim) if target.is_cut(d)]
    for d in range(lead, target.ndim):
        if d not in cut:
            wants[d] = (None, ((Interval(0, layout.shape[d]),),))
    coordinates = unravelled(flat, outs)
    for d in cut:
        axis, intervals = wants[d]
        spans = rows_into(coordinates[d - lead], d, [i for (i,) in intervals], layout.box[d].start)
        found = stacked(spans, indices.mesh, layout.axes_of(range(layout.ndim)), name)
        low, high = found[..., 0].amin(0).tolist(), found[..., 1].amax(0).tolist()
        wants[d] = (axis, tuple((Interval(a, b) if a < b else Interval(0, 0),) for a, b in zip(low, high, strict=True)))
    return tuple(wants)


def rows_into(coordinate: Tensor, dim: int, intervals: Sequence[Interval], start: int) -> Tensor:
    """For each interval, the first row of a dim that has a coordinate in it, and the row after the last."""
    rows: list[list[int]] = []
    moved = coordinate.movedim(dim, 0).flatten(1)
    for interval in intervals:
        hit = ((moved >= interval.start) & (moved < interval.stop)).any(1).nonzero()
        found = hit.flatten().tolist()
        rows.append([start + found[0], start + found[-1] + 1] if found else [torch.iinfo(torch.int64).max, 0])
    return torch.tensor(rows, device=coordinate.device)
