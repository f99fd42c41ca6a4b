"""Sampling an image at positions that a grid gives: each rank fetches the window that its positions fall into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from mural.errors import LayoutError
from mural.geometry import Cuts
from mural.shard.layout import Layout
from mural.shard.ops.call_arguments import bound
from mural.shard.ops.windowed.data_windows import empty_piece, fetched, part_at
from mural.shard.ops.windowed.grid_positions import Lattice, positions_of
from mural.shard.ops.windowed.sampling_kernels import MODES, PADDINGS, sampled
from mural.shard.table import name_of, register
from mural.shard.tensor import ShardedTensor


@register("windowed", "grid_sample", "grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def grid_sample(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """The image at the grid's positions, cut like the grid, or like the image where the grid is not cut."""
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
    if torch.is_autocast_enabled(x.device.type):  # torch says in which type it samples then
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
        piece = x[tuple(slice(i.start, i.stop) for i in (*target.box[:2], *needs))]
    if not prod(target.local_shape):
        return ShardedTensor(empty_piece(target, piece, *positions), target)
    for dim, (lattice, window, need) in enumerate(zip(lattices, windows, needs, strict=True), 2):
        if window != need:  # the border repeats or mirrors the image
            index = torch.tensor([lattice.source(i) - need.start for i in range(*window)], device=piece.device)
            piece = piece.index_select(dim, index)
    local = [p - window.start for p, window in zip(positions, windows, strict=True)]
    return ShardedTensor(sampled(piece, local, mode), target)
