"""Reading and writing through brackets: slices and single positions first, listed positions of what is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mural.errors import LayoutError
from mural.shard.ops.pointwise.elementwise import check_writable, piece_of, written
from mural.shard.ops.view.index_items import Item, in_order, items_of
from mural.shard.ops.view.listed_positions import fitting, looked_up, positions_of, taken, write_listed
from mural.shard.ops.view.slices import selected, sliced, unsqueezed
from mural.shard.table import register
from mural.shard.tensor import ShardedTensor, replicated, sharded_in


@register("view", "__getitem__")
def getitem(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What is at an index of any form that torch takes."""
    x, index = args
    if not isinstance(x, ShardedTensor):
        return looked_up(x, index if isinstance(index, tuple) else (index,))
    view, listed = basic(x, in_order(items_of(index), x.placement.ndim))
    if listed:
        return taken(view, listed)
    return ShardedTensor(view.local, view.placement, view.aliased) if view is x else view


def basic(x: ShardedTensor, items: Sequence[Item]) -> tuple[Any, dict[int, Tensor]]:
    """The view that slices and single positions make, and the listed positions that are left to take, by dim of it."""
    out: Any = x
    listed: dict[int, Tensor] = {}
    dim = 0
    for at, item in enumerate(items):
        if not isinstance(out, ShardedTensor):  # one value: new dims alone can follow
            return replicated(out[tuple(items[at:])], x.placement), {}
        if item is None or isinstance(item, bool):
            out = unsqueezed(out, dim)
            if item is not None:  # torch counts `True` as a list of one position along a new dim
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
    """Write to a part: what an index of any form names, or where a mask is true."""
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
    view, listed = basic(x, in_order(items, x.placement.ndim))
    if not isinstance(view, ShardedTensor):
        raise LayoutError("assignment to a single element of a sharded tensor: assign to a slice")
    source = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=x.dtype, device=x.device)
    if listed:
        write_listed(view, listed, source)
    else:
        check_writable(view, "assignment to one position of a cut dim")
        view.local.copy_(piece_of(fitting(source, view.placement), view.placement, "assignment"))
    written(x, x.local)


def is_number(value: Any) -> bool:
    """Whether a value to assign is one number."""
    return not (isinstance(value, Tensor) and value.ndim) and not hasattr(value, "__len__")
