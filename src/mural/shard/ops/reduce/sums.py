"""Sums, means, variances and histograms over dims, cut or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from mural.shard.ops.call_arguments import bound, dims_of
from mural.shard.relayout import merged
from mural.shard.table import name_of, register
from mural.shard.tensor import ShardedTensor, replicated


def reduced(x: ShardedTensor, local: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """A result, the same on all ranks along the reduced dims, in the layout of what remains.

    `local` has the reduced dims as extent 1.
    """
    layout = x.placement.gathered(dims)
    for d in dims:
        layout = layout.with_cut(d, None, 1)
    if not keepdim:
        keep = [d for d in range(layout.ndim) if d not in dims]
        local = local.reshape([local.shape[d] for d in keep])
        layout = layout.pick(keep, [layout.shape[d] for d in keep])
    return ShardedTensor(local, layout) if layout.ndim else local


def total(x: ShardedTensor, local: Tensor, dims: Sequence[int], name: str) -> Tensor:
    """A local sum over dims, added up over the ranks that share those dims."""
    return merged(local, x.mesh, x.placement.axes_of(dims), name)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which values of a type are summed."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


ALONE: dict[str, Callable[..., Tensor]] = {"sum": torch.sum, "mean": torch.mean}
"""torch's own calls, which are the result where no dim that is summed is cut."""


def type_of_sum(name: str, x: Tensor) -> torch.dtype:
    """The type in which torch gives a sum or a mean of such values; it is asked with a number."""
    number = x.new_zeros(1)
    return (torch.mean if "mean" in name else torch.count_nonzero if "count" in name else torch.sum)(number).dtype


@register("reduction", "sum", "mean", "nansum", "nanmean", "count_nonzero")
def sums(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Sums and means over the global positions."""
    name = name_of(func)
    x, dim, keepdim, dtype = bound(args, kwargs, ("input", "dim", "keepdim", "dtype"), None, False, None)
    dims = dims_of(dim, x.ndim, name)
    if name in ("mean", "nanmean") and not (dtype or x.dtype).is_floating_point and not (dtype or x.dtype).is_complex:
        raise RuntimeError(f"{name} needs a floating point tensor, not {x.dtype}: call .float() first")
    if name in ALONE and x.local.numel() and not x.mesh.tiled and not x.placement.axes_of(dims):
        return reduced(x, ALONE[name](x.local, dims, keepdim=True, dtype=dtype), dims, keepdim)
    result = dtype or type_of_sum(name, x.local)
    values = x.local
    if name in ("nansum", "nanmean"):
        values = torch.nan_to_num(values, 0.0, float("inf"), float("-inf"))
    if name == "count_nonzero":
        values = values != 0
    local = torch.sum(values, dims, keepdim=True, dtype=wide(result))
    local = total(x, local, dims, name)
    if name == "mean":
        local = local / prod(x.shape[d] for d in dims)
    elif name == "nanmean":
        valid = torch.sum(~torch.isnan(x.local), dims, keepdim=True, dtype=wide(result))
        local = local / total(x, valid, dims, name)
    return reduced(x, local.to(result), dims, keepdim)


@register("reduction", "var", "std", "var_mean", "std_mean")
def spreads(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Variances in two passes: the mean, then the squares of the differences from it."""
    name = name_of(func)
    x, *rest = args
    if not x.is_floating_point():
        raise RuntimeError(f"{name} needs a floating point tensor, not {x.dtype}: call .float() first")
    given = dict(kwargs)
    if rest and isinstance(rest[0], bool):  # the old form: var(x, unbiased)
        given["unbiased"], rest = rest[0], rest[1:]
    names = ("dim", "unbiased", "keepdim") if len(rest) > 1 and isinstance(rest[1], bool) else ("dim", "keepdim")
    given |= dict(zip(names, rest, strict=False))
    correction = given.get("correction", None)
    if correction is None:
        correction = int(given.get("unbiased", True) is not False)
    dims = dims_of(given.get("dim"), x.ndim, name)
    count = prod(x.shape[d] for d in dims)
    values = x.local.to(wide(x.dtype))
    mean = total(x, values.sum(dims, keepdim=True), dims, name) / count
    variance = total(x, (values - mean).square().sum(dims, keepdim=True), dims, name) / max(0, count - correction)
    if name.startswith("std"):  # the root's gradient at zero is zero, as torch's
        filled = variance > 0
        variance = torch.where(filled, torch.where(filled, variance, 1.0).sqrt(), variance * 0)
    spread = variance.to(x.dtype)
    keep = bool(given.get("keepdim", False))
    if name.endswith("mean"):
        return reduced(x, spread, dims, keep), reduced(x, mean.to(x.dtype), dims, keep)
    return reduced(x, spread, dims, keep)


@register("reduction", "all", "any")
def truth(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Whether all or any positions are true."""
    name = name_of(func)
    x, dim, keepdim = bound(args, kwargs, ("input", "dim", "keepdim"), None, False)
    dims = dims_of(dim, x.ndim, name)
    wrong = x.local == 0 if name == "all" else x.local != 0
    count = total(x, wrong.sum(dims, keepdim=True), dims, name)
    answer = count == 0 if name == "all" else count != 0
    return reduced(x, answer.to(torch.uint8) if x.dtype == torch.uint8 else answer, dims, keepdim)


@register("reduction", "equal", "allclose")
def compare(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether two tensors agree everywhere."""
    test = torch.eq if name_of(func) == "equal" else torch.isclose
    if tuple(args[0].shape) != tuple(args[1].shape):
        return False
    return bool(test(*args, **kwargs).all())


@register("reduction", "histc")
def histc(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The number of values in each bin of equal width, by default between the smallest and the largest value."""
    x, bins, low, high = bound(args, kwargs, ("input", "bins", "min", "max"), 100, 0, 0)
    func(x.local.new_zeros(2), bins, low, high)  # refuses what torch refuses, also on ranks without positions
    if low == high and x.numel():
        low, high = (float(value) for value in torch.aminmax(x.detach()))
        if low == high:
            low, high = low - 1, high + 1
    counts = func(x.local.detach(), bins, low, high)
    counts = merged(counts, x.mesh, x.placement.axes_of(range(x.ndim)), "histc")
    return replicated(counts, x.placement)
