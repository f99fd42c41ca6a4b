"""Pooling: maximum, average and adaptive, with every argument of their signatures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mural.errors import UnsupportedOp
from mural.geometry import Interval, Window
from mural.shard.borders import Kernel, pooled
from mural.shard.ops.conv import each
from mural.shard.ops.reduce import same_value
from mural.shard.ops.views import bound
from mural.shard.rules import Place, Windowed, in_plain_type, pad_border, windowed
from mural.shard.table import name_of, register
from mural.shard.tensor import ShardedTensor, merged, stacked

MAX: dict[int, Callable[..., Tensor]] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


def pooled_extent(extent: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    """The output's extent; with ceil_mode, a last window that would start behind the image is dropped.

    >>> pooled_extent(10, 3, 2, 1, 1, False), pooled_extent(10, 3, 2, 0, 1, True)
    (5, 5)
    """
    room = extent + 2 * padding - dilation * (kernel - 1) - 1
    out = -(-room // stride) + 1 if ceil_mode else room // stride + 1
    return out - 1 if ceil_mode and (out - 1) * stride >= extent + padding else out


def pool_windows(
    extents: Sequence[int], kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> tuple[Window, ...]:
    """The windows of a pool."""
    n = len(extents)
    kernels, pads, dilations = each(kernel, n), each(padding, n), each(dilation, n)
    strides = kernels if stride is None or (not isinstance(stride, int) and len(stride) == 0) else each(stride, n)
    for k, p in zip(kernels, pads, strict=True):
        if p < 0 or 2 * p > k:
            raise RuntimeError(f"pooling: padding {p} must be at least 0 and at most half of the kernel {k}")
    windows = tuple(
        Window.conv(e, k, s, p, d, pooled_extent(e, k, s, p, d, ceil_mode))
        for e, k, s, p, d in zip(extents, kernels, strides, pads, dilations, strict=True)
    )
    if any(w.out_extent < 1 for w in windows):
        raise RuntimeError(f"pooling with kernel {kernels} has no output on an image of extents {tuple(extents)}")
    return windows


def max_pool_rule(
    extents: Sequence[int],
    kernel: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Windowed:
    """The rule of max-pooling: the border is −∞."""
    n = len(extents)
    windows = pool_windows(extents, kernel, stride, padding, dilation, ceil_mode)
    kernels, dilations = each(kernel, n), each(dilation, n)
    strides = tuple(w.num for w in windows)

    def run(piece: Tensor, places: tuple[Place, ...]) -> Tensor:
        lowest = float("-inf") if piece.dtype.is_floating_point else torch.iinfo(piece.dtype).min
        return MAX[n](pad_border(piece, places, lowest), kernels, strides, 0, dilations)

    return Windowed(f"max_pool{n}d", windows, run)


def avg_pool_rule(
    extents: Sequence[int],
    kernel: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Windowed:
    """The rule of average pooling: sums over windows with zeros at the border, over torch's divisors."""
    n = len(extents)
    if divisor_override == 0:
        raise RuntimeError("divisor_override must not be zero")
    windows = pool_windows(extents, kernel, stride, padding, 1, ceil_mode)
    kernels, pads = each(kernel, n), each(padding, n)
    if n == 3 and any(e + 2 * p < k for e, p, k in zip(extents, pads, kernels, strict=True)):
        raise RuntimeError(f"avg_pool3d: the kernel {kernels} is larger than the padded image {tuple(extents)}")
    strides = tuple(w.num for w in windows)

    def counts(place: Place, pad: int) -> list[int]:
        found: list[int] = []
        for o in range(*place.out):
            span = place.reads.span(Interval(o, o + 1)) if isinstance(place.reads, Window) else place.out
            limit = Interval(-pad, place.reads.extent + pad) if count_include_pad else Interval(0, place.reads.extent)
            found.append((span & limit).size)
        return found

    def run(piece: Tensor, places: tuple[Place, ...]) -> Tensor:
        padded = pad_border(piece, places, 0.0)
        divisors = [counts(place, pad) for place, pad in zip(places, pads, strict=True)]
        uniform = all(len(set(c)) == 1 for c in divisors)
        divisor = divisor_override or (prod(c[0] for c in divisors) if uniform else 1)
        y = sum_pool(padded, kernels, strides, divisor)
        if divisor_override is None and not uniform:
            for dim, c in enumerate(divisors, y.ndim - n):
                y = y / torch.tensor(c, dtype=y.dtype, device=y.device).view(-1, *(1,) * (y.ndim - 1 - dim))
        return y

    return Windowed(f"avg_pool{n}d", windows, run)


def kernel_of(
    dims: int, name: str, widest: tuple[int, ...], arguments: Callable[[tuple[int, ...]], tuple[Any, ...]]
) -> Kernel:
    """The kernel that torch has for a pool, and its backward; one dim runs as a row of two."""
    n = max(2, dims)
    forward = getattr(torch.ops.aten, name.format(n=n))
    backward = getattr(torch.ops.aten, f"{name.format(n=n)}_backward")

    def widened(x: Tensor) -> Tensor:
        return x.unsqueeze(-2) if dims == 1 else x

    def padded(padding: tuple[int, ...]) -> tuple[Any, ...]:
        return arguments((0, *padding) if dims == 1 else padding)

    def run(x: Tensor, padding: tuple[int, ...]) -> tuple[Tensor, ...]:
        found = forward(widened(x), *padded(padding))
        found = found if isinstance(found, tuple) else (found,)
        return (found[0].squeeze(-2) if dims == 1 else found[0], *found[1:])

    def run_backward(grad: Tensor, x: Tensor, padding: tuple[int, ...], kept: tuple[Tensor, ...]) -> Tensor:
        found = backward(widened(grad), widened(x), *padded(padding), *kept)
        return found.squeeze(-2) if dims == 1 else found

    return Kernel(run, run_backward, widest)


