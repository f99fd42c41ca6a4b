"""Joins: tensors concatenated, stacked, and repeated, as a whole or position by position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mural.errors import ShapeError, UnsupportedOp
from mural.geometry import Cuts, Interval, slices
from mural.shard.folds.reshape import settled
from mural.shard.layout import Layout, Want
from mural.shard.ops.call_arguments import bound, dim_of
from mural.shard.ops.pointwise.elementwise import common_layout, piece_of
from mural.shard.ops.view.slices import sliced, unsqueezed
from mural.shard.relayout import pull
from mural.shard.table import name_of, register
from mural.shard.tensor import ShardedTensor


@register("view", "repeat", "tile")
def repeat(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tensor repeated along its dims, by concatenating it with itself if a dim is cut."""
    x, *rest = args
    times = kwargs.get(
        "repeats", kwargs.get("dims", rest[0] if len(rest) == 1 and not isinstance(rest[0], int) else rest)
    )
    if len(times) < x.ndim and name_of(func) == "repeat":
        raise RuntimeError(f"repeat: {tuple(times)} has fewer numbers than the tensor has dims ({x.ndim})")
    counts = [1] * (x.ndim - len(times)) + [int(n) for n in times]
    for _ in range(len(counts) - x.ndim):
        x = unsqueezed(x, 0)
    for dim, count in enumerate(counts):
        if count == 0:
            x = sliced(x, dim, 0, 0)
        elif count > 1:
            x = joined([x] * count, dim, "repeat")
    return x


