"""Sampling an image at positions that a grid gives: each rank fetches the window that its positions fall into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from mural.comm.exchange import first_order
from mural.errors import LayoutError
from mural.geometry import Cuts, slices
from mural.shard.autocasting import is_autocast
from mural.shard.layout import Layout
from mural.shard.ops.call_arguments import bound
from mural.shard.ops.windowed.data_windows import empty_piece, fetched, part_at
from mural.shard.ops.windowed.grid_positions import Lattice, positions_of
from mural.shard.table import name_of, register
from mural.shard.tensor import ShardedTensor

# -- torch's kernels, on a piece ---------------------------------------------------------------------------------------


MODES = ("bilinear", "nearest", "bicubic")
PADDINGS = ("zeros", "border", "reflection")
"""In the order of torch's numbering."""


def normalised(positions: Sequence[Tensor], piece: Tensor) -> Tensor:
    """The grid with points at these positions of the piece: the last dim first, −1 and 1 are the outer edges."""
    extents = piece.shape[2:]
    grid = [(2 * p + 1) / n - 1 for p, n in zip(positions, extents, strict=True)]
    return torch.stack(grid[::-1], -1).to(piece.dtype)


class _Sample(torch.autograd.Function):
    """A piece sampled at positions. Positions between the same pixels have the same slope, so it is taken halfway.

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


# -- the rule ----------------------------------------------------------------------------------------------------------


@register("windowed", "grid_sample", "grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def grid_sample(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """The image at the grid's positions, cut like the grid, or like the image if the grid is not cut."""
    name = name_of(func)
    if name == "grid_sample":
        names = ("input", "grid", "mode", "padding_mode", "align_corners")
        x, grid, mode, padding, align = bound(args, kwargs, names, "bilinear", "zeros", None)
        if mode not in MODES or padding not in PADDINGS:
            raise ValueError(f"grid_sample: mode {mode!r} must be of {MODES}, padding_mode {padding!r} of {PADDINGS}")
    else:  # the builtins below it
        names = ("input", "grid", "interpolation_mode", "padding_mode", "align_corners")
        x, grid, mode, padding, align = bound(args, kwargs, names)
        mode, padding = MODES[mode], PADDINGS[padding]
    check_arguments(x, grid, mode, name)
    if is_autocast(x.device):  # torch says in which type it samples then
        pixel = torch.zeros((1,) * x.ndim, dtype=x.dtype, device=x.device)
        point = torch.zeros((*(1,) * (x.ndim - 1), x.ndim - 2), dtype=grid.dtype, device=x.device)
        common = torch.grid_sampler(pixel, point, 0, 0, False).dtype
        x, grid = x.to(common), grid.to(common)
    if x.dtype != grid.dtype:
        raise RuntimeError(f"grid_sample: image and grid must have one type, not {x.dtype} and {grid.dtype}")
    return sample(x, grid, mode, padding, bool(align))


def check_arguments(x: Tensor, grid: Tensor, mode: str, name: str) -> None:
    """Raise what torch would raise, before anything is sent."""
    n = x.ndim - 2
    if n not in (2, 3) or grid.ndim != x.ndim or grid.shape[-1] != n or grid.shape[0] != x.shape[0]:
        raise RuntimeError(
            f"{name}: an image (N, C, H, W) or (N, C, D, H, W) needs a grid (N, …, 2) or (N, …, 3) of the same batch, "
            f"not {tuple(x.shape)} and {tuple(grid.shape)}"
        )
    if mode == "bicubic" and n != 2:
        raise RuntimeError("grid_sample: bicubic interpolation takes images (N, C, H, W)")
    if not prod(x.shape[1:]):
        raise RuntimeError(f"grid_sample of an empty image of shape {tuple(x.shape)}")


def sampled_layout(x: Tensor, grid: Tensor) -> Layout:
    """The layout of the samples: batch and channels of the image; positions of the grid, or the image's proportions."""
    n = x.ndim - 2
    shape = (*x.shape[:2], *grid.shape[1:-1])
    like = x if isinstance(x, ShardedTensor) else grid
    if not isinstance(like, ShardedTensor):
        raise LayoutError("grid_sample of plain tensors came to the rule for sharded ones")
    axes: list[str | None] = [None] * (n + 2)
    cuts: list[Cuts | None] = [None] * (n + 2)

    def take(source: Layout, dims: Sequence[tuple[int, int]]) -> None:
        for here, there in dims:
            if axes[here] is None and source.axes[there] not in axes:
                axes[here], cuts[here] = source.axes[there], source.cuts[there]

    if isinstance(x, ShardedTensor):
        take(x.placement, [(0, 0), (1, 1)])
    if isinstance(grid, ShardedTensor):
        take(grid.placement, [(0, 0)])
        if any(grid.placement.is_cut(d) for d in range(1, n + 1)):
            take(grid.placement, [(d + 1, d) for d in range(1, n + 1)])
    if isinstance(x, ShardedTensor):
        usual = x.placement.resized({d: shape[d] for d in range(2, n + 2)})
        take(usual, [(d, d) for d in range(2, n + 2)])
    return Layout(like.mesh, shape, tuple(axes), tuple(cuts), like.placement.images)


def sample(x: Tensor, grid: Tensor, mode: str, padding: str, align: bool) -> ShardedTensor:
    """The image at the grid's positions."""
    n = x.ndim - 2
    target = sampled_layout(x, grid)
    place = target.pick([0, *range(2, n + 2), None], (*grid.shape[:-1], n))
    points = part_at(grid, place, "grid_sample")
    lattices = [Lattice(extent, mode, padding, align, points.is_cuda or n == 2) for extent in x.shape[2:]]
    positions = [positions_of(lattice, points[..., n - 1 - d]) for d, lattice in enumerate(lattices)]
    windows = [lattice.window(p) for lattice, p in zip(lattices, positions, strict=True)]
    needs = [lattice.reads(w) for lattice, w in zip(lattices, windows, strict=True)]
    if isinstance(x, ShardedTensor):
        piece = fetched(x, (*target.box[:2], *needs), "grid_sample")
    else:
        piece = x[slices((*target.box[:2], *needs))]
    if not prod(target.local_shape):
        return ShardedTensor(empty_piece(target, piece, *positions), target)
    for dim, (lattice, window, need) in enumerate(zip(lattices, windows, needs, strict=True), 2):
        if window != need:  # the border repeats or mirrors the image
            index = torch.tensor([lattice.source(i) - need.start for i in range(*window)], device=piece.device)
            piece = piece.index_select(dim, index)
    local = [p - window.start for p, window in zip(positions, windows, strict=True)]
    return ShardedTensor(sampled(piece, local, mode), target)
