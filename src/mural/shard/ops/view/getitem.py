"""Indexing for reading and writing: slices and single positions first, then listed positions of what is left."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from mural.errors import LayoutError, UnsupportedOp
from mural.shard.ops.pointwise.elementwise import check_writable, piece_of, written
from mural.shard.ops.view.listed_positions import fitting, looked_up, positions_of, taken, write_listed
from mural.shard.ops.view.slices import selected, sliced, unsqueezed
from mural.shard.table import register
from mural.shard.tensor import ShardedTensor, replicated, sharded_in

# -- what stands between the brackets ----------------------------------------------------------------------------------


Item = int | bool | slice | EllipsisType | Tensor | None

MOST = 32
"""torch takes a list with this many entries for a list of positions, whatever it holds."""


def items_of(index: Any) -> list[Item]:
    """The items of an index: numbers, slices, `None`, `...` and tensors of positions.

    A list that holds more than numbers stands for a tuple, as in old NumPy: `x[[slice(None), 0]]` is `x[:, 0]`.

    >>> items_of([slice(None), None, 3]), items_of([2, 3])
    ([slice(None, None, None), None, 3], [tensor([2, 3])])
    """
    items = list(index) if isinstance(index, tuple) or stands_for_tuple(index) else [index]
    return [item_of(item) for item in items]


def stands_for_tuple(index: Any) -> bool:
    """Whether torch takes a sequence for a tuple of items."""
    if isinstance(index, (Tensor, str)) or not isinstance(index, Sequence) or len(index) >= MOST:
        return False
    return any(
        item is None or item is ... or isinstance(item, (slice, Tensor, Sequence)) or getattr(item, "ndim", 0) > 0
        for item in index
    )


def item_of(item: Any) -> Item:
    """One item: lists and arrays as tensors, a tensor of one number without dims as that number."""
    if item is None or item is ... or isinstance(item, (slice, bool)):
        return item
    if isinstance(item, (Sequence, Tensor)) or hasattr(item, "__array__"):
        known = item if isinstance(item, Tensor) else torch.as_tensor(item)
        if known.numel() == 0 and not isinstance(item, Tensor):
            known = known.long()  # an empty list names no positions
        if known.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool):
            raise IndexError(f"tensors used as indices must be long, int, byte or bool tensors, not {known.dtype}")
        if known.ndim:
            return known.bool() if known.dtype == torch.uint8 else known
        return bool(known) if known.dtype == torch.bool else int(known)
    if hasattr(item, "__index__"):
        return operator.index(item)
    raise IndexError(
        f"only integers, slices (`:`), ellipsis (`...`), None and long or byte Variables are valid indices (got "
        f"{type(item).__name__})"
    )


def in_order(items: Sequence[Item], ndim: int) -> list[Item]:
    """The items, with slices for the dims that `...` or the end leaves out.

    >>> in_order([..., 2], 3), in_order([0, None], 2)
    ([slice(None, None, None), slice(None, None, None), 2], [0, None, slice(None, None, None)])
    """
    given = sum(dims_of_item(item) for item in items)
    if given > ndim:
        raise IndexError(f"too many indices ({given}) for a sharded tensor of {ndim} dims")
    places = [k for k, item in enumerate(items) if item is ...] or [len(items)]
    if len(places) > 1:
        raise IndexError("an index has one `...` at most")
    return [*items[: places[0]], *[slice(None)] * (ndim - given), *items[places[0] + 1 :]]


def dims_of_item(item: Item) -> int:
    """How many dims of the tensor an item indexes."""
    if item is None or item is ... or isinstance(item, bool):
        return 0
    return item.ndim if isinstance(item, Tensor) and item.dtype == torch.bool else 1


# -- reading and writing -----------------------------------------------------------------------------------------------


@register("view", "__getitem__")
def getitem(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The values at an index of any form that torch accepts."""
    x, index = args
    if not isinstance(x, ShardedTensor):
        return looked_up(x, index if isinstance(index, tuple) else (index,))
    view, listed = basic(x, in_order(items_of(index), x.placement.ndim))
    if listed:
        return taken(view, listed)
    return ShardedTensor(view.local, view.placement, view.aliased) if view is x else view


