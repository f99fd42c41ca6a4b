"""Pooling: maximum, average and power-average, with every argument of their signatures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import inf, prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mural.errors import UnsupportedOp
from mural.geometry import Interval, Reads, Window
from mural.shard.autocasting import in_plain_type, without_autocast
from mural.shard.halo.fuse import through
from mural.shard.halo.pool_borders import Kernel, pooled
from mural.shard.ops.call_arguments import bound
from mural.shard.ops.windowed.conv import each, frozen
from mural.shard.rules import Place, Windowed, of_whole_images, pad_border, windowed, windowed_tile
from mural.shard.table import name_of, register
from mural.shard.tensor import ShardedTensor

MAX: dict[int, Callable[..., Tensor]] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVG: dict[int, Callable[..., Tensor]] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def pooled_extent(extent: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    """The output's extent; with ceil_mode, a last window that would start beyond the image is dropped.

    >>> pooled_extent(10, 3, 2, 1, 1, False), pooled_extent(10, 3, 2, 0, 1, True)
    (5, 5)
    """
    room = extent + 2 * padding - dilation * (kernel - 1) - 1
    out = -(-room // stride) + 1 if ceil_mode else room // stride + 1
    return out - 1 if ceil_mode and (out - 1) * stride >= extent + padding else out


@lru_cache(maxsize=4096)
def pool_windows(
    extents: tuple[int, ...], kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
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
    windows = pool_windows(tuple(extents), frozen(kernel), frozen(stride), frozen(padding), frozen(dilation), ceil_mode)
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
    windows = pool_windows(tuple(extents), frozen(kernel), frozen(stride), frozen(padding), 1, ceil_mode)
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
    """The kernel of torch for a pool, and its backward; one dim runs as two."""
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
    """Arguments for one dim as arguments for two."""
    return (1, *values) if len(values) == 1 else values


def sum_pool(x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], divisor: int) -> Tensor:
    """Sums over windows, divided by one number."""
    if len(kernel) == 1:
        return F.avg_pool2d(x.unsqueeze(-2), (1, *kernel), (1, *stride), divisor_override=divisor).squeeze(-2)
    pool = F.avg_pool2d if len(kernel) == 2 else F.avg_pool3d
    return pool(x, kernel, stride, divisor_override=divisor)


def overhangs(window: Reads, padding: int) -> bool:
    """Whether the last window reaches beyond the padded image."""
    last = Interval(window.out_extent - 1, window.out_extent)
    return isinstance(window, Window) and window.span(last).stop > window.extent + padding


@register("windowed", "max_pool1d", "max_pool2d", "max_pool3d")
def max_pool(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Max-pooling."""
    names = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
    x, *rest, indices = bound(args, kwargs, names, None, 0, 1, False, False)
    n = int(name_of(func)[-2])
    if indices:
        return getattr(F, f"max_pool{n}d_with_indices")(x, *rest)
    rule = max_pool_rule(tuple(x.shape[x.ndim - n :]), *rest)
    if x.mesh.tiled:
        return windowed_tile(in_plain_type(x, lambda small: func(small, 1)), rule)
    if (whole := of_whole_images(x, rule, lambda piece: MAX[n](piece, *rest))) is not None:
        return whole
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
    """A pool by interior and borders if that applies, otherwise on the attached window."""

    def usual() -> ShardedTensor:
        return found if (found := pooled(x, rule, kernel)) is not None else windowed(x, rule)

    with without_autocast(x.device):
        return through(x, rule, usual, None, pool_work(x, rule))


def pool_work(x: ShardedTensor, rule: Windowed) -> float:
    """The floating-point operations of a pool for one output position."""
    reach = prod(w.hi - w.lo for w in rule.dims if isinstance(w, Window))
    return float(reach * x.shape[x.ndim - len(rule.dims) - 1])


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
    if not x.is_floating_point():
        raise UnsupportedOp(f"average pooling of {x.dtype}: convert it to a floating point type")
    rule = avg_pool_rule(tuple(x.shape[x.ndim - n :]), *rest)
    given = rest[:5] if n == 1 else rest  # one dim takes no divisor
    if (whole := of_whole_images(x, rule, lambda piece: AVG[n](piece, *given))) is not None:
        return whole
    kernel, strides = each(rest[0], n), tuple(w.num for w in rule.dims if isinstance(w, Window))
    if any(overhangs(w, p) for w, p in zip(rule.dims, each(rest[2], n), strict=True)):
        # ceil_mode: the kernel would count other positions than torch does
        return through(x, rule, None, None, pool_work(x, rule))
    fast = kernel_of(
        n, "avg_pool{n}d", tuple(k // 2 for k in kernel),
        lambda padding: (row(kernel), row(strides), padding, False, rest[4], rest[5]),
    )  # fmt: skip
    return by_borders(in_plain_type(x, lambda small: func(small, 1)), rule, fast)


AVERAGE: dict[int, Callable[..., Tensor]] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


@register("windowed", "lp_pool1d", "lp_pool2d", "lp_pool3d")
def lp_pool(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The p-norm of each window; each step is torch's, so signs and gradients at zero are too."""
    names = ("input", "norm_type", "kernel_size", "stride", "ceil_mode")
    x, p, kernel, stride, ceil = bound(args, kwargs, names, None, False)
    n = int(name_of(func)[-2])
    strides = [] if stride is None else stride
    if p in (inf, -inf):
        largest = MAX[n](x.abs() if p > 0 else -x.abs(), kernel, strides, 0, 1, ceil)
        return largest if p > 0 else -largest
    mean = AVERAGE[n](x.pow(p), kernel, strides, 0, ceil)
    return (torch.sign(mean) * F.relu(mean.abs())).mul(prod(each(kernel, n))).pow(1.0 / p)
