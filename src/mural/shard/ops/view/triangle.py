"""Triangles of matrices: each rank keeps its part, whose diagonal is shifted by where the piece lies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mural.shard.ops.call_arguments import bound
from mural.shard.ops.pointwise.elementwise import check_writable, written
from mural.shard.table import name_of, register
from mural.shard.tensor import ShardedTensor


@register("pointwise", "tril", "triu", "tril_", "triu_")
def triangle(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """The lower or upper triangle of the last two dims, zeros elsewhere."""
    x, diagonal = bound(args, kwargs, ("input", "diagonal"), 0)
    if x.ndim < 2:
        raise RuntimeError(f"{name_of(func)} takes at least 2 dims, not a tensor of shape {tuple(x.shape)}")
    rows, columns = x.box[-2:]
    if name_of(func).endswith("_"):
        check_writable(x, name_of(func))
    local = func(x.local, diagonal + rows.start - columns.start)
    return written(x, local) if local is x.local else ShardedTensor(local, x.placement)
