"""Running sums, products and extremes along any dim: each rank scans its piece, then adds what comes before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mural.errors import UnsupportedOp
from mural.shard.ops.call_arguments import bound, dim_of, dims_of
from mural.shard.ops.pointwise.along_dim import along
from mural.shard.ops.reduce.sums import reduced, wide
from mural.shard.relayout import stacked
from mural.shard.table import name_of, register
from mural.shard.tensor import ShardedTensor


def parts_before(x: ShardedTensor, dim: int) -> list[int]:
    """The coordinates of the ranks whose pieces come before this rank's along a cut dim, in order, without empty ones.

    In a flipped tensor the last rank's piece comes first.
    """
    cuts, axis = x.placement.cuts[dim], x.placement.axes[dim]
    if cuts is None or axis is None:
        return []
    before = cuts.owners[: cuts.owners.index(x.mesh.coordinates[axis])]
    return [c for c in before if cuts.interval(c).size]


def log_total(piece: Tensor, dim: int) -> Tensor:
    """The logarithm of the sum of exponentials along a dim, with a zero gradient if all are minus infinity."""
    nothing = (piece == float("-inf")).all(dim, keepdim=True)
    total = torch.where(nothing, 0.0, piece).logsumexp(dim, keepdim=True)
    return torch.where(nothing, float("-inf"), total)


def total_of(piece: Tensor, dim: int, name: str) -> Tensor:
    """The last value of a piece's scan."""
    if name == "logcumsumexp":
        return log_total(piece, dim)
    return (piece.sum if name == "cumsum" else piece.prod)(dim, keepdim=True, dtype=piece.dtype)


@register("reduction", "cumsum", "cumprod", "logcumsumexp")
def running(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Running sums, products and logarithms of sums of exponentials: a scan of the totals before, then of the piece."""
    name = name_of(func)
    x, dim, dtype = bound(args, kwargs, ("input", "dim", "dtype"), None)
    dim = dim_of(dim, x.ndim, name)
    if not x.placement.is_cut(dim):
        return along(func, args, kwargs)
    if name == "logcumsumexp" and x.is_complex():
        raise UnsupportedOp("logcumsumexp of complex numbers along a cut dim: their angles would differ by full turns")
    options = {} if name == "logcumsumexp" else {"dtype": dtype}
    kind = func(x.local.new_zeros((1,) * x.ndim), dim, **options).dtype  # torch's own result has this type
    piece = x.local.to(wide(kind))
    ends = stacked(total_of(piece, dim, name), x.mesh, x.placement.axes_of((dim,)), name)
    before = [ends[c] for c in parts_before(x, dim)]
    scanned = func(torch.cat([*before, piece], dim), dim).narrow(dim, len(before), piece.shape[dim])
    return ShardedTensor((scanned + ends[:0].sum()).to(kind), x.placement)  # the empty sum keeps the graph connected


@register("reduction", "cummax", "cummin")
def running_extremes(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The largest or smallest value so far, and its position: the last of equal ones, as in torch."""
    name = name_of(func)
    x, dim = bound(args, kwargs, ("input", "dim"))
    dim = dim_of(dim, x.ndim, name)
    if not x.placement.is_cut(dim):
        return along(func, args, kwargs)
    values, index = func(x.local, dim)
    index = index + x.box[dim].start
    axes = x.placement.axes_of((dim,))
    all_values = stacked(ending(values, dim), x.mesh, axes, name)
    all_index = stacked(ending(index, dim), x.mesh, axes, name)
    later = torch.ge if name == "cummax" else torch.le
    before = parts_before(x, dim)
    for c in reversed(before or [0]):  # every rank compares, so that all save a tensor after the exchange
        stays = values.isnan() | (~all_values[c].isnan() & later(values, all_values[c]))
        stays = stays if before else torch.ones_like(stays)
        values, index = torch.where(stays, values, all_values[c]), torch.where(stays, index, all_index[c])
    kind = torch.return_types.cummax if name == "cummax" else torch.return_types.cummin
    return kind((ShardedTensor(values, x.placement), ShardedTensor(index, x.placement)))


def ending(scanned: Tensor, dim: int) -> Tensor:
    """The last position of a scan; if it is empty, a value connected to it."""
    if scanned.shape[dim]:
        return scanned.narrow(dim, scanned.shape[dim] - 1, 1)
    return scanned.sum(dim, keepdim=True, dtype=scanned.dtype)


@register("reduction", "prod")
def product(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The product of all positions, or along a dim."""
    given = dict(zip(("input", "dim", "keepdim"), args, strict=False)) | kwargs
    x, dim, dtype = given["input"], given.get("dim"), given.get("dtype")
    dims = dims_of(dim, x.ndim, "prod")
    if not x.placement.axes_of(dims):
        return along(func, args, kwargs)
    local = x.local.flatten().prod(dtype=dtype) if dim is None else x.local.prod(dims[0], keepdim=True, dtype=dtype)
    shape = [1 if d in dims else n for d, n in enumerate(x.local.shape)]
    rows = stacked(local.view(shape), x.mesh, x.placement.axes_of(dims), "prod")
    return reduced(x, rows.prod(0, dtype=rows.dtype), dims, bool(given.get("keepdim", False)))
