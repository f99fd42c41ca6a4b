"""Batch, instance and group norm with the statistics of the whole image, merged stably over the ranks.

A norm works on *rows*: a row is a channel (batch norm), or a channel of one image (instance and group norm), and
a *group* of rows shares its statistics. Each rank computes mean and squared deviation of its positions of every
row; those are merged by counts, never as E[x²] − E[x]². One autograd node does the rest with torch's own kernels,
and saves what torch saves: the input and the statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mural.comm import Mesh, mark, stack
from mural.comm.exchange import first_order
from mural.shard.fuse import mapped
from mural.shard.ops.arguments import bound
from mural.shard.ops.norm_cuda import batch_norm_cuda, total_of
from mural.shard.ops.norm_rank import batch_norm_by_rank, by_rank
from mural.shard.table import register
from mural.shard.tensor import ShardedTensor, gather

CHUNK = 2**22
"""How many values of a temporary the backward of a norm makes at a time."""


@dataclass(frozen=True)
class Rows:
    """How a norm sees a tensor of N images and C channels."""

    images: int
    channels: int
    groups: int
    count: int
    """How many values of the whole image (or batch) share their statistics."""
    per_image: bool

    @property
    def size(self) -> int:
        """The number of rows here."""
        return self.images * self.channels if self.per_image else self.channels

    def view(self, x: Tensor) -> Tensor:
        """The tensor with its rows as dim 1."""
        return x.reshape(1, self.size, *x.shape[2:]) if self.per_image and self.images != 1 else x

    def grouped(self, rows: Tensor) -> Tensor:
        """Values per row as (groups, rows of the group)."""
        return rows.view(-1, self.channels // self.groups) if self.per_image else rows.view(-1, 1)

    def spread(self, groups: Tensor) -> Tensor:
        """Values per group as values per row."""
        return groups.repeat_interleave(self.channels // self.groups) if self.per_image else groups

    def repeated(self, parameter: Tensor | None) -> Tensor | None:
        """A parameter per channel as values per row."""
        return parameter.repeat(self.images) if parameter is not None and self.per_image else parameter

    def channel_sum(self, rows: Tensor) -> Tensor:
        """Values per row, added up per channel."""
        return rows.view(self.images, self.channels).sum(0) if self.per_image else rows


def row_moments(x: Tensor) -> Tensor:
    """Count, mean and sum of squared deviations of each row (dim 1), stacked."""
    rows = x.shape[1]
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    if x.numel() == 0:
        return x.new_zeros(3, rows, dtype=wide)
    count = x.numel() // rows
    mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
    return torch.stack([torch.full_like(mean, count), mean, variance * count]).to(wide)


def merge_moments(parts: Tensor) -> Tensor:
    """The moments of everything from those of parts: (parts, 3, …) to (3, …)."""
    if len(parts) == 1:
        return parts[0]
    counts, means, squares = parts[:, 0], parts[:, 1], parts[:, 2]
    count = counts.sum(0)
    filled = count.clamp(min=1)
    mean = means[:1] + ((means - means[:1]) * counts).sum(0, keepdim=True) / filled
    square = (squares + counts * (means - mean).square()).sum(0)
    return torch.stack([count, mean[0], square])


class _Normalize(torch.autograd.Function):
    """The normalized rows, and the moments of every group over all ranks of `peers`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, rows: Rows, eps: float, mesh: Mesh,
        peers: tuple[int, ...],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        mine = row_moments(x)
        if rows.groups != rows.size:
            mine = merge_moments(torch.stack([rows.grouped(m) for m in mine]).permute(2, 0, 1))
        whole = merge_moments(stack(mine, peers, mesh.rank, mesh.transport, "norm statistics"))
        mean, variance = rows.spread(whole[1]), rows.spread(whole[2] / rows.count)
        affine = rows.repeated(weight), rows.repeated(bias)
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.rows, ctx.eps, ctx.mesh, ctx.peers = rows, eps, mesh, peers
        ctx.mark_non_differentiable(whole)
        y = (
            torch.native_batch_norm(x, *affine, mean, variance, False, 0.0, eps)[0]
            if x.numel()
            else torch.empty_like(x)
        )
        return y, whole

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance = ctx.saved_tensors
        rows: Rows = ctx.rows

        def over_ranks(sums: Tensor) -> Tensor:
            return stack(sums, ctx.peers, ctx.mesh.rank, ctx.mesh.transport, "norm statistics backward").sum(0)

        scale, needed = rows.repeated(weight), ctx.needs_input_grad[0]
        saved = mean, variance, torch.rsqrt(variance + ctx.eps), ctx.eps
        fused = x.is_cuda and rows.groups == rows.channels and x.numel() > 0
        kernels = cuda_gradients if fused else general_gradients
        of_x, *of_rows = kernels(grad, x, scale, saved, rows, over_ranks if needed else None)
        parameters = [
            rows.channel_sum(g).to(weight.dtype) if weight is not None and wanted else None
            for g, wanted in zip(of_rows, ctx.needs_input_grad[1:3], strict=True)
        ]
        return of_x, *parameters, None, None, None, None


