"""Norms of tiles: the statistics of all tiles are inputs of each, so a tile is normalized on its own.

y = (x − mean) · rstd · weight + bias        mean and variance: a leaf with a gradient of its own
∂mean = −Σ weight·rstd·∂y                    over the tile; the run adds up all tiles
∂variance = −½ Σ weight·rstd²·x̂·∂y
∂x += ∂mean / n + ∂variance · 2(x − mean) / n      later, for the tile's own part alone
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mural.comm.exchange import first_order
from mural.shard.autocasting import without_autocast
from mural.shard.ops.norm.channel_kernels import fast, operations
from mural.shard.ops.norm.normalized_rows import NormRows, merge_moments, row_gradients, row_moments
from mural.shard.parts import cut_out
from mural.shard.tensor import ShardedTensor
from mural.shard.tiles import current_run, inside

Learn = Callable[[Tensor], None] | None


@dataclass(frozen=True)
class OwnRows:
    """The rows of the own part of a tile."""

    values: Tensor
    rows: NormRows
    update: Learn

    def moments(self) -> Tensor:
        """Count, mean and sum of squared deviations of each group: (3, groups)."""
        with torch.no_grad():
            mine = row_moments(self.rows.view(self.values.detach()))
            if self.rows.groups == self.rows.size:
                return mine
            return merge_moments(torch.stack([self.rows.grouped(m) for m in mine]).permute(2, 0, 1))

    def merged(self, parts: Tensor) -> Tensor:
        """The moments of everything, from those of all tiles."""
        return merge_moments(parts)

    def gradient(self, adjoint: Tensor, statistics: Tensor) -> Tensor:
        """The gradient of the values: (x − mean) · 2∂variance / n + ∂mean / n, by torch's kernel for frozen norms."""
        x, rows = self.rows.view(self.values.detach()), self.rows
        mean, of_mean, of_variance = (rows.spread(t) for t in (statistics[0], *(adjoint / rows.count)))
        if x.numel() == 0:
            return torch.zeros_like(self.values)
        if fast(x):
            return operations.channel_affine(x, mean, 2 * of_variance, of_mean)
        ones = torch.full_like(mean, 0.5)
        found = torch.native_batch_norm(x, 2 * of_variance, of_mean, mean, ones, False, 0.0, 0.5)[0]
        return found.view(self.values.shape)

    def learn(self, statistics: Tensor) -> None:
        """Update running buffers."""
        if self.update is not None:
            self.update(statistics)

    def without_values(self) -> OwnRows:
        """The same, without the memory of the tile."""
        return replace(self, values=self.values.new_empty(0))


class _ApplyStatistics(torch.autograd.Function):
    """Rows normalized with given statistics (2, groups), which have a gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Tensor, rows: NormRows, eps: float
    ) -> Tensor:
        mean, variance = rows.spread(statistics[0]), rows.spread(statistics[1])
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.rows, ctx.eps, ctx.types = rows, eps, [None if t is None else t.dtype for t in (weight, bias)]
        if x.numel() == 0 or x.is_meta:
            return torch.empty_like(x)
        scale, shift = rows.repeated(weight), rows.repeated(bias)
        if not fast(x):
            return torch.native_batch_norm(x, scale, shift, mean, variance, False, 0.0, eps)[0]
        rstd = torch.rsqrt(variance + eps)
        factor = rstd if scale is None else rstd * scale
        return operations.channel_affine(
            x, mean, factor, torch.zeros_like(mean) if shift is None else shift.to(mean.dtype)
        )

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance = ctx.saved_tensors
        rows: NormRows = ctx.rows
        scale, rstd = rows.repeated(weight), torch.rsqrt(variance + ctx.eps)
        of_x, of_weight, of_bias = tile_gradients(grad, x, scale, mean, variance, ctx.eps)
        of_statistics = None
        if ctx.needs_input_grad[3]:
            scaled = [s if scale is None else s * scale for s in (of_bias, of_weight)]
            parts = -rstd * scaled[0], -0.5 * rstd.square() * scaled[1]
            of_statistics = torch.stack([rows.grouped(p).sum(1) for p in parts])
        affine = [
            rows.channel_sum(g).to(dtype) if wanted else None
            for g, dtype, wanted in zip((of_weight, of_bias), ctx.types, ctx.needs_input_grad[1:3], strict=True)
        ]
        return of_x if ctx.needs_input_grad[0] else None, *affine, of_statistics, None, None


def tile_gradients(
    grad: Tensor, x: Tensor, scale: Tensor | None, mean: Tensor, variance: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What `row_gradients` gives, by kernels that are faster on channels-last tensors."""
    if not x.numel() or (x.is_cpu and not fast(x)):
        return row_gradients(grad, x, scale, mean, variance, eps)
    same = grad if grad.stride() == x.stride() else torch.empty_like(x).copy_(grad)
    rstd = torch.rsqrt(variance + eps)
    plain = torch.ones_like(mean) if scale is None else scale.to(mean.dtype)
    if fast(x, same):
        of_x, (of_bias, with_x) = operations.channel_gradients(same, x, mean, plain * rstd)
        return of_x, with_x * rstd, of_bias
    _, _, of_weight, of_bias = torch.batch_norm_backward_reduce(same, x, mean, rstd, plain, True, True, True)
    zeros, ones = torch.zeros_like(mean), torch.ones_like(mean)
    return torch.batch_norm_elemt(same, plain * rstd, zeros, zeros, ones, eps), of_weight, of_bias


def frozen_tile(
    x: ShardedTensor, mean: Tensor, variance: Tensor, affine: tuple[Tensor | None, Tensor | None], eps: float
) -> ShardedTensor:
    """A tile normalized with statistics that do not depend on it."""
    rows = NormRows(x.local.shape[0], x.shape[1], x.shape[1], 1, per_image=False)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    with without_autocast(x.device):
        statistics = torch.stack([mean, variance]).to(wide)
        y: Tensor = _ApplyStatistics.apply(x.local, *affine, statistics, rows, eps)  # type: ignore[assignment]
    return ShardedTensor(y, x.placement)


def normalize_tile(
    x: ShardedTensor, rows: NormRows, affine: tuple[Tensor | None, Tensor | None], axes: tuple[str, ...], eps: float,
    update: Learn = None,
) -> ShardedTensor:  # fmt: skip
    """The normalized tile; its own part counts in the statistics of all tiles."""
    run, layout = current_run(), x.placement

    def own() -> OwnRows:
        return OwnRows(cut_out(x.local, inside(run.own(layout), layout, "a norm")), rows, update)

    with without_autocast(x.device):
        statistics = run.statistics(own, axes)
        y: Tensor = _ApplyStatistics.apply(rows.view(x.local), *affine, statistics, rows, eps)  # type: ignore[assignment]
    same = y.shape == x.local.shape  # a view could not be written in place as cheaply
    return ShardedTensor(y if same else y.view(x.local.shape), layout)
