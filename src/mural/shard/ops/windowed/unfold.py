"""Patches: an image as columns of its windows (`unfold`), the sum of columns into an image (`fold`), sliding views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from mural.errors import UnsupportedOp
from mural.geometry import Window
from mural.shard.folds.reshape import reshaped
from mural.shard.ops.call_arguments import bound, dim_of
from mural.shard.ops.windowed.conv import crop_or_pad, each
from mural.shard.relayout import pull
from mural.shard.rules import Place, Windowed, is_identity, pad_border, wants_of, windowed
from mural.shard.table import name_of, register, register_folded
from mural.shard.tensor import ShardedTensor


def unfold_rule(extents: Sequence[int], kernel: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> Windowed:
    """The rule of patches: every output holds its window's pixels as channels, before positions are flattened."""
    kernels, steps, pads, strides = each(kernel, 2), each(dilation, 2), each(padding, 2), each(stride, 2)
    if min(*kernels, *steps, *strides) < 1 or min(pads) < 0:
        raise RuntimeError(f"unfold: kernel {kernels}, dilation {steps} and stride {strides} must be at least 1")
    windows = tuple(
        Window.conv(e, k, s, p, d) for e, k, s, p, d in zip(extents, kernels, strides, pads, steps, strict=True)
    )
    if any(w.out_extent < 1 for w in windows):
        raise RuntimeError(f"unfold with kernel {kernels} and dilation {steps} has no output on extents {extents}")

    def run(piece: Tensor, places: tuple[Place, ...]) -> Tensor:
        columns = F.unfold(pad_border(piece, places, 0.0), kernels, steps, 0, strides)
        return columns.unflatten(-1, [p.out.size for p in places])

    return Windowed("unfold", windows, run)


def fold_rule(
    extents: Sequence[int], outs: Sequence[int], kernel: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1
) -> Windowed:
    """The rule of patches summed into an image of extents `outs`: the adjoint of `unfold_rule`."""
    kernels, steps, pads, strides = each(kernel, 2), each(dilation, 2), each(padding, 2), each(stride, 2)
    reach = tuple(d * (k - 1) + 1 for d, k in zip(steps, kernels, strict=True))
    rest = [
        o + 2 * p - r - (e - 1) * s for o, p, r, e, s in zip(outs, pads, reach, extents, strides, strict=True)
    ]  # what the last window leaves of the padded image
    windows = tuple(
        Window.transposed(e, k, s, p, m, d)
        for e, k, s, p, m, d in zip(extents, kernels, strides, pads, rest, steps, strict=True)
    )

    def run(piece: Tensor, places: tuple[Place, ...]) -> Tensor:
        if any(place.have[0].size == 0 for place in places):  # no window reaches these outputs
            shape = (*piece.shape[:-3], piece.shape[-3] // (kernels[0] * kernels[1]), *(p.out.size for p in places))
            return piece.new_zeros(shape) + 0 * piece.sum()
        counts = [place.have[0].size for place in places]
        whole = tuple((n - 1) * s + r for n, s, r in zip(counts, strides, reach, strict=True))
        y = F.fold(piece.flatten(-2), whole, kernels, steps, 0, strides)
        amounts: list[int] = []
        for place, s, p, extent in zip(places, strides, pads, whole, strict=True):
            first = place.have[0].start * s - p
            amounts = [first - place.out.start, place.out.stop - first - extent, *amounts]
        return crop_or_pad(y, amounts)

    return Windowed("fold", windows, run)


@register("windowed", "unfold", "im2col")
def unfold(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """`F.unfold`, whose columns stay where their windows are; `Tensor.unfold` along any dim."""
    if func is Tensor.unfold:
        x, dim, size, step = bound(args, kwargs, ("input", "dimension", "size", "step"))
        return sliding(x, dim_of(dim, x.ndim, "unfold"), size, step)
    x, *rest = bound(args, kwargs, ("input", "kernel_size", "dilation", "padding", "stride"), 1, 0, 1)
    if x.ndim not in (3, 4):
        raise RuntimeError(f"unfold takes images of 3 or 4 dims, not a tensor of shape {tuple(x.shape)}")
    check_channels(x, x.ndim - 3, "unfold")
    columns = windowed(x, unfold_rule(tuple(x.shape[-2:]), *rest))
    shape = tuple(columns.shape)
    return reshaped(columns, (*shape[:-2], shape[-2] * shape[-1]), "unfold")


def check_channels(x: ShardedTensor, dim: int, name: str) -> None:
    """Raise if channels are cut: they would have to be merged with a window's pixels."""
    if x.placement.is_cut(dim):
        raise UnsupportedOp(f"{name} of a tensor of shape {tuple(x.shape)} whose channels (dim {dim}) are cut")


@register_folded("fold", "col2im")
@register("windowed", "fold", "col2im")
def fold(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """`F.fold`: each pixel is the sum of the columns whose windows contain it."""
    names = ("input", "output_size", "kernel_size", "dilation", "padding", "stride")
    x, size, kernel, dilation, padding, stride = bound(args, kwargs, names, 1, 0, 1)
    outs, kernels = each(size, 2), each(kernel, 2)
    probe = unfold_rule(outs, kernel, dilation, padding, stride)  # refuses what torch refuses
    counts = tuple(w.out_extent for w in probe.dims)
    channels, columns = tuple(x.shape)[-2:]
    if x.ndim not in (2, 3) or columns != counts[0] * counts[1] or channels % (kernels[0] * kernels[1]):
        raise RuntimeError(
            f"fold: a tensor of shape {tuple(x.shape)} must have a multiple of {kernels[0] * kernels[1]} channels and "
            f"{counts[0]} · {counts[1]} = {counts[0] * counts[1]} columns for an image of extents {outs}"
        )
    blocks = reshaped(x, (*tuple(x.shape)[:-1], *counts), "fold", fold=False)
    check_channels(blocks, blocks.ndim - 3, name_of(func))
    return windowed(blocks, fold_rule(counts, outs, kernel, dilation, padding, stride))


def sliding(x: ShardedTensor, dim: int, size: int, step: int) -> ShardedTensor:
    """Windows of a size along one dim, every `step` positions, in a new last dim."""
    extent = x.shape[dim]
    if not 0 <= size <= extent or step < 1:
        raise RuntimeError(f"unfold: windows of {size} every {step} positions of dim {dim}, which has {extent}")
    window = Window(extent, (extent - size) // step + 1, num=step, hi=size)
    reads = (window, *(Window(n, n) for n in x.shape[dim + 1 :]))
    target = x.placement if is_identity(window) else x.placement.resized({dim: window.out_extent})
    out = target.box[dim]
    piece = pull(x, wants_of(x.placement, target, reads), "unfold")
    if out.size:
        local = piece.unfold(dim, size, step)
    else:
        empty = [0 if d == dim else n for d, n in enumerate(piece.shape)]
        local = piece.new_zeros((*empty, size))
        local = local + piece.sum() * 0 if piece.is_floating_point() else local
    place = target.pick([*range(x.ndim), None], (*target.shape, size))
    return ShardedTensor(local, place, "unfold" if x.placement.is_cut(dim) else x.aliased)
