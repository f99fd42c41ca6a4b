"""Convolution and transposed convolution with every argument of their signatures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mural.errors import ShapeError, UnsupportedOp
from mural.geometry import Window
from mural.shard.autocasting import is_autocast
from mural.shard.halo.conv_strips import ConvArguments, strip_conv, strips
from mural.shard.halo.fuse import through
from mural.shard.layout import Layout, recurring
from mural.shard.ops.call_arguments import bound
from mural.shard.ops.windowed.few_outputs import pointwise
from mural.shard.parts import cut_out
from mural.shard.relayout import gather
from mural.shard.rules import Place, Windowed, is_identity, of_whole_images, output_layout, windowed, windowed_tile
from mural.shard.table import name_of, register
from mural.shard.tensor import ShardedTensor

CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
CONVS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED_CONVS: dict[int, Callable[..., Tensor]] = {
    1: F.conv_transpose1d,
    2: F.conv_transpose2d,
    3: F.conv_transpose3d,
}


def each(value: Any, dims: int) -> tuple[int, ...]:
    """One number per spatial dim.

    >>> each(2, 3), each((1, 2), 2), each([4], 2)
    ((2, 2, 2), (1, 2), (4, 4))
    """
    if isinstance(value, int):
        return (value,) * dims
    values = tuple(int(v) for v in value)
    return values * dims if len(values) == 1 else values


@dataclass(frozen=True)
class ConvWindows:
    """A convolution's windows, and its arguments with one number per dim."""

    windows: tuple[Window, ...]
    arguments: ConvArguments


