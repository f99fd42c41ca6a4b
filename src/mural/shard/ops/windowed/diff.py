"""Differences of neighbours along any dim: a window of as many positions as the order needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mural.geometry import Window
from mural.shard.ops.call_arguments import bound, dim_of
from mural.shard.ops.pointwise.along_dim import along
from mural.shard.rules import Place, Windowed, windowed
from mural.shard.table import register
from mural.shard.tensor import ShardedTensor


@register("windowed", "diff")
def diff(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The n-th differences along a dim, of the tensor with what is prepended and appended."""
    names = ("input", "n", "dim", "prepend", "append")
    x, n, dim, before, after = bound(args, kwargs, names, 1, -1, None, None)
    dim = dim_of(dim, x.ndim, "diff")
    parts = [part for part in (before, x, after) if part is not None]
    if n > 0 and len(parts) > 1:
        x = torch.cat(parts, dim)
    if not isinstance(x, ShardedTensor):
        raise TypeError(f"diff of {type(x)}")
    if n < 1 or not x.placement.is_cut(dim):
        return along(func, (x, n, dim), {})
    return windowed(x, diff_rule(tuple(x.shape[dim:]), n))


def diff_rule(extents: tuple[int, ...], n: int) -> Windowed:
    """The rule of n-th differences along the first of these dims; the others stay as they are."""
    window = Window(extents[0], max(0, extents[0] - n), hi=n + 1)

    def run(piece: Tensor, places: tuple[Place, ...]) -> Tensor:
        return piece.diff(n, piece.ndim - len(places))

    return Windowed("diff", (window, *(Window(e, e) for e in extents[1:])), run)
