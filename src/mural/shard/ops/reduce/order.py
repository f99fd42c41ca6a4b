"""Order along any dim: the k largest by merging each rank's own, and the rest by gathering, if small enough."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from mural.errors import UnsupportedOp
from mural.shard.ops.call_arguments import bound, dim_of, dims_of
from mural.shard.ops.pointwise.along_dim import along
from mural.shard.ops.reduce.extremes import check_values, extreme_of
from mural.shard.ops.reduce.sums import reduced
from mural.shard.relayout import gather, stacked
from mural.shard.table import name_of, register
from mural.shard.tensor import ShardedTensor

LIMIT = 2**22
"""The most values that a rank gathers to order them."""


@register("reduction", "topk")
def topk(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The k largest or smallest along a dim, on every rank: the best of each rank's best."""
    x, k, dim, largest, _ = bound(args, kwargs, ("input", "k", "dim", "largest", "sorted"), -1, True, True)
    dim = dim_of(dim, x.ndim, "topk")
    cuts = x.placement.cuts[dim]
    if cuts is None or not x.placement.is_cut(dim):
        return along(func, args, kwargs)
    if not 0 <= k <= x.shape[dim]:
        raise RuntimeError(f"topk: k={k} is out of range for dim {dim} of extent {x.shape[dim]}")
    counts = [min(k, interval.size) for interval in cuts.intervals()]
    axes = x.placement.axes_of((dim,))
    values, index = x.local.topk(min(k, x.local.shape[dim]), dim, largest)
    missing = [k - n if d == dim else n for d, n in enumerate(values.shape)]

    def of_all(mine: Tensor) -> Tensor:
        """All ranks' candidates, concatenated, without the padding that gives them equal shapes."""
        rows = stacked(torch.cat([mine, mine.new_zeros(missing)], dim), x.mesh, axes, "topk")
        return torch.cat([row.narrow(dim, 0, n) for row, n in zip(rows, counts, strict=True)], dim)

    best, at = of_all(values).topk(k, dim, largest)
    place = of_all(index + x.box[dim].start).gather(dim, at)
    layout = x.placement.with_cut(dim, None, k)
    return torch.return_types.topk((ShardedTensor(best, layout), ShardedTensor(place, layout)))


def whole_along(x: Any, dims: tuple[int, ...], name: str) -> ShardedTensor:
    """The tensor with those dims whole on every rank, if it is small enough."""
    if not isinstance(x, ShardedTensor):
        raise UnsupportedOp(f"{name} of a plain tensor with sharded arguments: call .full() on them")
    if not x.placement.axes_of(dims):
        return x
    if (count := prod(x.placement.gathered(dims).local_shape)) > LIMIT:
        raise UnsupportedOp(
            f"{name} along dims {dims} of a sharded tensor of shape {tuple(x.shape)}, where dims "
            f"{x.placement.cut_dims} are cut, would gather {count} values on every rank, more than {LIMIT}: call "
            f".full() first if they fit, pool or slice the tensor before, or take a dim that is not cut "
            f"(src/mural/shard/ops/reduce/order.py)"
        )
    return gather(x, dims, name)


@register("reduction", "sort", "argsort", "msort")
def sorts(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Positions in ascending or descending order."""
    name = name_of(func)
    given, *rest = args
    dim = 0 if name == "msort" else kwargs.get("dim", rest[0] if rest else -1)
    x = whole_along(given, (dim_of(dim, given.ndim, name),), name)
    result = func(x.local, *rest, **kwargs)
    if isinstance(result, Tensor):
        return ShardedTensor(result, x.placement)
    return type(result)([ShardedTensor(value, x.placement) for value in result])


@register("reduction", "kthvalue", "mode", "median", "nanmedian", "quantile", "nanquantile")
def order_statistics(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The k-th value, the median, quantiles and the most common value along a dim, or over all."""
    name = name_of(func)
    x, place = args[0], 2 if name in ("kthvalue", "quantile", "nanquantile") else 1
    dim = kwargs.get("dim", args[place] if len(args) > place else -1 if name in ("kthvalue", "mode") else None)
    keepdim = bool(kwargs.get("keepdim", args[place + 1] if len(args) > place + 1 else False))
    dims = dims_of(dim, x.ndim, name)
    x = whole_along(x, dims, name)
    result = func(filled(x.local) if prod(x.shape) else x.local, *args[1:], **kwargs)
    kept = [d for d in range(x.ndim) if keepdim or d not in dims]
    layout = x.placement
    for d in dims:
        layout = layout.with_cut(d, None, 1)

    def wrap(value: Tensor) -> Tensor:
        """A result in the layout of what remains; several quantiles are a new first dim."""
        lead = value.ndim - len(kept)
        place = layout.pick([None] * lead + kept, (*value.shape[:lead], *(layout.shape[d] for d in kept)))
        return ShardedTensor(value[tuple(slice(0, n) for n in place.local_shape)], place) if value.ndim else value

    return wrap(result) if isinstance(result, Tensor) else type(result)([wrap(value) for value in result])


def filled(piece: Tensor) -> Tensor:
    """The piece; if it is empty, one position connected to it instead, since torch refuses empty tensors."""
    if piece.numel():
        return piece
    return piece.new_zeros([max(1, n) for n in piece.shape]) + piece.sum().to(piece.dtype) * 0


@register("reduction", "aminmax")
def aminmax(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The smallest and the largest value."""
    x, dim, keepdim = bound(args, kwargs, ("input", "dim", "keepdim"), None, False)
    dims = dims_of(dim, x.ndim, "aminmax")
    check_values("aminmax", x, dims)
    low, high = (reduced(x, extreme_of(x, dims, largest, "aminmax"), dims, keepdim) for largest in (False, True))
    return torch.return_types.aminmax((low, high))
