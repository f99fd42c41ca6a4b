"""Batch norm over ranks by torch's own CUDA kernels for it: a handful of launches instead of dozens.

They merge means and inverse deviations by counts, as stably as `merge_moments` does, and update the running buffers in
the same launch.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from mural.comm import mark
from mural.comm.exchange import first_order, rows_of
from mural.ranks import Mesh
from mural.shard.layout import Layout
from mural.shard.tensor import ShardedTensor

Buffers = tuple[Tensor | None, Tensor | None]


@lru_cache(maxsize=4096)
def shares(layout: Layout, axes: tuple[str, ...]) -> tuple[int, ...] | None:
    """How many values of a channel each rank along the axes has; None if any has none."""
    boxes = [layout.box_at(layout.mesh.coordinates_of(rank)) for rank in layout.mesh.peers(axes)]
    counts = tuple(prod(i.size for d, i in enumerate(box) if d != 1) for box in boxes)
    return counts if all(counts) else None


@lru_cache(maxsize=1024)
def counts_of(counts: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Counts on a device."""
    return torch.tensor(counts, dtype=dtype, device=device)


@lru_cache(maxsize=256)
def total_of(count: int, device: torch.device) -> Tensor:
    """A count on a device, as 32-bit parts that the kernel adds up."""
    limit = 2**30
    return torch.tensor([limit] * (count // limit) + [count % limit], dtype=torch.int32, device=device)


class _BatchNorm(torch.autograd.Function):
    """Batch norm with the statistics of all ranks of `peers`, which have `counts` values of a channel each."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, buffers: Buffers, momentum: float, eps: float,
        mesh: Mesh, peers: tuple[int, ...], counts: tuple[int, ...],
    ) -> Tensor:  # fmt: skip
        mine = torch.stack(torch.batch_norm_stats(x, eps))
        every = torch.stack(rows_of(mine, peers, mesh.rank, mesh.transport, "norm statistics"), 1)
        shared = counts_of(counts, mine.dtype, x.device)
        mean, rstd = torch.batch_norm_gather_stats_with_counts(x, every[0], every[1], *buffers, momentum, eps, shared)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.mesh, ctx.peers, ctx.count = mesh, peers, sum(counts)
        return torch.batch_norm_elemt(x, weight, bias, mean, rstd, eps)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        need_x, *parameters = ctx.needs_input_grad[:3]
        same = grad if grad.stride() == x.stride() else torch.empty_like(x).copy_(grad)
        one, hat, of_weight, of_bias = torch.batch_norm_backward_reduce(same, x, mean, rstd, weight, True, *parameters)
        of_x = None
        if need_x:
            name = "norm statistics backward"
            first, *others = rows_of(torch.stack((one, hat)), ctx.peers, ctx.mesh.rank, ctx.mesh.transport, name)
            total = sum(others, first)  # in one order on all ranks
            counts = total_of(ctx.count, x.device)
            of_x = torch.batch_norm_backward_elemt(same, x, mean, rstd, weight, total[0], total[1], counts)
        return of_x, of_weight if parameters[0] else None, of_bias if parameters[1] else None, *(None,) * 6


def batch_norm_cuda(
    x: ShardedTensor,
    weight: Tensor | None,
    bias: Tensor | None,
    buffers: Buffers,
    axes: tuple[str, ...],
    momentum: float,
    eps: float,
) -> ShardedTensor | None:
    """Batch norm in training on a GPU; None if a rank has no values, which the kernels do not support."""
    counts = shares(x.placement, axes)
    if counts is None:
        return None
    local: Tensor = _BatchNorm.apply(  # type: ignore[assignment]
        x.local, weight, bias, buffers, momentum, eps, x.mesh, x.mesh.peers(axes), counts
    )
    mark()
    return ShardedTensor(local, x.placement)
