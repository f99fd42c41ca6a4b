"""Batch, instance and group norm with the statistics of the whole image: which values share them, over which ranks."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mural.comm import stack
from mural.errors import PlanError, ShapeError, UnsupportedOp
from mural.shard.autocasting import is_autocast
from mural.shard.halo.fuse import mapped
from mural.shard.in_time import lowered, raised_again
from mural.shard.layout import Layout, recurring
from mural.shard.ops.call_arguments import bound
from mural.shard.ops.norm.cuda_kernels import Buffers, batch_norm_cuda
from mural.shard.ops.norm.normalized_rows import NormRows, normalize
from mural.shard.ops.norm.rank_statistics import batch_norm_by_rank, by_microbatch, by_rank, updates_again
from mural.shard.ops.norm.tile_norm import frozen_tile, normalize_tile
from mural.shard.relayout import gather
from mural.shard.table import register
from mural.shard.tensor import ShardedTensor


def check_affine(name: str, channels: int, eps: float, *parameters: Tensor | None) -> None:
    """Raise what torch would raise: its kernels do not check when called on rows."""
    for parameter in parameters:
        if parameter is not None and tuple(parameter.shape) != (channels,):
            raise ShapeError(f"{name}: a parameter of shape {tuple(parameter.shape)} for {channels} channels")
    if eps <= 0:
        raise ValueError(f"{name}: eps must be positive, not {eps}")


def update(running: Tensor | None, value: Tensor, momentum: float) -> None:
    """Update a running buffer with the batch's value."""
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
    rest = (mean, var), (weight, bias), momentum, eps
    if x.mesh.now is None:
        return of_batch(func, x, *rest)
    if not by_microbatch():
        raise PlanError(
            "batch_norm normalises in training, and micro-batches would each be normalised alone, which is another "
            'result than that of the whole batch: set batchnorm = "micro" to have that ("micro-rank": on each rank '
            "alone), or microbatches = 1"
        )
    piece: Any = lowered(x)
    return raised_again(of_batch(func, piece, *rest), x)


@recurring
def axes_but_channels(layout: Layout) -> tuple[str, ...]:
    """The mesh axes that cut batch and image."""
    return layout.axes_of(d for d in range(layout.ndim) if d != 1)


def of_batch(
    func: Callable[..., Any], x: ShardedTensor, running: Buffers, affine: Buffers, momentum: float, eps: float
) -> ShardedTensor:
    """A batch, or a micro-batch that counts as one, normalised with its own statistics."""
    (mean, var), (weight, bias) = running, affine
    count = prod(x.shape) // max(1, x.shape[1])
    if count == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
    if by_rank():
        return batch_norm_by_rank(x, running, affine, momentum, eps)
    axes = axes_but_channels(x.placement)
    if not axes and not x.mesh.tiled and x.local.numel():
        return ShardedTensor(func(x.local, mean, var, weight, bias, True, momentum, eps), x.placement)
    rows = NormRows(x.local.shape[0], x.shape[1], x.shape[1], count, per_image=False)
    if x.mesh.tiled:

        def learn(statistics: Tensor) -> None:
            update(mean, statistics[0], momentum)
            update(var, statistics[1] * (count / (count - 1)), momentum)

        return normalize_tile(x, rows, affine, axes, eps, learn)
    if x.local.is_cuda:
        fast = batch_norm_cuda(x, weight, bias, running, axes, momentum, eps)
        if fast is not None:
            return fast

    def learn_moments(moments: Tensor) -> None:
        update(mean, moments[1], momentum)
        update(var, moments[2] / (count - 1), momentum)

    local, _ = normalize(x, rows, weight, bias, axes, eps, learn_moments)
    return ShardedTensor(local, x.placement)


def frozen(
    x: ShardedTensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> ShardedTensor:
    """Batch norm with given statistics, which is local."""
    if x.mesh.tiled and not x.local.is_cpu:  # what has no memory is counted as a GPU would
        return frozen_tile(x, mean, var, (weight, bias), eps)
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
    rows = NormRows(x.local.shape[0], x.shape[1], x.shape[1], count, per_image=True)
    if x.mesh.tiled:
        if mean is not None or var is not None:
            raise UnsupportedOp("instance_norm with running statistics, of tiles: leave track_running_stats off")
        return normalize_tile(x, rows, (weight, bias), x.placement.axes_of(dims), eps)
    if mean is not None and updates_again():
        raise UnsupportedOp(
            "instance_norm with running statistics, computed again by a checkpoint: torch updates them twice or "
            "once, by what the checkpoint needs after it. Leave it out of the checkpoint, or track_running_stats off"
        )
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
    rows = NormRows(x.local.shape[0], x.shape[1], groups, count, per_image=True)
    if x.mesh.tiled:
        return normalize_tile(x, rows, (weight, bias), x.placement.axes_of(range(2, x.ndim)), eps)
    local, _ = normalize(x, rows, weight, bias, x.placement.axes_of(range(2, x.ndim)), eps)
    return ShardedTensor(local, x.placement)


_DTYPES: dict[Any, torch.dtype] = {}


def result_dtype(func: Callable[..., Any], x: Tensor, weight: Tensor | None) -> torch.dtype:
    """The type of torch's own norm (group, layer, root mean square) under the current autocast: determined once."""
    kind = x.device.type
    key = (func, x.dtype, None if weight is None else weight.dtype, kind, is_autocast(x.device))
    if key not in _DTYPES:
        small = x.new_zeros(1, 1, 2)
        with torch.no_grad():
            if func is F.layer_norm:
                affine = None if weight is None else weight.new_ones(2)
                _DTYPES[key] = F.layer_norm(small, (2,), affine, affine).dtype
            elif func in (F.rms_norm, torch.rms_norm):
                _DTYPES[key] = F.rms_norm(small, (2,), None if weight is None else weight.new_ones(2)).dtype
            else:
                affine = None if weight is None else weight.new_ones(1)
                _DTYPES[key] = F.group_norm(small, 1, affine, affine).dtype
    return _DTYPES[key]
