"""Normalization with the statistics of the whole image, merged stably over the ranks.

Each rank computes mean and squared deviation of its own positions; those are merged by counts, never as
E[x²] − E[x]². One autograd node does the rest, and saves what torch's own does: the input and the statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mural.comm import Mesh, mark, stack
from mural.shard.ops.views import bound
from mural.shard.table import register
from mural.shard.tensor import ShardedTensor


def local_moments(x: Tensor, dims: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Mean and sum of squared deviations of the positions here, with the reduced dims of extent 1."""
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    shape = [1 if d in dims else n for d, n in enumerate(x.shape)]
    if x.numel() == 0:
        return x.new_zeros(shape, dtype=wide), x.new_zeros(shape, dtype=wide)
    count = prod(x.shape[d] for d in dims)
    if set(dims) == set(range(x.ndim)) - {1}:
        # torch's kernel for exactly this: statistics per channel in one pass.
        mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
        return mean.to(wide).view(shape), variance.to(wide).view(shape) * count
    variance, mean = torch.var_mean(x.to(wide), tuple(dims), correction=0, keepdim=True)
    return mean, variance * count


def merge_moments(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and squared deviations of everything, from those of parts (first dim: parts; second: the three)."""
    counts, means, squares = rows[:, 0], rows[:, 1], rows[:, 2]
    count = counts.sum(0)
    mean = means[0] + ((means - means[0]) * counts).sum(0) / count
    square = (squares + counts * (means - mean).square()).sum(0)
    return count, mean, square


class _Normalize(torch.autograd.Function):
    """y = (x − mean) · rstd · weight + bias, the moments over `dims` and over the ranks of `peers`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, dims: tuple[int, ...], eps: float,
        mesh: Mesh, peers: tuple[int, ...], dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        mean, square = local_moments(x, dims)
        count = torch.full_like(mean, prod(x.shape[d] for d in dims))
        rows = stack(torch.stack([count, mean, square]), peers, mesh.rank, mesh.transport, "norm statistics")
        count, mean, square = merge_moments(rows)
        variance = square / count
        rstd = torch.rsqrt(variance + eps)
        scale = rstd if weight is None else rstd * weight
        shift = -mean * scale if bias is None else bias - mean * scale
        y = torch.addcmul(shift, x, scale) if x.dtype == shift.dtype else x * scale + shift
        ctx.save_for_backward(x, weight, bias, mean, rstd, count)
        ctx.dims, ctx.mesh, ctx.peers = dims, mesh, peers
        ctx.mark_non_differentiable(mean, square, count)
        return y.to(dtype), mean, square, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, rstd, count = ctx.saved_tensors
        grad = grad.to(mean.dtype)
        hat = (x - mean) * rstd
        of_weight = of_bias = None
        if weight is not None and ctx.needs_input_grad[1]:
            of_weight = sum_to(grad * hat, weight.shape).to(weight.dtype)
        if bias is not None and ctx.needs_input_grad[2]:
            of_bias = sum_to(grad, bias.shape).to(bias.dtype)
        of_x = None
        if ctx.needs_input_grad[0]:
            scaled = grad if weight is None else grad * weight
            sums = torch.stack([scaled.sum(ctx.dims, keepdim=True), (scaled * hat).sum(ctx.dims, keepdim=True)])
            total = stack(sums, ctx.peers, ctx.mesh.rank, ctx.mesh.transport, "norm statistics backward").sum(0)
            # The moments depend on x: take the projections on 1 and on x̂ out of the gradient.
            of_x = hat.mul_(-total[1] / count).add_(scaled).sub_(total[0] / count).mul_(rstd).to(x.dtype)
        return of_x, of_weight, of_bias, None, None, None, None, None


def sum_to(value: Tensor, shape: torch.Size) -> Tensor:
    """The sum over the dims in which a broadcast operand of that shape has extent 1."""
    return value.sum_to_size(shape)


def result_dtype(func: Callable[..., Any], x: Tensor, weight: Tensor | None) -> torch.dtype:
    """The type of torch's own result, with autocast as it is now."""
    kind = x.device.type
    key = (func, x.dtype, None if weight is None else weight.dtype, kind, torch.is_autocast_enabled(kind))
    if key not in _DTYPES:
        small = x.new_zeros(1, 1, 2)
        affine = None if weight is None else weight.detach().reshape(-1)[:1]
        with torch.no_grad():
            if func is F.layer_norm:
                affine = None if affine is None else affine.new_ones(2)
                _DTYPES[key] = F.layer_norm(small, (2,), affine, affine).dtype
            elif func is F.group_norm:
                _DTYPES[key] = F.group_norm(small, 1, affine, affine).dtype
            else:
                _DTYPES[key] = F.instance_norm(small, weight=affine, bias=affine).dtype
    return _DTYPES[key]


_DTYPES: dict[Any, torch.dtype] = {}


def normalize(
    x: ShardedTensor, local: Tensor, weight: Tensor | None, bias: Tensor | None, dims: tuple[int, ...],
    axes: Sequence[str], eps: float, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The normalized piece, and mean, squared deviation and count of the whole."""
    with torch.autocast(local.device.type, enabled=False):
        found = _Normalize.apply(local, weight, bias, dims, eps, x.mesh, x.mesh.peers(axes), dtype)
    mark()
    return found  # type: ignore[return-value]


def channelwise(parameter: Tensor | None, ndim: int) -> Tensor | None:
    """A parameter of one value per channel, shaped to broadcast."""
    return None if parameter is None else parameter.view(1, -1, *(1,) * (ndim - 2))


def update(running: Tensor | None, value: Tensor, momentum: float) -> None:
    """Move a running buffer towards the batch's value."""
    if running is not None:
        running.mul_(1 - momentum).add_(value.detach().to(running.dtype), alpha=momentum)


@register("reduction", "batch_norm")
def batch_norm(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Batch norm over the whole batch and image; running buffers equal on every rank."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    x, mean, var, weight, bias, training, momentum, eps = bound(args, kwargs, names, None, None, False, 0.1, 1e-5)
    if not training:
        return frozen(x, mean, var, weight, bias, eps)
    count = x.numel() // max(1, x.shape[1])
    if count == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
    dims = tuple(d for d in range(x.ndim) if d != 1)
    axes = x.placement.axes_of(dims)
    local, found, square, _ = normalize(
        x,
        x.local,
        channelwise(weight, x.ndim),
        channelwise(bias, x.ndim),
        dims,
        axes,
        eps,
        result_dtype(func, x.local, weight),
    )
    with torch.no_grad():
        update(mean, found.reshape(-1), momentum)
        update(var, square.reshape(-1) / (count - 1), momentum)
    return ShardedTensor(local, x.placement)


def frozen(
    x: ShardedTensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> ShardedTensor:
    """Batch norm with given statistics, which is local."""
    if x.local.numel() == 0:
        anchor = sum((p.sum() for p in (weight, bias) if p is not None), torch.zeros((), device=x.device))
        return ShardedTensor(x.local + (0 * anchor).to(x.dtype), x.placement)
    return ShardedTensor(F.batch_norm(x.local, mean, var, weight, bias, False, 0.0, eps), x.placement)


@register("reduction", "instance_norm")
def instance_norm(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Instance norm: each image and channel by itself, over all its positions."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")
    x, mean, var, weight, bias, use, momentum, eps = bound(args, kwargs, names, None, None, None, None, True, 0.1, 1e-5)
    if not use:
        return frozen(x, mean, var, weight, bias, eps)
    dims = tuple(range(2, x.ndim))
    count = prod(x.shape[d] for d in dims)
    if count == 1:
        raise ValueError(f"Expected more than 1 spatial element when training, got input size {tuple(x.shape)}")
    affine = channelwise(weight, x.ndim), channelwise(bias, x.ndim)
    local, found, square, _ = normalize(
        x, x.local, *affine, dims, x.placement.axes_of(dims), eps, result_dtype(func, x.local, weight)
    )
    if mean is not None or var is not None:
        with torch.no_grad():
            axes = x.placement.axes_of((0,))
            moments = torch.stack([found.flatten(1), square.flatten(1) / (count - 1)]).sum(1)
            total = stack(moments, x.mesh.peers(axes), x.mesh.rank, x.mesh.transport, "running statistics").sum(0)
            update(mean, total[0] / x.shape[0], momentum)
            update(var, total[1] / x.shape[0], momentum)
    return ShardedTensor(local, x.placement)


@register("reduction", "group_norm")
def group_norm(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Group norm: groups of channels of each image, over all positions."""
    x, groups, weight, bias, eps = bound(
        args, kwargs, ("input", "num_groups", "weight", "bias", "eps"), None, None, 1e-5
    )
    channels = x.shape[1]
    if channels % groups:
        raise RuntimeError(f"group_norm: {channels} channels are not a multiple of {groups} groups")
    split = x.local.unflatten(1, (groups, channels // groups))
    affine = [
        None if p is None else p.view(1, groups, channels // groups, *(1,) * (x.ndim - 2)) for p in (weight, bias)
    ]
    axes = x.placement.axes_of(range(2, x.ndim))
    dims = tuple(range(2, split.ndim))
    local, *_ = normalize(x, split, *affine, dims, axes, eps, result_dtype(func, x.local, weight))
    return ShardedTensor(local.flatten(1, 2), x.placement)


@register("reduction", "layer_norm")
def layer_norm(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Layer norm over the last dims, cut or not."""
    names = ("input", "normalized_shape", "weight", "bias", "eps")
    x, shape, weight, bias, eps = bound(args, kwargs, names, None, None, 1e-5)
    n = len(shape)
    if tuple(x.shape[x.ndim - n :]) != tuple(shape):
        raise RuntimeError(f"layer_norm: normalized_shape {tuple(shape)} is not the end of the shape {tuple(x.shape)}")
    dims = tuple(range(x.ndim - n, x.ndim))
    axes = x.placement.axes_of(dims)
    if not axes:
        return ShardedTensor(func(x.local, shape, weight, bias, eps), x.placement)
    slices = tuple(slice(i.start, i.stop) for i in x.box[x.ndim - n :])
    affine = [None if p is None else p[slices] for p in (weight, bias)]
    local, *_ = normalize(x, x.local, *affine, dims, axes, eps, result_dtype(func, x.local, weight))
    return ShardedTensor(local, x.placement)
