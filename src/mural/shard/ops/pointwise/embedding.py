"""Look-ups in a table that every rank holds: each position by itself, with a value or a vector as its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from mural.errors import UnsupportedOp
from mural.shard.ops.call_arguments import bound
from mural.shard.table import name_of, register
from mural.shard.tensor import ShardedTensor


def check_table(table: Any, positions: Any, name: str, what: str) -> None:
    """Raise unless the table is plain and the positions are sharded."""
    if isinstance(table, ShardedTensor) or not isinstance(positions, ShardedTensor):
        raise UnsupportedOp(f"{name} takes sharded positions and a plain {what}: call .full() on the {what}")


@register("pointwise", "embedding")
def embedding(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """A row of the table for each position, as a new last dim."""
    options = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    if func is F.embedding:
        given = bound(args, kwargs, ("input", "weight", *options), None, None, 2.0, False, False)
        index, weight, padding, longest, norm, by_count, sparse = given
    else:  # the builtin function
        names = ("weight", "indices", "padding_idx", "scale_grad_by_freq", "sparse")
        weight, index, padding, by_count, sparse = bound(args, kwargs, names, -1, False, False)
        padding, longest, norm = None if padding == -1 else padding, None, 2.0
    check_table(weight, index, "embedding", "weight")
    if longest is not None or by_count or sparse:
        raise UnsupportedOp(
            f"embedding of a sharded tensor with max_norm={longest}, scale_grad_by_freq={by_count}, sparse={sparse}: "
            f"they look at the positions of the whole batch; leave them out, or call .full() on the positions"
        )
    local = F.embedding(index.local, weight, padding, None, norm)
    return ShardedTensor(local, index.placement.pick([*range(index.ndim), None], (*index.shape, weight.shape[-1])))


@register("pointwise", "bucketize", "searchsorted")
def search(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The index of each value among plain, sorted bounds."""
    name = name_of(func)
    names = ("input", "boundaries") if name == "bucketize" else ("sorted_sequence", "input")
    given = dict(zip(names, args, strict=False)) | kwargs
    bounds = given.pop("boundaries" if name == "bucketize" else "sorted_sequence")
    values = given.pop("input")
    check_table(bounds, values, name, "sequence of bounds")
    if bounds.ndim != 1:
        raise UnsupportedOp(f"{name} of a sharded tensor in bounds of shape {tuple(bounds.shape)}: give one sequence")
    pair = (values.local, bounds) if name == "bucketize" else (bounds, values.local)
    return ShardedTensor(func(*pair, **given), values.placement)