@register("view", "cat", "concat", "concatenate")
def cat(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Tensors one after the other along a dim."""
    tensors, dim = bound(args, kwargs, ("tensors", "dim"), 0)
    return joined(list(tensors), dim, "cat")


@register("view", "stack")
def stack_new(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Tensors stacked along a new dim."""
    tensors, dim = bound(args, kwargs, ("tensors", "dim"), 0)
    dim = dim_of(dim, tensors[0].ndim + 1, "stack")
    return joined(
        [unsqueezed(t, dim) if isinstance(t, ShardedTensor) else t.unsqueeze(dim) for t in tensors],
        dim,
        "stack",
    )


def joined(tensors: list[Tensor], dim: int, name: str) -> ShardedTensor:
    """Tensors concatenated along a dim, which is cut in the image's proportions if it was cut."""
    tensors = [t for t in tensors if t.ndim != 1 or t.shape[0]] or tensors[:1]  # torch skips empty 1-D tensors
    dim = dim_of(dim, tensors[0].ndim, name)
    sharded = [t for t in tensors if isinstance(t, ShardedTensor)]
    if len(sharded) == len(tensors) and (place := side_by_side(tuple(t.placement for t in sharded), dim)) is not None:
        return ShardedTensor(torch.cat([t.local for t in sharded], dim), place)
    rest = [tuple(n for d, n in enumerate(t.shape) if d != dim) for t in tensors]
    if len(set(rest)) != 1:
        raise ShapeError(f"{name} along dim {dim}: the shapes {[tuple(t.shape) for t in tensors]} differ elsewhere")
    total = sum(t.shape[dim] for t in tensors)
    if sharded[0].mesh.tiled and any(t.placement.cuts[dim] is not None for t in sharded):
        raise UnsupportedOp(f"{name} along a dim of the image, or of the batch: it is not local")
    slim = [
        t.narrow(dim, 0, 1) if not isinstance(t, ShardedTensor) else sliced(t, dim, 0, 1)
        for t in tensors
        if t.shape[dim]
    ]
    base = common_layout(torch.cat, slim) if len(slim) > 1 else sharded[0].placement
    taken = {axis for d, axis in enumerate(base.axes) if d != dim}  # an axis cuts one dim
    cut = [t for t in sharded if t.placement.cuts[dim] is not None and t.placement.axes[dim] not in taken]
    if not cut:
        layout = base.with_cut(dim, None, total)
        pieces = [piece_of(t, layout.with_cut(dim, None, t.shape[dim]), name) for t in tensors]
        return ShardedTensor(torch.cat(pieces, dim), layout)
    first = cut[0].placement
    layout = base.with_cut(dim, first.cut_for(dim, total), total)
    layout = replace(layout, axes=(*layout.axes[:dim], first.axes[dim], *layout.axes[dim + 1 :]))
    pieces, offset = [], 0
    for tensor in tensors:
        wants = list(layout.wants())
        axis, intervals = wants[dim]
        extent = tensor.shape[dim]
        inside = tuple(((span & Interval(offset, offset + extent)).shift(-offset),) for (span,) in intervals)
        wants[dim] = (axis, tuple((Interval(0, 0),) if span.size == 0 else (span,) for (span,) in inside))
        pieces.append(part_of(tensor, tuple(wants), layout, name))
        offset += extent
    return ShardedTensor(torch.cat(pieces, dim), layout)


@lru_cache(maxsize=4096)
def side_by_side(layouts: tuple[Layout, ...], dim: int) -> Layout | None:
    """The layout of tensors concatenated along a dim of no axis, if they differ in nothing else; otherwise None."""
    first = layouts[0]
    if first.axes[dim] is not None or any(
        lay.ndim != first.ndim or lay.with_cut(dim, lay.cuts[dim], first.shape[dim]) != first for lay in layouts
    ):
        return None
    return first.with_cut(dim, None, sum(lay.shape[dim] for lay in layouts))


def part_of(tensor: Tensor, wants: tuple[Want, ...], layout: Layout, name: str) -> Tensor:
    """What this rank needs of a sharded tensor, or of one that every rank holds whole."""
    if isinstance(tensor, ShardedTensor):
        return pull(tensor, wants, name)
    at = layout.mesh.coordinates
    mine = [intervals[at[axis] if axis else 0][0] for axis, intervals in wants]
    return tensor[slices(mine)]


@register("along a dim", "repeat_interleave")
def repeat_interleave(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Every position of a dim repeated the given number of times in succession."""
    if len(args) + len(kwargs) == 1:
        raise UnsupportedOp(
            f"repeat_interleave of a sharded tensor of repeats alone, of shape {tuple(args[0].shape)}, lists "
            f"positions: call .full() on it first"
        )
    x, repeats, dim, size = bound(args, kwargs, ("input", "repeats", "dim", "output_size"), None, None)
    if not isinstance(x, ShardedTensor):
        x = x.reshape(-1) if dim is None else x
        return func(x, repeats.full(), 0 if dim is None else dim, output_size=size)
    x = settled(x.reshape(-1)) if dim is None else x
    dim = dim_of(dim or 0, x.ndim, "repeat_interleave")
    counts = counts_of(repeats, x.shape[dim])
    ends = (0, *accumulate(counts))
    if size is not None and size != ends[-1]:
        raise RuntimeError(f"repeat_interleave: an output_size of {size} was given, but {ends[-1]} positions come out")
    here, cuts = x.placement.box[dim], x.placement.cuts[dim]
    moved = None if cuts is None else Cuts(tuple(ends[b] for b in cuts.bounds), cuts.owners)
    mine = counts[here.start : here.stop]
    own: Any = x.local.new_tensor(mine, dtype=torch.long) if len(set(mine)) != 1 else mine[0]
    return ShardedTensor(func(x.local, own, dim), x.placement.with_cut(dim, moved, ends[-1]))


def counts_of(repeats: Any, extent: int) -> list[int]:
    """How often each position is repeated."""
    if isinstance(repeats, ShardedTensor):
        repeats = repeats.full()
    if isinstance(repeats, Tensor):
        if repeats.ndim > 1 or (repeats.ndim == 1 and repeats.shape[0] not in (1, extent)):
            raise RuntimeError(f"repeat_interleave: repeats of shape {tuple(repeats.shape)} for {extent} positions")
        if repeats.is_floating_point() or repeats.is_complex():
            raise RuntimeError(f"repeat_interleave: repeats must be integers, not {repeats.dtype}")
        repeats = repeats.flatten().tolist()
    given: list[int] = [int(n) for n in repeats] if isinstance(repeats, (list, tuple)) else [int(repeats)]
    if any(n < 0 for n in given):
        raise RuntimeError(f"repeat_interleave: repeats must not be negative, but are {min(given)}")
    return given * extent if len(given) == 1 else given
