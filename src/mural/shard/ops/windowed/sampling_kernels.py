"""torch's sampling kernels on a piece of an image, at positions that are given in pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mural.comm.exchange import first_order

MODES = ("bilinear", "nearest", "bicubic")
PADDINGS = ("zeros", "border", "reflection")
"""In the order of torch's numbers for them."""


def normalised(positions: Sequence[Tensor], piece: Tensor) -> Tensor:
    """The grid whose points lie at these positions of the piece: the last dim first, −1 and 1 are the outer edges."""
    extents = piece.shape[2:]
    grid = [(2 * p + 1) / n - 1 for p, n in zip(positions, extents, strict=True)]
    return torch.stack(grid[::-1], -1).to(piece.dtype)


class _Sample(torch.autograd.Function):
    """A piece at positions. Positions between the same pixels have the same slope, so it is taken halfway.

    The slope jumps at a pixel, and positions at pixels are common (a grid that changes nothing). On the way
    through a grid of the piece a position moves by a rounding error, which must not move it across a pixel.
    """

    @staticmethod
    def forward(ctx: Any, piece: Tensor, mode: int, *positions: Tensor) -> Tensor:
        ctx.save_for_backward(piece, *positions)
        ctx.mode = mode
        kernel = torch.ops.aten.grid_sampler_2d if len(positions) == 2 else torch.ops.aten.grid_sampler_3d
        return kernel(piece, normalised(positions, piece), mode, 0, False)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        piece, *positions = ctx.saved_tensors
        n, mode = len(positions), MODES[ctx.mode]
        kernel = torch.ops.aten.grid_sampler_2d_backward if n == 2 else torch.ops.aten.grid_sampler_3d_backward

        def gradient(at: Sequence[Tensor], of_piece: bool) -> Tensor:
            mask = [of_piece, not of_piece]
            return kernel(grad, piece, normalised(at, piece), ctx.mode, 0, False, mask)[not of_piece]

        found: list[Tensor | None] = [gradient(positions, True) if ctx.needs_input_grad[0] else None, None]
        for d, position in enumerate(positions):
            if not ctx.needs_input_grad[2 + d]:
                found.append(None)
            elif mode == "nearest":
                found.append(torch.zeros_like(position))
            else:
                halfway = position if mode == "bicubic" else position.floor() + 0.5
                slope = gradient([*positions[:d], halfway, *positions[d + 1 :]], False)[..., n - 1 - d]
                found.append((slope * (2 / piece.shape[2 + d])).to(position.dtype))
        return tuple(found)


def sampled(piece: Tensor, positions: Sequence[Tensor], mode: str) -> Tensor:
    """A piece at positions, zeros outside it."""
    wide = piece.float() if piece.dtype in (torch.float16, torch.bfloat16) else piece
    result: Tensor = _Sample.apply(wide, MODES.index(mode), *positions)  # type: ignore[assignment]
    return result.to(piece.dtype)
