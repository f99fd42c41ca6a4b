"""Normalized rows: the statistics of a piece's rows, merged stably over the ranks, and the rows normalized with them.

A norm works on *rows*: a row is a channel (batch norm), or a channel of one image (instance and group norm), and
a *group* of rows shares its statistics. Each rank computes the mean and the squared deviation of its positions of every
row; these are merged by counts, never as E[x²] − E[x]². One autograd node does the rest with torch's own kernels, and
saves what torch saves: the input and the statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mural.comm import mark, stack
from mural.comm.exchange import first_order
from mural.ranks import Mesh
from mural.shard.autocasting import without_autocast
from mural.shard.ops.norm.channel_kernels import fast, operations
from mural.shard.ops.norm.cuda_kernels import total_of
from mural.shard.tensor import ShardedTensor

CHUNK = 2**22
"""How many values a temporary in the backward of a norm has at a time."""


@dataclass(frozen=True)
class NormRows:
    """How a norm views a tensor of N images and C channels."""

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
    if fast(x):
        return merge_moments(operations.channel_moments(x))
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


Learn = Callable[[Tensor], None] | None
"""Takes the moments of all groups, to update running buffers with them."""


class _Normalize(torch.autograd.Function):
    """The normalized rows, and the moments of every group over all ranks of `peers`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, rows: NormRows, eps: float, mesh: Mesh,
        peers: tuple[int, ...], learn: Learn,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        mine = row_moments(x)
        if rows.groups != rows.size:
            mine = merge_moments(torch.stack([rows.grouped(m) for m in mine]).permute(2, 0, 1))
        whole = merge_moments(stack(mine, peers, mesh.rank, mesh.transport, "norm statistics"))
        if learn is not None:
            learn(whole)  # a checkpoint that computes this again may stop where the tensors below are saved
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
        rows: NormRows = ctx.rows

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
        return of_x, *parameters, *(None,) * 5


Saved = tuple[Tensor, Tensor, Tensor, float]
Merge = Callable[[Tensor], Tensor] | None
"""Adds up sums over the ranks; None if x needs no gradient."""


def cuda_gradients(
    grad: Tensor, x: Tensor, scale: Tensor | None, saved: Saved, rows: NormRows, merge: Merge
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients of x, and of weight and bias per row, by torch's kernels for statistics over ranks."""
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
    grad: Tensor, x: Tensor, scale: Tensor | None, saved: Saved, rows: NormRows, merge: Merge
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
    x: ShardedTensor, rows: NormRows, weight: Tensor | None, bias: Tensor | None, axes: tuple[str, ...], eps: float,
    learn: Learn = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The normalized piece and the moments of all groups."""
    given = rows.view(x.local), weight, bias, rows, eps, x.mesh, x.mesh.peers(axes), learn
    with without_autocast(x.device):
        y, moments = _Normalize.apply(*given)  # type: ignore[misc]
    mark()
    return y if y.shape == x.local.shape else y.view(x.local.shape), moments
