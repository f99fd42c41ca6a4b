"""The largest and smallest values, and where they are; ties share the gradient, or the first gets it, as in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mural.comm import mark
from mural.comm.exchange import first_order
from mural.errors import UnsupportedOp
from mural.ranks import Mesh
from mural.shard.ops.call_arguments import bound, dim_of, dims_of
from mural.shard.ops.reduce.sums import reduced
from mural.shard.relayout import merged, stacked
from mural.shard.table import name_of, register
from mural.shard.tensor import ShardedTensor


class _Share(torch.autograd.Function):
    """The global extreme; its gradient, from all ranks, goes evenly to the positions that attain it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, best: Tensor, count: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        ctx.save_for_backward(x, best, count)
        ctx.mesh, ctx.axes = mesh, axes
        return best.clone()

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, best, count = ctx.saved_tensors
        return (x == best) * (merged(grad, ctx.mesh, ctx.axes, "extreme backward") / count), None, None, None, None


def extreme_of(x: ShardedTensor, dims: Sequence[int], largest: bool, name: str) -> Tensor:
    """The largest (or smallest) value over dims, as a local tensor with those dims of extent 1."""
    axes, local = x.placement.axes_of(dims), x.local
    pick = torch.amax if largest else torch.amin
    with torch.no_grad():
        if any(local.shape[d] == 0 for d in dims):
            shape = [1 if d in dims else n for d, n in enumerate(local.shape)]
            mine = local.new_full(shape, lowest(local.dtype, largest))
        else:
            mine = pick(local, tuple(dims), keepdim=True)
        best = pick(stacked(mine, x.mesh, axes, name), 0) if axes else mine
        if not local.requires_grad:
            return best
        count = merged((local == best).sum(tuple(dims), keepdim=True), x.mesh, axes, name)
    shared: Tensor = _Share.apply(local, best, count, x.mesh, axes)  # type: ignore[assignment]
    mark()
    return shared


@register("reduction", "amax", "amin")
def extremes(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The largest or smallest value."""
    name = name_of(func)
    x, dim, keepdim = bound(args, kwargs, ("input", "dim", "keepdim"), None, False)
    dims = dims_of(dim, x.ndim, name)
    check_values(name, x, dims)
    return reduced(x, extreme_of(x, dims, name == "amax", name), dims, keepdim)


def check_values(name: str, x: Tensor, dims: Sequence[int]) -> None:
    """Raise for dims without a position, of which nothing is the largest."""
    if any(x.shape[d] == 0 for d in dims):
        raise IndexError(f"{name} of a tensor of shape {tuple(x.shape)}: dims {tuple(dims)} have no positions")


@register("reduction", "max", "min")
def max_or_min(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`max(x)`, `max(x, dim)` with positions, `max(x, y)`."""
    name = name_of(func)
    other = next(iter(args[1:]), kwargs.get("other"))
    if isinstance(other, Tensor):
        first: Tensor = args[0]
        return torch.maximum(first, other) if name == "max" else torch.minimum(first, other)
    x, dim, keepdim = bound(args, kwargs, ("input", "dim", "keepdim"), None, False)
    if dim is None:
        dims = tuple(range(x.ndim))
        check_values(name, x, dims)
        return reduced(x, extreme_of(x, dims, name == "max", name), dims, False)
    check_values(name, x, (dim_of(dim, x.ndim, name),))
    values, indices = extreme_along(x, dim_of(dim, x.ndim, name), name == "max", name)
    kind = torch.return_types.max if name == "max" else torch.return_types.min
    at = (dim_of(dim, x.ndim, name),)
    return kind((reduced(x, values, at, keepdim), reduced(x, indices, at, keepdim)))


def extreme_along(x: ShardedTensor, dim: int, largest: bool, name: str) -> tuple[Tensor, Tensor]:
    """Value and global position of the first extreme along one dim, which keeps an extent of 1."""
    pick = torch.max if largest else torch.min
    start = x.box[dim].start
    if x.local.shape[dim]:
        values, indices = pick(x.local, dim, keepdim=True)
        indices = indices + start
    else:
        shape = [1 if d == dim else n for d, n in enumerate(x.local.shape)]
        values = x.local.new_full(shape, lowest(x.dtype, largest))
        if values.is_floating_point():
            values = values + x.local.sum(dim, keepdim=True) * 0
        indices = torch.full(shape, torch.iinfo(torch.int64).max, device=x.device)
    axes = x.placement.axes_of((dim,))
    if not axes or x.mesh.size(axes[0]) == 1:
        return values, indices
    all_values, all_indices = stacked(values, x.mesh, axes, name), stacked(indices, x.mesh, axes, name)
    best = pick(all_values.detach(), 0, keepdim=True).values
    hit = same_value(all_values.detach(), best)
    place = torch.where(hit, all_indices, torch.iinfo(torch.int64).max).min(0, keepdim=True)
    return all_values.gather(0, place.indices)[0], place.values[0]


def same_value(values: Tensor, best: Tensor) -> Tensor:
    """A mask of the values that equal the best one, which may be NaN."""
    return (values == best) | (values.isnan() & best.isnan())


def lowest(dtype: torch.dtype, largest: bool) -> float | int:
    """The value that never wins a maximum (or minimum)."""
    if dtype.is_floating_point:
        return float("-inf") if largest else float("inf")
    limits = torch.iinfo(torch.uint8 if dtype == torch.bool else dtype)
    return limits.min if largest else min(limits.max, 1) if dtype == torch.bool else limits.max


@register("reduction", "argmax", "argmin")
def argument(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The global position of the first extreme along a dim."""
    name = name_of(func)
    x, dim, keepdim = bound(args, kwargs, ("input", "dim", "keepdim"), None, False)
    if dim is None:
        raise UnsupportedOp(f"{name} over all dims of a sharded tensor: give a dim, or call .full()")
    at = dim_of(dim, x.ndim, name)
    check_values(name, x, (at,))
    _, indices = extreme_along(x.detach(), at, name == "argmax", name)
    return reduced(x, indices, (at,), keepdim)
