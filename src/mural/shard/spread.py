"""This rank's piece of a plain tensor that it holds whole: the tensor's gradient comes from all ranks' pieces."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mural.comm import mark
from mural.geometry import Box, slices
from mural.shard.gradient_scale import true_gradient
from mural.shard.layout import Layout
from mural.shard.relayout import gather
from mural.shard.tensor import ShardedTensor


class _Piece(torch.autograd.Function):
    """A copy of the part at a box; backward gathers the true gradient of the whole, the same on every rank."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, layout: Layout, dims: tuple[int, ...], part: tuple[slice, ...]) -> Tensor:
        ctx.layout, ctx.dims = layout, dims
        return tensor[part].clone(memory_format=torch.preserve_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        layout: Layout = ctx.layout
        piece = ShardedTensor(true_gradient(grad, layout), layout)
        return gather(piece, ctx.dims, "gradient of an input").local.contiguous(), None, None, None


def part_of_whole(tensor: Tensor, layout: Layout, box: Box, own: bool = False) -> Tensor:
    """A copy of the part at a box, which is this rank's piece; its images may be its `own`, whole on no other rank."""
    part = slices(box)
    if not (tensor.requires_grad and torch.is_grad_enabled()) or layout.mesh.world == 1:
        return tensor[part].clone(memory_format=torch.preserve_format)
    held = layout.cut_dims[1:] if own and layout.is_cut(0) else layout.cut_dims  # on all ranks, also one that has all
    piece: Tensor = _Piece.apply(tensor, layout, held, part)  # type: ignore[assignment]
    mark()
    return piece