@lru_cache(maxsize=4096)
def conv_windows(
    extents: tuple[int, ...], kernel: tuple[int, ...], stride: Any, padding: Any, dilation: Any, groups: int
) -> ConvWindows:
    """The windows of a convolution of an image with these extents."""
    n = len(extents)
    strides, dilations = each(stride, n), each(dilation, n)
    if min(*strides, *dilations) < 1:
        raise RuntimeError(f"stride {strides} and dilation {dilations} must be at least 1")
    if isinstance(padding, str):
        if padding not in ("same", "valid"):
            raise ValueError(f"padding={padding!r}: use a number, 'same' or 'valid'")
        if padding == "same" and any(s != 1 for s in strides):
            raise RuntimeError(f"padding='same' needs stride 1, not {strides}")
        reach = tuple(d * (k - 1) for d, k in zip(dilations, kernel, strict=True))
        pads = tuple(r // 2 if padding == "same" else 0 for r in reach)
        outs: tuple[int | None, ...] = extents if padding == "same" else (None,) * n
    else:
        pads, outs = each(padding, n), (None,) * n
    windows = tuple(
        Window.conv(e, k, s, p, d, out)
        for e, k, s, p, d, out in zip(extents, kernel, strides, pads, dilations, outs, strict=True)
    )
    for window, e, k in zip(windows, extents, kernel, strict=True):
        if window.out_extent < 1:
            raise RuntimeError(f"a convolution with kernel {k} has no output on an image of extent {e} {extents}")
    return ConvWindows(windows, ConvArguments(strides, dilations, groups))


def frozen(value: Any) -> Any:
    """An argument as a cache key: lists become tuples."""
    return tuple(value) if isinstance(value, list) else value


def conv_rule(
    extents: tuple[int, ...],
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Windowed:
    """The rule of a convolution of an image with these extents: windows, and the valid run."""
    kernel = tuple(weight.shape[2:])
    found = conv_windows(extents, kernel, frozen(stride), frozen(padding), frozen(dilation), groups)
    return rule_of_windows(found, weight, bias)


def rule_of_windows(found: ConvWindows, weight: Tensor, bias: Tensor | None) -> Windowed:
    """The rule of a convolution with those windows."""
    n, arguments = len(found.windows), found.arguments
    is_pointwise = arguments.groups == 1 and {*weight.shape[2:], *arguments.stride} == {1}

    def run(piece: Tensor, places: tuple[Place, ...]) -> Tensor:
        borders = [place.border for place in places]
        both = tuple(min(border) for border in borders)
        extra = [m for border, b in zip(borders[::-1], both[::-1], strict=True) for m in (border[0] - b, border[1] - b)]
        if any(extra):
            piece = F.pad(piece, extra)
        if is_pointwise and not any(both):
            return pointwise(CONVS[n], piece, weight, bias)
        return CONVS[n](piece, weight, bias, arguments.stride, both, arguments.dilation, arguments.groups)

    return Windowed(f"conv{n}d", found.windows, run)


@recurring
def whole_output(
    layout: Layout, weight: torch.Size, bias: torch.Size | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> Layout | None:
    """The layout of a convolution's output if ranks have whole images before and after it: torch's own is exact.

    None where they have not, this rank has no image, or torch would raise.
    """
    channel = layout.ndim - len(weight) + 1
    dims = range(channel + 1, layout.ndim)
    if channel not in (0, 1) or layout.shape[channel] != weight[1] * groups or weight[0] % groups:
        return None
    if 0 in layout.local_shape or any(layout.is_cut(d) for d in (channel, *dims)):
        return None
    if bias not in (None, weight[:1]) or negative(padding):
        return None
    found = conv_windows(layout.shape[dims.start :], tuple(weight[2:]), stride, padding, dilation, groups)
    target = layout.resized({d: w.out_extent for d, w in zip(dims, found.windows, strict=True) if not is_identity(w)})
    if any(target.is_cut(d) for d in dims):
        return None
    return target.uncut_resized((*target.local_shape[:channel], weight[0], *target.local_shape[dims.start :]))


def check_plain(x: Any, weight: Tensor, bias: Tensor | None, n: int) -> None:
    """Raise unless the image is sharded, and weight and bias are not; the weight of `n` spatial dims has two more."""
    if not isinstance(x, ShardedTensor) or isinstance(weight, ShardedTensor) or isinstance(bias, ShardedTensor):
        raise UnsupportedOp(
            "a convolution whose weight or bias is computed from the image has no rule: scale its input or its output"
        )
    if weight.ndim != n + 2:
        raise RuntimeError(
            f"a convolution of {n} spatial dims takes a weight of {n + 2} dims, not one of shape {tuple(weight.shape)}"
        )


def whole_channels(x: ShardedTensor, dims: int) -> ShardedTensor:
    """The tensor with its channels whole on every rank, if a permutation has cut them."""
    channel = x.ndim - dims - 1
    return gather(x, (channel,), "convolution") if channel >= 0 and x.placement.is_cut(channel) else x


def negative(padding: Any) -> bool:
    """Whether a padding, or one of several, is below zero."""
    return not isinstance(padding, str) and min((padding,) if isinstance(padding, int) else padding) < 0


def check_parameters(
    x: ShardedTensor, weight: Tensor, bias: Tensor | None, channels: int, outputs: int, amounts: Any
) -> None:
    """Raise what torch would raise, before anything is sent: a kernel that raises later would leave messages open."""
    n = weight.ndim - 2
    if x.ndim not in (n + 1, n + 2) or x.shape[-n - 1] != channels:
        raise ShapeError(
            f"a convolution with a weight of shape {tuple(weight.shape)} takes {channels} channels and {n} spatial "
            f"dims, but its input has the shape {tuple(x.shape)}"
        )
    if bias is not None and tuple(bias.shape) != (outputs,):
        raise RuntimeError(f"the bias has shape {tuple(bias.shape)}, but the convolution has {outputs} outputs")
    if negative(amounts):
        raise RuntimeError(f"negative padding {amounts} is not supported")
    for name, given in (("weight", weight), ("bias", bias)):
        if given is not None and given.dtype != x.dtype and not is_autocast(x.device):
            raise RuntimeError(f"input is {x.dtype} and {name} {given.dtype}: they should be the same")


@register("windowed", "conv1d", "conv2d", "conv3d")
def conv(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """A convolution: by halo strips if they apply, otherwise on the attached window."""
    x, weight, bias, stride, padding, dilation, groups = bound(args, kwargs, CONV, None, 1, 0, 1, 1)
    n, given = int(name_of(func)[-2]), (frozen(stride), frozen(padding), frozen(dilation), groups)
    check_plain(x, weight, bias, n)
    # A tile has a layout of its own, so nothing that is remembered for layouts would be found again.
    whole = (
        None if x.mesh.tiled else whole_output(x.placement, weight.shape, None if bias is None else bias.shape, *given)
    )
    if whole is not None:
        return ShardedTensor(func(x.local, weight, bias, stride, padding, dilation, groups), whole)
    x = whole_channels(x, n)
    if weight.shape[0] % groups:
        raise RuntimeError(f"{weight.shape[0]} output channels are not a multiple of {groups} groups")
    check_parameters(x, weight, bias, weight.shape[1] * groups, weight.shape[0], padding)
    found = conv_windows(x.placement.shape[x.ndim - n :], tuple(weight.shape[2:]), *given)
    rule = rule_of_windows(found, weight, bias)
    if x.mesh.tiled:
        return windowed_tile(x, rule)
    target = output_layout(x.placement, rule.dims)

    def usual() -> ShardedTensor:
        if x.ndim == weight.ndim:
            plan = strips(x.placement, target, found.windows)
            if plan is not None:
                return strip_conv(x, weight, bias, plan, target, found.arguments)
        return windowed(x, rule)

    return through(x, rule, usual, weight, 2.0 * weight.numel())


@lru_cache(maxsize=4096)
def transposed_windows(
    extents: tuple[int, ...], kernel: tuple[int, ...], strides: tuple[int, ...], pads: tuple[int, ...],
    more: tuple[int, ...], dilations: tuple[int, ...],
) -> tuple[Window, ...]:  # fmt: skip
    """The windows of a transposed convolution; `more` is the padding of its output."""
    if any(m >= max(s, d) for m, s, d in zip(more, strides, dilations, strict=True)):
        raise RuntimeError(f"output_padding {more} must be smaller than stride {strides} or dilation {dilations}")
    windows = tuple(
        Window.transposed(e, k, s, p, o, d)
        for e, k, s, p, o, d in zip(extents, kernel, strides, pads, more, dilations, strict=True)
    )
    if any(w.out_extent < 1 for w in windows):
        raise RuntimeError(f"a transposed convolution with padding {pads} has no output on extents {extents}")
    return windows


def transposed_rule(
    extents: tuple[int, ...],
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Windowed:
    """The rule of a transposed convolution of an image with these extents."""
    n, kernel = len(extents), tuple(weight.shape[2:])
    strides, pads, dilations = each(stride, n), each(padding, n), each(dilation, n)
    windows = transposed_windows(extents, kernel, strides, pads, each(output_padding, n), dilations)

    def run(piece: Tensor, places: tuple[Place, ...]) -> Tensor:
        if any(place.have[0].size == 0 for place in places):
            return unreached(piece, places)
        y = TRANSPOSED_CONVS[n](piece, weight, None, strides, 0, 0, groups, dilations)
        amounts: list[int] = []
        for place, s, p, k, d in zip(places, strides, pads, kernel, dilations, strict=True):
            first = place.have[0].start * s - p
            last = (place.have[0].stop - 1) * s - p + d * (k - 1) + 1
            amounts = [first - place.out.start, place.out.stop - last, *amounts]
        return biased(crop_or_pad(y, amounts))

    def biased(y: Tensor) -> Tensor:
        return y if bias is None else y + bias.to(y.dtype).view(-1, *(1,) * n)

    def unreached(piece: Tensor, places: tuple[Place, ...]) -> Tensor:
        """Outputs that no input reaches: the bias, connected to piece and weight."""
        channels = weight.shape[1] * groups
        shape = (*piece.shape[: piece.ndim - n - 1], channels, *(place.out.size for place in places))
        return biased(piece.new_zeros(shape) + 0 * (piece.sum() + weight.sum()))

    return Windowed(f"conv_transpose{n}d", windows, run)


def crop_or_pad(y: Tensor, amounts: list[int]) -> Tensor:
    """`F.pad` with zeros; a pure crop is a view."""
    if any(a > 0 for a in amounts):
        return F.pad(y, amounts)
    part = [slice(0, n) for n in y.shape]
    for i in range(0, len(amounts), 2):
        dim = y.ndim - 1 - i // 2
        part[dim] = slice(-amounts[i], y.shape[dim] + amounts[i + 1])
    return cut_out(y, tuple(part))


@register("windowed", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def conv_transpose(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """A transposed convolution."""
    x, weight, *rest = bound(args, kwargs, TRANSPOSED, None, 1, 0, 0, 1, 1)
    n = int(name_of(func)[-2])
    bias, _, padding, more, groups, _ = rest
    check_plain(x, weight, bias, n)
    x = whole_channels(x, n)
    check_parameters(x, weight, bias, weight.shape[0], weight.shape[1] * groups, (*each(padding, n), *each(more, n)))
    rule = transposed_rule(tuple(x.shape[x.ndim - n :]), weight, *rest)
    whole = of_whole_images(x, rule, lambda piece: func(piece, weight, *rest))
    return through(x, rule, None, weight, 2.0 * weight.numel() / prod(each(rest[1], n))) if whole is None else whole
