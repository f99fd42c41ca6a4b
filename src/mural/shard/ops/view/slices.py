"""Slices, positions and flips: data stay where they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mural.errors import UnsupportedOp
from mural.geometry import Window
from mural.shard.layout import Layout
from mural.shard.ops.call_arguments import bound, dim_of
from mural.shard.ops.view.listed_positions import taken, whole_index
from mural.shard.relayout import gather, moves_data
from mural.shard.rules import Place, Windowed, windowed_tile
from mural.shard.shape_probes import result_for
from mural.shard.table import name_of, register
from mural.shard.tensor import ShardedTensor


def sliced(x: ShardedTensor, dim: int, start: int, stop: int, step: int = 1) -> ShardedTensor:
    """Positions start, start + step, … of one dim, each left where it is."""
    layout = x.placement
    count = max(0, -(-(stop - start) // step))
    cuts = layout.cuts[dim]
    if cuts is None:
        local = x.local[(slice(None),) * dim + (slice(start, stop, step),)]
        return seen_from(x, ShardedTensor(local, layout.with_cut(dim, None, count), x.aliased))
    if x.mesh.tiled:
        return windowed_tile(x, slice_rule(x, dim, start, count, step))
    place = layout.with_cut(dim, cuts.sliced(start, stop, step), count)
    mine = place.box[dim]
    first = start + mine.start * step - layout.box[dim].start
    piece = slice(first, first + (mine.size - 1) * step + 1, step) if mine.size else slice(0, 0)
    part = ShardedTensor(x.local[(slice(None),) * dim + (piece,)], place, x.aliased)
    return seen_from(x, part, partial=layout.is_cut(dim) and count != layout.shape[dim])


def slice_rule(x: ShardedTensor, dim: int, start: int, count: int, step: int) -> Windowed:
    """The rule of a slice of one dim."""
    dims = [Window(n, n) for n in x.shape[dim:]]
    dims[0] = Window(x.shape[dim], count, num=step, lo=start, hi=start + 1)

    def run(piece: Tensor, places: tuple[Place, ...]) -> Tensor:
        return piece[(slice(None),) * dim + (slice(None, None, step),)] if step > 1 else piece

    return Windowed("slice", tuple(dims), run)


def seen_from(x: ShardedTensor, view: ShardedTensor, *, partial: bool = False) -> ShardedTensor:
    """A view of a tensor, which is partial if the tensor is or the view makes it so."""
    view.partial = x.partial or partial
    return view


def selected(x: ShardedTensor, dim: int, index: int, name: str) -> ShardedTensor | Tensor:
    """One position of a dim, on every rank, without that dim."""
    extent = x.placement.shape[dim]
    if not -extent <= index < extent:
        raise IndexError(f"{name}: index {index} is out of range for dim {dim} of extent {extent}")
    index %= extent
    if x.mesh.tiled and extent > 1 and x.placement.cuts[dim] is not None:
        raise UnsupportedOp(f"{name} takes one position of the image, or one image of the batch: it is not local")
    one = sliced(x, dim, index, index + 1)
    moved = gather(one, (dim,), name)
    layout = moved.placement
    dims = [d for d in range(layout.ndim) if d != dim]
    lost = name if moves_data(one, layout) else x.aliased
    local = moved.local.squeeze(dim)
    return ShardedTensor(local, layout.pick(dims, [layout.shape[d] for d in dims]), lost) if dims else local


def unsqueezed(x: ShardedTensor, dim: int) -> ShardedTensor:
    """A new dim of extent 1."""
    layout = x.placement
    dims: list[int | None] = list(range(layout.ndim))
    dims.insert(dim, None)
    shape = (*layout.shape[:dim], 1, *layout.shape[dim:])
    return seen_from(x, ShardedTensor(x.local.unsqueeze(dim), layout.pick(dims, shape), x.aliased))


@register("view", "narrow")
def narrow(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """`length` positions from `start`."""
    x, dim, start, length = bound(args, kwargs, ("input", "dim", "start", "length"))
    dim = dim_of(dim, x.ndim, "narrow")
    if isinstance(start, Tensor) and (start.ndim or start.dtype == torch.bool or start.is_floating_point()):
        raise RuntimeError(f"narrow: start must be a whole number, not {start.dtype} of shape {tuple(start.shape)}")
    first = int(start) + (x.shape[dim] if int(start) < 0 else 0)
    if not 0 <= first <= first + int(length) <= x.shape[dim]:
        raise RuntimeError(f"narrow: start {start} and length {length} exceed dim {dim} of extent {x.shape[dim]}")
    return sliced(x, dim, first, first + int(length))


@register("view", "select")
def select(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One position, without its dim."""
    x, dim, index = bound(args, kwargs, ("input", "dim", "index"))
    return selected(x, dim_of(dim, x.ndim, "select"), int(index), "select")


@register("view", "index_select")
def index_select(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Listed positions of a dim."""
    x, dim, index = bound(args, kwargs, ("input", "dim", "index"))
    return taken(x, {dim_of(dim, x.ndim, "index_select"): whole_index(index)})


@register("view", "split", "chunk", "tensor_split", "unbind", "split_with_sizes")
def split(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Consecutive slices, whose bounds torch itself computes on a meta tensor of the same extent."""
    x = args[0]
    name = name_of(func)
    dim = kwargs.get(
        "dim", (args[1] if len(args) > 1 else 0) if name == "unbind" else (args[2] if len(args) > 2 else 0)
    )
    dim = dim_of(dim, x.ndim, name)
    if name == "unbind":
        return tuple(selected(x, dim, i, name) for i in range(x.shape[dim]))
    given: list[Any] = list(args[1:2]) or [v for k, v in kwargs.items() if k != "dim"]
    if given and isinstance(given[0], Tensor):  # tensor_split takes its bounds as a tensor
        given = [whole_index(given[0]).tolist()]
    parts = result_for(func, (x.shape[dim],), *given)
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + part.shape[0])
    return tuple(sliced(x, dim, a, b) for a, b in pairwise(starts))


@register("view", "flip", "fliplr", "flipud")
def flip(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """The order reversed; the pieces stay on their ranks, in reversed order."""
    x, *rest = args
    name = name_of(func)
    dims: Any = {"fliplr": (1,), "flipud": (0,)}.get(name)
    if dims is None:
        dims = kwargs.get("dims", rest[0] if len(rest) == 1 else tuple(rest))
    dims = [dim_of(d, x.ndim, name) for d in ((dims,) if isinstance(dims, int) else dims)]
    layout: Layout = x.placement
    images = dict(layout.images)
    cuts = list(layout.cuts)
    if x.mesh.tiled and any(cuts[dim] is not None for dim in dims):
        raise UnsupportedOp(f"{name} reads the far side of the image: it is not local")
    for dim in dims:
        if (cut := cuts[dim]) is not None:
            cuts[dim] = cut.flipped()
            axis = layout.axes[dim] or ""
            images[axis] = images[axis].flipped()
    place = replace(layout, cuts=tuple(cuts), images=tuple(sorted(images.items())))
    return ShardedTensor(torch.flip(x.local, dims), place)