def basic(x: ShardedTensor, items: Sequence[Item]) -> tuple[Any, dict[int, Tensor]]:
    """The view that slices and single positions make, and the listed positions that remain, by dim of the view."""
    out: Any = x
    listed: dict[int, Tensor] = {}
    dim = 0
    for at, item in enumerate(items):
        if not isinstance(out, ShardedTensor):  # one value: only new dims can follow
            return replicated(out[tuple(items[at:])], x.placement), {}
        if item is None or isinstance(item, bool):
            out = unsqueezed(out, dim)
            if item is not None:  # torch treats `True` as a list of one position along a new dim
                listed[dim] = torch.zeros(int(item), dtype=torch.long, device=x.device)
            dim += 1
        elif isinstance(item, slice):
            span = range(*item.indices(out.placement.shape[dim]))
            if span.step < 1:
                raise ValueError("step must be greater than zero")
            if item != slice(None):
                out = sliced(out, dim, span.start, span.stop, span.step)
            dim += 1
        elif isinstance(item, int):
            out = selected(out, dim, item, "indexing")
        elif isinstance(item, Tensor):
            found = positions_of(item, out.placement.shape, dim)
            listed |= found
            dim += len(found)
    return out, listed


@register("view", "__setitem__")
def setitem(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Write to the part that an index of any form selects, or where a mask is true."""
    x, index, value = args
    if not isinstance(x, ShardedTensor):
        where = "with a sharded index" if sharded_in([index]) else "a sharded value"
        raise LayoutError(f"writing {where} into a plain tensor: call .full() on it, or shard the target")
    check_writable(x, "assignment")
    items = items_of(index)
    mask = items[0]
    if len(items) == 1 and isinstance(mask, Tensor) and mask.dtype == torch.bool and is_number(value):
        for _ in range(x.ndim - mask.ndim):
            mask = mask.unsqueeze(-1)
        written(x, x.local.masked_fill_(piece_of(mask, x.placement, "assignment"), value))
        return
    if x.mesh.tiled and is_number(value) and (here := in_tile(x, in_order(items, x.placement.ndim))) is not None:
        x.local[here] = value
        written(x, x.local)
        return
    view, listed = basic(x, in_order(items, x.placement.ndim))
    if x.mesh.tiled and isinstance(view, ShardedTensor) and cut_extents(view) != cut_extents(x):
        raise UnsupportedOp("assignment of a tensor to a slice of the image, of which a tile has a copy")
    if not isinstance(view, ShardedTensor):
        raise LayoutError("assignment to a single element of a sharded tensor: assign to a slice")
    source = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=x.dtype, device=x.device)
    if listed:
        write_listed(view, listed, source)
    else:
        check_writable(view, "assignment to one position of a cut dim")
        view.local.copy_(piece_of(fitting(source, view.placement), view.placement, "assignment"))
    written(x, x.local)


def in_tile(x: ShardedTensor, items: Sequence[Item]) -> tuple[slice, ...] | None:
    """The part of a tile that slices and single positions select; None for other indices.

    0   4   8   12   16    x[1::3] = 1 writes to 1, 4, 7, 10, 13
            [8, 12)        of which a tile has 10, its position 2
    """
    found: list[slice] = []
    for item, interval, extent in zip(items, x.placement.box, x.placement.shape, strict=False):
        whole = range(extent)[item : item + 1 or None] if type(item) is int else item
        if not isinstance(whole, (slice, range)) or len(items) != x.placement.ndim:
            return None
        places = range(extent)[whole] if isinstance(whole, slice) else whole
        if places.step < 1 or not (places or isinstance(item, slice)):
            return None  # the error is that of other tensors
        start = places.start + max(0, -(-(interval.start - places.start) // places.step)) * places.step
        stop = max(start, min(places.stop, interval.stop))
        found.append(slice(start - interval.start, stop - interval.start, places.step))
    return tuple(found)


def cut_extents(x: ShardedTensor) -> list[tuple[str | None, int]]:
    """The axes that cut a tensor, and the extents along them."""
    layout = x.placement
    return [(a, n) for a, n, c in zip(layout.axes, layout.shape, layout.cuts, strict=True) if c is not None]


def is_number(value: Any) -> bool:
    """Whether a value to assign is one number."""
    return not (isinstance(value, Tensor) and value.ndim) and not hasattr(value, "__len__")
