"""Positions repeated in place: data stay where they are, and the cuts move apart."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mural.errors import UnsupportedOp
from mural.geometry import Cuts
from mural.shard.folds.reshape import settled
from mural.shard.ops.call_arguments import bound, dim_of
from mural.shard.table import register
from mural.shard.tensor import ShardedTensor


@register("along a dim", "repeat_interleave")
def repeat_interleave(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Every position of a dim as often as it is told, one behind the other."""
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