Saved = tuple[Tensor, Tensor, Tensor, float]
Merge = Callable[[Tensor], Tensor] | None
"""Adds up sums over the ranks; None where x needs no gradient."""


def cuda_gradients(
    grad: Tensor, x: Tensor, scale: Tensor | None, saved: Saved, rows: Rows, merge: Merge
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients of x, and of weight and bias per row, by the kernels that torch has for statistics over ranks."""
    mean, _, rstd, _ = saved
    plain = torch.ones_like(mean) if scale is None else scale.to(mean.dtype)
    sums = torch.batch_norm_backward_reduce(grad, x, mean, rstd, plain, True, True, True)
    if merge is None:
        return None, sums[2], sums[3]
    total = merge(torch.stack(sums[:2]))
    counts = total_of(rows.count, x.device)
    of_x = torch.batch_norm_backward_elemt(grad, x, mean, rstd, plain, total[0], total[1], counts)
    return of_x, sums[2], sums[3]


def general_gradients(
    grad: Tensor, x: Tensor, scale: Tensor | None, saved: Saved, rows: Rows, merge: Merge
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients of x, and of weight and bias per row, on any device."""
    mean, variance, rstd, eps = saved
    of_x, of_weight, of_bias = row_gradients(grad, x, scale, mean, variance, eps)
    if merge is None:
        return None, of_weight, of_bias
    sums = torch.stack([of_bias, of_weight])
    groups = torch.stack([rows.grouped(s).sum(1) for s in (sums if scale is None else sums * scale)])
    project(of_x, x, mean, rstd, [rows.spread(t / rows.count) for t in merge(groups)])
    return of_x, of_weight, of_bias


def row_gradients(
    grad: Tensor, x: Tensor, scale: Tensor | None, mean: Tensor, variance: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """With the statistics held fixed: gradients of x, and per row Σ grad·x̂ and Σ grad."""
    if x.numel() == 0:
        return torch.zeros_like(x), torch.zeros_like(mean), torch.zeros_like(mean)
    ones = torch.ones_like(mean) if scale is None else scale
    same = grad if grad.stride() == x.stride() else torch.empty_like(x).copy_(grad)
    saved = mean, torch.rsqrt(variance + eps)
    return torch.ops.aten.native_batch_norm_backward(same, x, ones, mean, variance, *saved, False, eps, [True] * 3)


def project(gx: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, shares: list[Tensor]) -> None:
    """Subtract from a gradient its projections on 1 and on x̂, since the statistics depend on x; in place, by chunks."""
    if x.numel() == 0:
        return
    shape = (1, -1, *(1,) * (x.ndim - 2))
    step = max(1, CHUNK // max(1, x.numel() // x.shape[1]))
    for first in range(0, x.shape[1], step):
        part = slice(first, first + step)
        m, r, one, hat = (v[part].view(shape) for v in (mean, rstd, shares[0], shares[1]))
        gx[:, part] -= (((x[:, part] - m) * (hat * r)) + one).mul_(r).to(gx.dtype)


def normalize(
    x: ShardedTensor, rows: Rows, weight: Tensor | None, bias: Tensor | None, axes: tuple[str, ...], eps: float
) -> tuple[Tensor, Tensor]:
    """The normalized piece and the moments of all groups."""
    with torch.autocast(x.device.type, enabled=False):
        y, moments = _Normalize.apply(rows.view(x.local), weight, bias, rows, eps, x.mesh, x.mesh.peers(axes))  # type: ignore[misc]
    mark()
    return y if y.shape == x.local.shape else y.view(x.local.shape), moments


def check_affine(name: str, channels: int, eps: float, *parameters: Tensor | None) -> None:
    """Raise what torch would raise: its kernels, called on rows, do not look."""
    for parameter in parameters:
        if parameter is not None and tuple(parameter.shape) != (channels,):
            raise RuntimeError(f"{name}: a parameter of shape {tuple(parameter.shape)} for {channels} channels")
    if eps <= 0:
        raise ValueError(f"{name}: eps must be positive, not {eps}")


def update(running: Tensor | None, value: Tensor, momentum: float) -> None:
    """Move a running buffer towards the batch's value."""
    if running is not None:
        running.mul_(1 - momentum).add_(value.detach().to(running.dtype), alpha=momentum)


@register("reduction", "batch_norm")
def batch_norm(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Batch norm over the whole batch and image, running buffers equal on every rank; or rank by rank, on request."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    x, mean, var, weight, bias, training, momentum, eps = bound(args, kwargs, names, None, None, False, 0.1, 1e-5)
    check_affine("batch_norm", x.shape[1], eps, mean, var, weight, bias)
    x = gather(x, (1,), "batch_norm")
    if (mean is None) != (var is None):
        raise ValueError("batch_norm: running_mean and running_var must either both be None or neither be None")
    if not training:
        return frozen(x, mean, var, weight, bias, eps)
    count = prod(x.shape) // max(1, x.shape[1])
    if count == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
    if by_rank():
        return batch_norm_by_rank(x, (mean, var), (weight, bias), momentum, eps)
    axes = x.placement.axes_of(d for d in range(x.ndim) if d != 1)
    if not axes and x.local.numel():
        return ShardedTensor(func(x.local, mean, var, weight, bias, True, momentum, eps), x.placement)
    if x.local.is_cuda:
        fast = batch_norm_cuda(x, weight, bias, (mean, var), axes, momentum, eps)
        if fast is not None:
            return fast
    rows = Rows(x.local.shape[0], x.shape[1], x.shape[1], count, per_image=False)
    local, moments = normalize(x, rows, weight, bias, axes, eps)
    with torch.no_grad():
        update(mean, moments[1], momentum)
        update(var, moments[2] / (count - 1), momentum)
    return ShardedTensor(local, x.placement)


def frozen(
    x: ShardedTensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> ShardedTensor:
    """Batch norm with given statistics, which is local."""
    if x.carrier.numel() == 0:
        anchor = sum((p.sum() for p in (weight, bias) if p is not None), torch.zeros((), device=x.device))
        return ShardedTensor(x.local + (0 * anchor).to(x.dtype), x.placement)
    return mapped(x, lambda piece: F.batch_norm(piece, mean, var, weight, bias, False, 0.0, eps))


@register("reduction", "instance_norm")
def instance_norm(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Instance norm: each image and channel by itself, over all its positions."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")
    x, mean, var, weight, bias, use, momentum, eps = bound(args, kwargs, names, None, None, None, None, True, 0.1, 1e-5)
    check_affine("instance_norm", x.shape[1], eps, mean, var, weight, bias)
    x = gather(x, (1,), "instance_norm")
    if not use:
        return frozen(x, mean, var, weight, bias, eps)
    dims = tuple(range(2, x.ndim))
    count = prod(x.shape[d] for d in dims)
    if count == 1:
        raise ValueError(f"Expected more than 1 spatial element when training, got input size {tuple(x.shape)}")
    if not x.placement.axes_of((0, *dims)) and x.local.numel():
        return ShardedTensor(func(x.local, mean, var, weight, bias, True, momentum, eps), x.placement)
    rows = Rows(x.local.shape[0], x.shape[1], x.shape[1], count, per_image=True)
    local, moments = normalize(x, rows, weight, bias, x.placement.axes_of(dims), eps)
    if mean is not None or var is not None:
        with torch.no_grad():
            values = torch.stack([rows.channel_sum(moments[1]), rows.channel_sum(moments[2]) / (count - 1)])
            peers = x.mesh.peers(x.placement.axes_of((0,)))
            total = stack(values, peers, x.mesh.rank, x.mesh.transport, "running statistics").sum(0)
            update(mean, total[0] / x.shape[0], momentum)
            update(var, total[1] / x.shape[0], momentum)
    return ShardedTensor(local, x.placement)


@register("reduction", "group_norm")
def group_norm(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Group norm: groups of channels of each image, over all positions."""
    x, groups, weight, bias, eps = bound(
        args, kwargs, ("input", "num_groups", "weight", "bias", "eps"), None, None, 1e-5
    )
    if x.shape[1] % groups:
        raise RuntimeError(f"group_norm: {x.shape[1]} channels are not a multiple of {groups} groups")
    check_affine("group_norm", x.shape[1], eps, weight, bias)
    x = gather(x, (1,), "group_norm")
    if not x.placement.axes_of(range(2, x.ndim)) and x.local.numel():
        return ShardedTensor(func(x.local, groups, weight, bias, eps), x.placement)
    wide = result_dtype(func, x.local, weight)
    x = ShardedTensor(x.local.to(wide), x.placement)  # where autocast normalizes in float32
    count = prod(x.shape[1:]) // groups
    rows = Rows(x.local.shape[0], x.shape[1], groups, count, per_image=True)
    local, _ = normalize(x, rows, weight, bias, x.placement.axes_of(range(2, x.ndim)), eps)
    return ShardedTensor(local, x.placement)


_DTYPES: dict[Any, torch.dtype] = {}


def result_dtype(func: Callable[..., Any], x: Tensor, weight: Tensor | None) -> torch.dtype:
    """The type of torch's own group or layer norm, with autocast as it is now: asked of torch, once."""
    kind = x.device.type
    key = (func, x.dtype, None if weight is None else weight.dtype, kind, torch.is_autocast_enabled(kind))
    if key not in _DTYPES:
        small = x.new_zeros(1, 1, 2)
        with torch.no_grad():
            if func is F.layer_norm:
                affine = None if weight is None else weight.new_ones(2)
                _DTYPES[key] = F.layer_norm(small, (2,), affine, affine).dtype
            else:
                affine = None if weight is None else weight.new_ones(1)
                _DTYPES[key] = F.group_norm(small, 1, affine, affine).dtype
    return _DTYPES[key]