def row(values: tuple[int, ...]) -> tuple[int, ...]:
    """Arguments of one dim as those of two."""
    return (1, *values) if len(values) == 1 else values


def sum_pool(x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], divisor: int) -> Tensor:
    """Sums over windows, divided by one number."""
    if len(kernel) == 1:
        return F.avg_pool2d(x.unsqueeze(-2), (1, *kernel), (1, *stride), divisor_override=divisor).squeeze(-2)
    pool = F.avg_pool2d if len(kernel) == 2 else F.avg_pool3d
    return pool(x, kernel, stride, divisor_override=divisor)


@register("windowed", "max_pool1d", "max_pool2d", "max_pool3d")
def max_pool(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Max-pooling."""
    names = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
    x, *rest, indices = bound(args, kwargs, names, None, 0, 1, False, False)
    n = int(name_of(func)[-2])
    if indices:
        raise UnsupportedOp("max_pool with return_indices=True; see src/mural/shard/ops/pool.py")
    rule = max_pool_rule(tuple(x.shape[x.ndim - n :]), *rest)
    kernel, strides, dilation = (
        each(rest[0], n),
        tuple(w.num for w in rule.dims if isinstance(w, Window)),
        each(rest[3], n),
    )
    fast = kernel_of(
        n, "max_pool{n}d_with_indices", tuple(k // 2 for k in kernel),
        lambda padding: (row(kernel), row(strides), padding, row(dilation), False),
    )  # fmt: skip
    return by_borders(in_plain_type(x, lambda small: func(small, 1)), rule, fast)


def by_borders(x: ShardedTensor, rule: Windowed, kernel: Kernel) -> ShardedTensor:
    """A pool by interior and borders where that applies, else on the attached window."""
    with torch.autocast(x.device.type, enabled=False):
        return found if (found := pooled(x, rule, kernel)) is not None else windowed(x, rule)


@register("windowed", "avg_pool1d", "avg_pool2d", "avg_pool3d")
def avg_pool(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Average pooling."""
    names = (
        "input",
        "kernel_size",
        "stride",
        "padding",
        "ceil_mode",
        "count_include_pad",
        "divisor_override",
    )
    x, *rest = bound(args, kwargs, names, None, 0, False, True, None)
    n = int(name_of(func)[-2])
    rule = avg_pool_rule(tuple(x.shape[x.ndim - n :]), *rest)
    kernel, strides = each(rest[0], n), tuple(w.num for w in rule.dims if isinstance(w, Window))
    fast = kernel_of(
        n, "avg_pool{n}d", tuple(k // 2 for k in kernel),
        lambda padding: (row(kernel), row(strides), padding, False, rest[4], rest[5]),
    )  # fmt: skip
    return by_borders(in_plain_type(x, lambda small: func(small, 1)), rule, fast)


def adaptive_taps(window: Window, out: Interval) -> tuple[int, Tensor]:
    """The first position, and a matrix (outputs × positions from there) of averaging weights."""
    span = window.span(out)
    matrix = torch.zeros(out.size, span.size, dtype=torch.float64)
    for row, o in enumerate(range(*out)):
        part = window.span(Interval(o, o + 1))
        matrix[row, part.start - span.start : part.stop - span.start] = 1.0 / part.size
    return span.start, matrix


def contract(x: Tensor, matrix: Tensor, dim: int) -> Tensor:
    """The weighted sums along one dim."""
    weights = matrix.to(x.dtype).to(x.device)
    with torch.autocast(x.device.type, enabled=False):
        return torch.movedim(torch.movedim(x, dim, -1) @ weights.T, -1, dim)


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
    """The maximum of each window, the first position of each winning ties as in torch."""
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
    """Adaptive pooling; to one position per channel it is a reduction and moves no image."""
    names = ("input", "output_size", "return_indices")
    x, size, indices = bound(args, kwargs, names, False)
    name = name_of(func)
    n, largest = int(name[-2]), "max" in name
    if indices:
        raise UnsupportedOp(f"{name} with return_indices=True; see src/mural/shard/ops/pool.py")
    extents = tuple(x.shape[x.ndim - n :])
    wanted = (size,) * n if isinstance(size, int) or size is None else tuple(size) * (n if len(tuple(size)) == 1 else 1)
    sizes = tuple(e if s is None else int(s) for e, s in zip(extents, wanted, strict=True))
    return adaptive(in_plain_type(x, lambda small: func(small, (3,) * n)), sizes, largest)


def adaptive(x: ShardedTensor, sizes: tuple[int, ...], largest: bool) -> ShardedTensor:
    """Adaptive pooling of the last dims to these sizes."""
    n = len(sizes)
    lead = x.ndim - n
    dims = tuple(range(lead, x.ndim))
    if largest:
        return global_max(x, dims) if prod(sizes) == 1 else windowed(x, adaptive_rule(x.shape[lead:], sizes, True))
    left = list(x.shape[lead:])
    for i, (dim, size) in enumerate(zip(dims, sizes, strict=True)):
        if size == 1 or (x.placement.cuts[dim] is not None and x.placement.cut_for(dim, size) is None):
            x, left[i] = averaged(x, dim, size), size
    return x if tuple(left) == sizes else windowed(x, adaptive_rule(left, sizes, False))


def averaged(x: ShardedTensor, dim: int, size: int) -> ShardedTensor:
    """Adaptive averages along one dim, few enough that every rank holds them: each adds its part of the sums."""
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
