"""Grids of positions under an affine map, made where they are needed."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from mural.errors import LayoutError
from mural.geometry import Interval
from mural.ranks import SPATIAL
from mural.shard.layout import Layout
from mural.shard.ops.call_arguments import bound
from mural.shard.relayout import gather
from mural.shard.table import register
from mural.shard.tensor import ShardedTensor


@register("creation", "affine_grid", "affine_grid_generator")
def affine_grid(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """The grid of an affine map for each image: cut in the image's proportions, so that no rank holds it whole."""
    theta, size, align = bound(args, kwargs, ("theta", "size", "align_corners"), None)
    if not isinstance(theta, ShardedTensor):
        raise LayoutError("affine_grid: theta must be the sharded tensor")
    size = tuple(int(s) for s in size)
    n = len(size) - 2
    if n not in (2, 3) or tuple(theta.shape) != (size[0], n, n + 1) or min(size) < 1 or not theta.is_floating_point():
        raise ValueError(
            f"affine_grid: theta of shape {tuple(theta.shape)} and type {theta.dtype} does not fit an output of size "
            f"{size}: it takes floats (N, 2, 3) for (N, C, H, W), or (N, 3, 4) for (N, C, D, H, W)"
        )
    theta = gather(theta, (1, 2), "affine_grid")
    layout = theta.placement
    used = [layout.axes[0], *(SPATIAL[d] if d < layout.mesh.spatial_dims == n else None for d in range(n)), None]
    cuts = (layout.cuts[0], *(None,) * (n + 1))
    place = Layout(layout.mesh, (size[0], *size[2:], n), tuple(used), cuts, layout.images)
    place = place.resized({1 + d: extent for d, extent in enumerate(size[2:])})
    return ShardedTensor(affine_piece(theta.local, place, bool(align)), place)


def affine_piece(theta: Tensor, place: Layout, align: bool) -> Tensor:
    """This rank's positions, in torch's own steps: homogeneous coordinates times the matrix of each image."""
    n = theta.shape[1]
    count, *extents, _ = place.local_shape
    base = theta.new_ones((count, *extents, n + 1)).detach()
    for d in range(n):
        ramp = ramp_of(place.shape[1 + d], place.box[1 + d], align, theta)
        base[..., n - 1 - d] = ramp.view(-1, *(1,) * (n - 1 - d))
    return base.view(count, prod(extents), n + 1).bmm(theta.transpose(1, 2)).view(place.local_shape)


def ramp_of(extent: int, own: Interval, align: bool, like: Tensor) -> Tensor:
    """An interval of coordinates, in which −1 and 1 are the outer pixels' centres, or the image's edges."""
    if extent == 1:
        return like.new_zeros(own.size)
    ramp = torch.linspace(-1, 1, extent, dtype=like.dtype, device=like.device)
    ramp = ramp if align else ramp * (extent - 1) / extent
    return ramp[own.start : own.stop]
