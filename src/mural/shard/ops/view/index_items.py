"""What stands between the brackets of an index, read as torch reads it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

Item = int | bool | slice | EllipsisType | Tensor | None

MOST = 32
"""A list with as many entries is one of positions to torch, whatever it holds."""


def items_of(index: Any) -> list[Item]:
    """The items of an index: numbers, slices, `None`, `...` and tensors of positions.

    A list that holds more than numbers stands for a tuple, as NumPy had it: `x[[slice(None), 0]]` is `x[:, 0]`.

    >>> items_of([slice(None), None, 3]), items_of([2, 3])
    ([slice(None, None, None), None, 3], [tensor([2, 3])])
    """
    items = list(index) if isinstance(index, tuple) or stands_for_tuple(index) else [index]
    return [item_of(item) for item in items]


def stands_for_tuple(index: Any) -> bool:
    """Whether torch takes a sequence for a tuple of items."""
    if isinstance(index, (Tensor, str)) or not isinstance(index, Sequence) or len(index) >= MOST:
        return False
    return any(item is None or item is ... or isinstance(item, slice) or is_listed(item) for item in index)


def is_listed(item: Any) -> bool:
    """Whether an item holds positions of its own."""
    return isinstance(item, (Tensor, Sequence)) or getattr(item, "ndim", 0) > 0  # an array of NumPy


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
    """The items with slices for what `...`, or the end, leaves out.

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
    """How many dims of the tensor an item speaks of."""
    if item is None or item is ... or isinstance(item, bool):
        return 0
    return item.ndim if isinstance(item, Tensor) and item.dtype == torch.bool else 1
