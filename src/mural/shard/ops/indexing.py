"""Slices, positions and flips: data stay where they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mural.errors import LayoutError, UnsupportedOp
from mural.shard.layout import Layout
from mural.shard.ops.arguments import bound, dim_of
from mural.shard.ops.pointwise import check_writable, piece_of, written
from mural.shard.relayout import gather, moves_data
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
    place = layout.with_cut(dim, cuts.sliced(start, stop, step), count)
    mine = place.box[dim]
    first = start + mine.start * step - layout.box[dim].start
    piece = slice(first, first + (mine.size - 1) * step + 1, step) if mine.size else slice(0, 0)
    part = ShardedTensor(x.local[(slice(None),) * dim + (piece,)], place, x.aliased)
    return seen_from(x, part, partial=layout.is_cut(dim) and count != layout.shape[dim])


def seen_from(x: ShardedTensor, view: ShardedTensor, *, partial: bool = False) -> ShardedTensor:
    """A view of a tensor, which is partial where the tensor is or the view makes it so."""
    view.partial = x.partial or partial
    return view


def selected(x: ShardedTensor, dim: int, index: int, name: str) -> ShardedTensor | Tensor:
    """One position of a dim, on every rank, without that dim."""
    extent = x.placement.shape[dim]
    if not -extent <= index < extent:
        raise IndexError(f"{name}: index {index} is out of range for dim {dim} of extent {extent}")
    index %= extent
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


@register("view", "__getitem__")
def getitem(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Basic indexing along any dim; a list or plain tensor of positions along a dim that is not cut."""
    x, index = args
    if not isinstance(x, ShardedTensor):
        raise UnsupportedOp("indexing a plain tensor with a sharded one: call .full() on the index")
    items = list(index) if isinstance(index, tuple) else [index]
    given = sum(i is not None and i is not Ellipsis for i in items)
    if given > x.placement.ndim:
        raise IndexError(f"too many indices ({given}) for a sharded tensor of {x.placement.ndim} dims")
    items = [int(i) if isinstance(i, Tensor) and i.ndim == 0 and i.dtype != torch.bool else i for i in items]
    if sum(isinstance(i, (list, Tensor)) for i in items) > 1:
        raise UnsupportedOp("indexing a sharded tensor with several lists of positions: index one dim at a time")
    if Ellipsis not in [i for i in items if not isinstance(i, Tensor)]:
        items.append(Ellipsis)
    at = next(k for k, i in enumerate(items) if i is Ellipsis)
    items[at : at + 1] = [slice(None)] * (x.placement.ndim - given)
    out: Any = x
    dim = 0
    for item in items:
        if item is None:
            out = unsqueezed(out, dim)
            dim += 1
        elif isinstance(item, slice):
            span = range(*item.indices(out.placement.shape[dim]))
            if item != slice(None):
                out = sliced(out, dim, span.start, span.stop, span.step)
            dim += 1
        elif isinstance(item, int) and not isinstance(item, bool):
            out = selected(out, dim, item, "indexing")
        else:
            out = taken(out, dim, item)
            dim += 1
    return ShardedTensor(out.local, out.placement, out.aliased) if out is x else out


def taken(x: ShardedTensor, dim: int, positions: Any) -> ShardedTensor:
    """Listed positions along one dim, which is gathered first if it is cut."""
    if isinstance(positions, ShardedTensor):
        raise UnsupportedOp("indexing with a sharded tensor (a mask): use torch.where or masked_fill")
    index = torch.as_tensor(positions, device=x.device)
    if index.ndim != 1:
        raise UnsupportedOp(
            f"indexing dim {dim} of a sharded tensor with {tuple(index.shape)} positions: only one "
            f"list of positions is supported"
        )
    x = gather(x, (dim,), "indexing")
    local = x.local[(slice(None),) * dim + (index,)]
    return ShardedTensor(local, x.placement.uncut_resized(local.shape))


@register("view", "__setitem__")
def setitem(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Write to a part: through basic indexing, or where a mask of the same shape is true."""
    x, index, value = args
    if not isinstance(x, ShardedTensor):
        raise LayoutError("writing a sharded value into a plain tensor: call .full() on it, or shard the target")
    check_writable(x, "assignment")
    if isinstance(index, Tensor) and index.dtype == torch.bool and not (isinstance(value, Tensor) and value.ndim):
        for _ in range(x.ndim - index.ndim):
            index = index.unsqueeze(-1)
        written(x, x.local.masked_fill_(piece_of(index, x.placement, "assignment"), value))
        return
    part = getitem(func, (x, index), {})
    if any(isinstance(i, (list, Tensor)) and not (isinstance(i, Tensor) and i.ndim == 0) for i in _items(index)):
        write_positions(x, _items(index), part, value)
        return
    if isinstance(part, ShardedTensor):
        check_writable(part, "assignment to one position of a cut dim")
        source = torch.as_tensor(value, dtype=x.dtype, device=x.device) if not isinstance(value, Tensor) else value
        part.local.copy_(piece_of(source, part.placement, "assignment"))
        written(x, x.local)
        return
    raise LayoutError("assignment to a single element of a sharded tensor: assign to a slice")


def _items(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def write_positions(x: ShardedTensor, items: tuple[Any, ...], part: ShardedTensor, value: Any) -> None:
    """Write to listed positions of one dim, all others whole."""
    if any(isinstance(i, slice) and i != slice(None) for i in items) or Ellipsis in [i for i in items if i is Ellipsis]:
        raise UnsupportedOp("assignment to listed positions together with slices: assign to one after the other")
    at = next(d for d, i in enumerate(items) if not isinstance(i, slice))
    if x.placement.is_cut(at):
        raise UnsupportedOp(f"assignment to listed positions of dim {at}, which is cut: use torch.where or masked_fill")
    source = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=x.dtype, device=x.device)
    x.local[items] = piece_of(source, part.placement, "assignment").to(x.dtype)
    written(x, x.local)


@register("view", "narrow")
def narrow(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """`length` positions from `start`."""
    x, dim, start, length = bound(args, kwargs, ("input", "dim", "start", "length"))
    dim = dim_of(dim, x.ndim, "narrow")
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
    return taken(x, dim_of(dim, x.ndim, "index_select"), index)


@register("view", "split", "chunk", "tensor_split", "unbind", "split_with_sizes")
def split(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Consecutive slices; torch itself says where, on a tensor of the same extent without memory."""
    x = args[0]
    name = name_of(func)
    dim = kwargs.get(
        "dim", (args[1] if len(args) > 1 else 0) if name == "unbind" else (args[2] if len(args) > 2 else 0)
    )
    dim = dim_of(dim, x.ndim, name)
    if name == "unbind":
        return tuple(selected(x, dim, i, name) for i in range(x.shape[dim]))
    given = list(args[1:2]) or [v for k, v in kwargs.items() if k != "dim"]
    parts = func(torch.empty(x.shape[dim], device="meta"), *given)
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
    for dim in dims:
        if (cut := cuts[dim]) is not None:
            cuts[dim] = cut.flipped()
            axis = layout.axes[dim] or ""
            images[axis] = images[axis].flipped()
    place = replace(layout, cuts=tuple(cuts), images=tuple(sorted(images.items())))
    return ShardedTensor(torch.flip(x.local, dims), place)
