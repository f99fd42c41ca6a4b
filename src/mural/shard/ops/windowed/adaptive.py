"""Adaptive pooling to any size; to few positions it is a reduction that moves no image data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mural.errors import UnsupportedOp
from mural.geometry import Interval, Window
from mural.shard.autocasting import in_plain_type, without_autocast
from mural.shard.ops.call_arguments import bound
from mural.shard.ops.reduce.extremes import same_value
from mural.shard.ops.windowed.pool import MAX, sum_pool
from mural.shard.relayout import merged, stacked
from mural.shard.rules import Place, Windowed, of_whole_images, windowed
from mural.shard.table import name_of, register
from mural.shard.tensor import ShardedTensor


def adaptive_taps(window: Window, out: Interval) -> tuple[int, Tensor]:
    """The first position, and a matrix (outputs × positions from there) of averaging weights."""
    span = window.span(out)
    matrix = torch.zeros(out.size, span.size, dtype=torch.float64)
    for row, o in enumerate(range(*out)):
        part = window.span(Interval(o, o + 1))
        matrix[row, part.start - span.start : part.stop - span.start] = 1.0 / part.size
    return span.start, matrix


def contract(x: Tensor, matrix: Tensor, dim: int) -> Tensor:
    """The weighted sums along one dim, each over its window alone: what is not a number there stays out of others."""
    used = matrix != 0
    counts, starts = used.sum(1, keepdim=True), (used.cumsum(1) == 0).sum(1, keepdim=True)
    reach = torch.arange(int(counts.max()))
    index, inside = (starts + reach).clamp(max=max(0, matrix.shape[1] - 1)), reach < counts
    weights = matrix.gather(1, index).where(inside, 0.0).to(x.dtype).to(x.device)
    with without_autocast(x.device):
        windows = torch.movedim(x.index_select(dim, index.flatten().to(x.device)), dim, -1).unflatten(-1, index.shape)
        return torch.movedim((windows.where(inside.to(x.device), 0.0) * weights).sum(-1), -1, dim)


def adaptive_rule(extents: Sequence[int], sizes: Sequence[int], largest: bool) -> Windowed:
    """The rule of adaptive pooling to these sizes."""
    n = len(extents)
    windows = tuple(Window.adaptive(e, o) for e, o in zip(extents, sizes, strict=True))

    def run(piece: Tensor, places: tuple[Place, ...]) -> Tensor:
        if all(w.num % w.den == 0 for w in windows):
            kernel = tuple(w.num // w.den for w in windows)
            return MAX[n](piece, kernel, kernel) if largest else sum_pool(piece, kernel, kernel, prod(kernel))
        if largest:
            return max_boxes(piece, windows, places)
        for dim, (place, window) in enumerate(zip(places, windows, strict=True), piece.ndim - n):
            if window.num != window.den:
                piece = contract(piece, adaptive_taps(window, place.out)[1], dim)
        return piece

    return Windowed(f"adaptive_{'max' if largest else 'avg'}_pool{n}d", windows, run)


def max_boxes(piece: Tensor, windows: tuple[Window, ...], places: tuple[Place, ...]) -> Tensor:
    """The maximum of each window; the first position wins ties, as in torch."""
    spans = [w.span(p.out) for w, p in zip(windows, places, strict=True)]
    cells = [
        [w.span(Interval(o, o + 1)).shift(-span.start) for o in range(*p.out)]
        for w, p, span in zip(windows, places, spans, strict=True)
    ]

    def level(x: Tensor, depth: int) -> Tensor:
        if depth == len(cells):
            return x.flatten(piece.ndim - len(cells)).max(-1).values
        dim = piece.ndim - len(cells) + depth
        parts = [level(x.narrow(dim, c.start, c.size), depth + 1) for c in cells[depth]]
        return torch.stack(parts, piece.ndim - len(cells))

    return level(piece, 0)


ADAPTIVE = [f"adaptive_{kind}_pool{n}d" for kind in ("avg", "max") for n in (1, 2, 3)]


@register("windowed", *ADAPTIVE)
def adaptive_pool(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Adaptive pooling; to one position per channel it is a reduction that moves no image data."""
    names = ("input", "output_size", "return_indices")
    x, size, indices = bound(args, kwargs, names, False)
    name = name_of(func)
    n, largest = int(name[-2]), "max" in name
    if largest and (indices or func is not getattr(F, name)):  # the builtins under F return positions too
        return getattr(F, f"{name}_with_indices")(x, size)
    extents = tuple(x.shape[x.ndim - n :])
    wanted = (size,) * n if isinstance(size, int) or size is None else tuple(size) * (n if len(tuple(size)) == 1 else 1)
    sizes = tuple(e if s is None else int(s) for e, s in zip(extents, wanted, strict=True))
    if x.ndim not in (n + 1, n + 2) or min(sizes) < 1 or not x.is_floating_point():
        raise UnsupportedOp(f"{name} of {x.dtype} of shape {tuple(x.shape)} to {sizes}: it takes floats, to at least 1")
    rule = adaptive_rule(extents, sizes, largest)
    whole = None if x.mesh.tiled else of_whole_images(x, rule, lambda piece: func(piece, sizes))
    if whole is not None:
        return whole
    return adaptive(in_plain_type(x, lambda small: func(small, (3,) * n)), sizes, largest)


