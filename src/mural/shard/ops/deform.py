"""Deformable convolution, torchvision's: each rank fetches the window that its offsets reach, and runs it there."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import floor, prod
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mural.errors import UnsupportedOp
from mural.geometry import Interval, Window
from mural.shard.layout import Layout
from mural.shard.ops.arguments import bound
from mural.shard.ops.reach import fetched, part_at
from mural.shard.table import KINDS, TABLE
from mural.shard.tensor import ShardedTensor

NAMES = (
    "input", "weight", "offset", "mask", "bias", "stride_h", "stride_w", "pad_h", "pad_w", "dil_h", "dil_w",
    "n_weight_grps", "n_offset_grps", "use_mask",
)  # fmt: skip


def deform_conv2d(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """A convolution whose window's pixels are moved by offsets, and weighted by a mask where one is given."""
    x, weight, offset, mask, bias, *rest = bound(args, kwargs, NAMES)
    strides, pads, steps = rest[0:2], rest[2:4], rest[4:6]
    groups, moves, use_mask = rest[6:]
    kernel = tuple(weight.shape[-2:])
    if not isinstance(x, ShardedTensor) or any(isinstance(t, ShardedTensor) for t in (weight, bias)):
        raise UnsupportedOp("deform_conv2d takes a sharded image and plain weights: call .full() on what is sharded")
    windows = [
        Window.conv(e, k, s, p, d) for e, k, s, p, d in zip(x.shape[2:], kernel, strides, pads, steps, strict=True)
    ]
    outs = tuple(w.out_extent for w in windows)
    wanted = (x.shape[0], 2 * moves * prod(kernel), *outs)
    if x.placement.is_cut(1) or min(outs) < 1 or tuple(offset.shape) != wanted:
        raise UnsupportedOp(
            f"deform_conv2d of an image {tuple(x.shape)} with cut dims {x.placement.cut_dims} and offsets "
            f"{tuple(offset.shape)}: it takes channels that are not cut, and offsets {wanted}"
        )
    target = x.placement.resized({2: outs[0], 3: outs[1]}).with_cut(1, None, weight.shape[0])
    offsets = part_at(offset, target.with_cut(1, None, offset.shape[1]), "deform_conv2d")
    if use_mask:
        mask = part_at(mask, target.with_cut(1, None, mask.shape[1]), "deform_conv2d")
    else:
        mask = x.local.new_zeros((offsets.shape[0], 1))
    reached = [reach(offsets, w, kernel, steps, target, dim) for dim, w in enumerate(windows)]
    piece = fetched(x, (target.box[0], Interval(0, x.shape[1]), *reached), "deform_conv2d")
    if not prod(target.local_shape):
        nothing = sum((t.sum() * 0 for t in (offsets, mask, weight, bias)), piece.sum() * 0)
        return ShardedTensor(piece.new_zeros(target.local_shape) + nothing, target)
    # The operator runs without padding on a piece that has at least the extent of its own windows.
    own = [out.size for out in target.box[2:]]
    spans = [(n - 1) * w.num + d * (k - 1) + 1 for n, w, d, k in zip(own, windows, steps, kernel, strict=True)]
    piece = F.pad(piece, amounts([max(0, s - r.size) for s, r in zip(spans, reached, strict=True)]))
    more = [max(0, r.size - s) // w.num for s, r, w in zip(spans, reached, windows, strict=True)]
    shifts = [w.span(o).start - r.start for w, o, r in zip(windows, target.box[2:], reached, strict=True)]
    offsets = offsets + offsets.new_tensor(shifts).repeat(offsets.shape[1] // 2).view(-1, 1, 1)
    mask = F.pad(mask, amounts(more)) if use_mask else mask
    local = func(
        piece, weight, F.pad(offsets, amounts(more)), mask, bias, *strides, 0, 0, *steps, groups, moves, use_mask
    )
    return ShardedTensor(local[..., : own[0], : own[1]], target)


def amounts(behind: Sequence[int]) -> list[int]:
    """The amounts of `F.pad` that lengthen the last two dims."""
    return [0, behind[1], 0, behind[0]]


def reach(
    offsets: Tensor, window: Window, kernel: Sequence[int], steps: Sequence[int], target: Layout, dim: int
) -> Interval:
    """The rows (or columns) of the image that this rank's offsets read."""
    out = target.box[2 + dim]
    if not offsets.numel():
        return Interval(0, 1)
    taps = torch.arange(kernel[dim], device=offsets.device) * steps[dim]
    taps = taps.view(-1, *(1,) * (1 - dim)).expand(*kernel).reshape(1, 1, -1, 1, 1)
    base = torch.arange(*out, device=offsets.device) * window.num + window.lo
    moved = offsets.detach().unflatten(1, (-1, taps.numel(), 2))[:, :, :, dim]
    low, high = torch.aminmax((moved + taps + base.view(-1, *(1,) * (1 - dim))).nan_to_num())
    start = floor(min(max(float(low), 0.0), window.extent - 1.0))
    return Interval(start, max(start + 1, min(window.extent, floor(min(float(high), 1.0 * window.extent)) + 2)))


def enter() -> bool:
    """Enter the rule where torchvision's operators are loaded; whether they are."""
    packet = getattr(torch.ops.torchvision, "deform_conv2d", None)
    for function in () if packet is None else (packet, packet.default):
        TABLE[function] = ("deform_conv2d", deform_conv2d)
    return packet is not None


def load() -> None:
    """Load torchvision's operators where it is installed with some that fit this torch, and enter the rule."""
    found = importlib.util.find_spec("torchvision")
    if enter() or found is None or found.origin is None:
        return
    for library in sorted(Path(found.origin).parent.glob("_C*.so")):
        with suppress(OSError):
            torch.ops.load_library(str(library))
    enter()


KINDS["deform_conv2d"] = "windowed"
load()
