"""Norms of vectors over dims, cut or not, and of the matrices that two dims hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mural.errors import UnsupportedOp
from mural.shard.ops.call_arguments import bound, dims_of
from mural.shard.ops.reduce.extremes import extreme_of
from mural.shard.ops.reduce.sums import reduced, total, wide
from mural.shard.shape_probes import result_for
from mural.shard.table import FOLDED, KINDS, TABLE, name_of, register, register_folded
from mural.shard.tensor import ShardedTensor


@register("reduction", "norm", "vector_norm")
def norms(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The p-norm of all positions, or along dims; its gradient at zero is zero, as torch's."""
    name = name_of(func)
    order = "ord" if name == "vector_norm" else "p"
    x, p, dim, keepdim, dtype = bound(args, kwargs, ("input", order, "dim", "keepdim", "dtype"), 2, None, False, None)
    if p == "nuc":
        raise UnsupportedOp("the nuclear norm of a sharded tensor: call .full() first")
    p = 2.0 if p in ("fro", None) else float(p)
    dims = dims_of(dim, x.ndim, name)
    result = func(x.local.new_zeros(1), p, dtype=dtype).dtype
    size = ShardedTensor(x.local.abs().to(wide(result)), x.placement)
    if abs(p) == float("inf"):
        return reduced(x, extreme_of(size, dims, p > 0, name).to(result), dims, keepdim)
    powers = (size.local != 0).to(size.dtype) if p == 0 else size.local if p == 1 else size.local**p
    powered = total(x, powers.sum(dims, keepdim=True), dims, name)
    if p not in (0.0, 1.0):
        filled = powered != 0
        powered = torch.where(filled, torch.where(filled, powered, 1.0) ** (1 / p), 0.0)
    return reduced(x, powered.to(result), dims, keepdim)


@register("reduction", "matrix_norm")
@register_folded("matrix_norm")
def matrix_norm(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The Frobenius norm, or the largest or smallest sum of magnitudes in a column (1, -1) or row (inf, -inf)."""
    names = ("input", "ord", "dim", "keepdim", "dtype")
    x, order, dim, keepdim, dtype = bound(args, kwargs, names, "fro", (-2, -1), False, None)
    result_for(func, x.shape, order, dim, keepdim)  # refuses what torch refuses
    rows, columns = dims_of(dim, x.ndim, "matrix_norm")
    if order == "fro":
        return torch.linalg.vector_norm(x, 2, (rows, columns), keepdim, dtype=dtype)
    if order == "nuc" or abs(order) == 2:
        raise UnsupportedOp(
            f"matrix_norm of order {order!r} of a sharded tensor of shape {tuple(x.shape)} needs singular values, "
            f"and so the whole matrix: call .full() first"
        )
    summed, best = (rows, columns) if abs(order) == 1 else (columns, rows)
    sums = torch.linalg.vector_norm(x, 1, summed, True, dtype=dtype)
    found = sums.amax((summed, best), True) if order > 0 else sums.amin((summed, best), True)
    return found if keepdim else found.squeeze((rows, columns))


def linalg_norm(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The norm of a matrix if an order and two dims are given, of a vector otherwise."""
    names = ("input", "ord", "dim", "keepdim", "dtype")
    x, order, dim, keepdim, dtype = bound(args, kwargs, names, None, None, False, None)
    result_for(func, x.shape, order, dim, keepdim)  # refuses what torch refuses
    matrix = x.ndim == 2 if dim is None else not isinstance(dim, int) and len(dim) == 2
    if order is not None and matrix:
        return torch.linalg.matrix_norm(x, order, (0, 1) if dim is None else dim, keepdim, dtype=dtype)
    return torch.linalg.vector_norm(x, 2 if order is None else order, dim, keepdim, dtype=dtype)


TABLE[torch.linalg.norm] = ("linalg_norm", linalg_norm)
FOLDED["linalg_norm"] = linalg_norm
KINDS["linalg_norm"] = "reduction"