def adaptive(x: ShardedTensor, sizes: tuple[int, ...], largest: bool) -> ShardedTensor:
    """Adaptive pooling of the last dims to these sizes."""
    n = len(sizes)
    lead = x.ndim - n
    dims = tuple(range(lead, x.ndim))
    if largest:
        return global_max(x, dims) if prod(sizes) == 1 else windowed(x, adaptive_rule(x.shape[lead:], sizes, True))
    if prod(sizes) == 1:
        return x.mean(dims, keepdim=True)  # type: ignore[return-value]
    left = list(x.shape[lead:])
    for i, (dim, size) in enumerate(zip(dims, sizes, strict=True)):
        if size == 1 or (x.placement.is_cut(dim) and x.placement.cut_for(dim, size) is None):
            x, left[i] = averaged(x, dim, size), size
    return x if tuple(left) == sizes else windowed(x, adaptive_rule(left, sizes, False))


def averaged(x: ShardedTensor, dim: int, size: int) -> ShardedTensor:
    """Adaptive averages along one dim, few enough for every rank to hold them all: each adds its part of the sums."""
    if size == 1:
        return x.mean(dim, keepdim=True)  # type: ignore[return-value]
    own, window = x.box[dim], Window.adaptive(x.shape[dim], size)
    _, matrix = adaptive_taps(window, Interval(0, size))
    local = contract(x.local, matrix[:, own.start : own.stop], dim)
    axes = x.placement.axes_of((dim,))
    return ShardedTensor(merged(local, x.mesh, axes, "adaptive_avg_pool"), x.placement.with_cut(dim, None, size))


def global_max(x: ShardedTensor, dims: tuple[int, ...]) -> ShardedTensor:
    """The maximum over the last dims; of equal values the first in the order of the whole image gets the gradient."""
    layout, local, lead = x.placement, x.local, x.ndim - len(dims)
    flat = local.flatten(lead)
    if flat.shape[-1] == 0:
        values = flat.sum(-1) + float("-inf")
        index = torch.full(values.shape, torch.iinfo(torch.int64).max, device=x.device)
    else:
        values, within = flat.max(-1)
        index = torch.zeros_like(within)
        for d, coordinate in zip(dims, torch.unravel_index(within, local.shape[lead:]), strict=True):
            index = index * layout.shape[d] + coordinate + layout.box[d].start
    axes = layout.axes_of(dims)
    all_values, all_index = stacked(values, x.mesh, axes, "max"), stacked(index, x.mesh, axes, "max")
    best = all_values.detach().max(0, keepdim=True).values
    winner = (
        torch.where(same_value(all_values.detach(), best), all_index, torch.iinfo(torch.int64).max)
        .min(0, keepdim=True)
        .indices
    )
    result = all_values.gather(0, winner)[0].view(*local.shape[:lead], *(1,) * len(dims))
    place = layout.gathered(dims)
    for d in dims:
        place = place.with_cut(d, None, 1)
    return ShardedTensor(result, place)
