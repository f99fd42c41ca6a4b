"""Tensors brought to one shape: coordinates as grids, and operands broadcast against each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mural.errors import UnsupportedOp
from mural.shard.ops.pointwise.elementwise import common_layout, piece_of
from mural.shard.ops.view.slices import unsqueezed
from mural.shard.table import TABLE, name_of, register
from mural.shard.tensor import ShardedTensor


def broadcast_all(func: Any, tensors: Sequence[Tensor]) -> tuple[ShardedTensor, ...]:
    """Each tensor repeated without memory to the shape and layout that all have in common."""
    layout, name = common_layout(func, tensors), name_of(func)
    pieces = [piece_of(t, layout, name).expand(layout.local_shape) for t in tensors]
    return tuple(ShardedTensor(piece, layout, name) for piece in pieces)


def listed(args: tuple[Any, ...]) -> list[Tensor]:
    """The tensors of a call that takes them one by one or in one list."""
    return list(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list)) else list(args)


@register("view", "broadcast_tensors")
def broadcast_tensors(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Tensors of one shape."""
    return broadcast_all(func, listed(args))


@register("view", "meshgrid")
def meshgrid(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Grids of coordinates: tensor i varies along dim i alone, or for "xy" the first two along each other's dim."""
    tensors, indexing = listed(args), kwargs.get("indexing") or "ij"
    if indexing not in ("ij", "xy") or any(t.ndim > 1 for t in tensors):
        raise RuntimeError(f"meshgrid takes sequences and indexing 'ij' or 'xy', not {indexing!r}")
    if any(t.ndim == 0 for t in tensors):
        raise UnsupportedOp("meshgrid of sharded sequences and numbers: make the numbers sequences of one")
    order = list(range(len(tensors)))
    if indexing == "xy" and len(tensors) > 1:
        order[:2] = [1, 0]
    raised: list[Tensor] = []
    for tensor, dim in zip(tensors, order, strict=True):
        for d in range(len(tensors)):
            if d != dim:
                tensor = unsqueezed(tensor, d) if isinstance(tensor, ShardedTensor) else tensor.unsqueeze(d)
        raised.append(tensor)
    return broadcast_all(func, raised)


_builtin: Any = torch._C  # torch's stubs leave its submodules out
TABLE[_builtin._VariableFunctions.meshgrid] = ("meshgrid", meshgrid)  # where torch takes the sequences in one list
