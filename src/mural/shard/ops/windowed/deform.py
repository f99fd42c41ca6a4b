"""torchvision's deformable convolution: each rank fetches the window that its offsets reach, and runs on it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import floor, prod
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mural.errors import UnsupportedOp
from mural.geometry import Box, Interval, Window
from mural.shard.autocasting import without_autocast
from mural.shard.layout import Layout
from mural.shard.ops.call_arguments import bound
from mural.shard.ops.windowed.data_windows import empty_piece, fetched, part_at
from mural.shard.table import KINDS, TABLE
from mural.shard.tensor import ShardedTensor

NAMES = (
    "input", "weight", "offset", "mask", "bias", "stride_h", "stride_w", "pad_h", "pad_w", "dil_h", "dil_w",
    "n_weight_grps", "n_offset_grps", "use_mask",
)  # fmt: skip


@dataclass(frozen=True)
class Deformed:
    """The numbers of a deformable convolution, one of each for rows and columns where there are two."""

    windows: tuple[Window, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    steps: tuple[int, ...]
    last: tuple[Any, ...]
    """Groups of channels, groups of offsets, and whether there is a mask."""


def deform_conv2d(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """A convolution whose window's pixels are moved by offsets, and weighted by a mask if one is given."""
    x, weight, offset, mask, bias, *rest = bound(args, kwargs, NAMES)
    strides, pads, steps, kernel = rest[0:2], rest[2:4], rest[4:6], tuple(weight.shape[-2:])
    if not isinstance(x, ShardedTensor) or any(isinstance(t, ShardedTensor) for t in (weight, bias)):
        raise UnsupportedOp("deform_conv2d takes a sharded image and plain weights: call .full() on what is sharded")
    windows = tuple(
        Window.conv(e, k, s, p, d) for e, k, s, p, d in zip(x.shape[2:], kernel, strides, pads, steps, strict=True)
    )
    outs = tuple(w.out_extent for w in windows)
    wanted = (x.shape[0], 2 * rest[7] * prod(kernel), *outs)
    if x.placement.is_cut(1) or min(outs) < 1 or tuple(offset.shape) != wanted:
        raise UnsupportedOp(
            f"deform_conv2d of an image {tuple(x.shape)} with cut dims {x.placement.cut_dims} and offsets "
            f"{tuple(offset.shape)}: it takes channels that are not cut, and offsets {wanted}"
        )
    numbers = Deformed(windows, kernel, tuple(strides), tuple(steps), tuple(rest[6:]))
    target = x.placement.resized({2: outs[0], 3: outs[1]}).with_cut(1, None, weight.shape[0])
    offsets = part_at(offset, target.with_cut(1, None, offset.shape[1]), "deform_conv2d")
    if rest[8]:
        mask = part_at(mask, target.with_cut(1, None, mask.shape[1]), "deform_conv2d")
    else:
        mask = offsets.new_zeros((offsets.shape[0], 1))
    reached = tuple(reach(offsets, numbers, target, dim) for dim in (0, 1))
    piece = fetched(x, (target.box[0], Interval(0, x.shape[1]), *reached), "deform_conv2d")
    if not prod(target.local_shape):
        return ShardedTensor(empty_piece(target, piece, offsets, mask, weight, bias), target)
    return ShardedTensor(on_piece(func, (piece, weight, offsets, mask, bias), numbers, reached, target), target)


def on_piece(
    func: Callable[..., Any], tensors: tuple[Tensor, ...], numbers: Deformed, reached: Box, target: Layout
) -> Tensor:
    """The operator without padding, on a piece at least as long as its own windows, which offsets are relative to."""
    piece, weight, offsets, mask, bias = tensors
    windows, places = numbers.windows, target.box[2:]
    own = [w.span(o).size for w, o in zip(windows, places, strict=True)]
    # A piece that is longer has more outputs, which are dropped: offsets and mask get zeros for them.
    more = [max(0, r.size - n) // s for r, n, s in zip(reached, own, numbers.strides, strict=True)]
    shifts = [w.span(o).start - r.start for w, o, r in zip(windows, places, reached, strict=True)]
    wide = offsets.float() if offsets.dtype in (torch.float16, torch.bfloat16) else offsets
    wide = wide + wide.new_tensor(shifts).repeat(wide.shape[1] // 2).view(-1, 1, 1)
    longer = F.pad(piece, padding_after([max(0, n - r.size) for r, n in zip(reached, own, strict=True)]))
    mask = F.pad(mask, padding_after(more)) if numbers.last[-1] else mask
    given = [t.to(wide.dtype) for t in (longer, weight, F.pad(wide, padding_after(more)), mask, bias)]
    with without_autocast(piece.device):
        local = func(*given, *numbers.strides, 0, 0, *numbers.steps, *numbers.last)
    return local[..., : places[0].size, : places[1].size].to(piece.dtype)


def padding_after(amounts: Sequence[int]) -> list[int]:
    """The amounts of `F.pad` that lengthen rows and columns at their end."""
    return [0, amounts[1], 0, amounts[0]]


def reach(offsets: Tensor, numbers: Deformed, target: Layout, dim: int) -> Interval:
    """The rows (or columns) of the image that this rank's offsets read, with one to spare for rounding."""
    window, kernel, out = numbers.windows[dim], numbers.kernel, target.box[2 + dim]
    if not offsets.numel():
        return Interval(0, 1)
    taps = torch.arange(kernel[dim], device=offsets.device) * numbers.steps[dim]
    taps = taps.view(-1, *(1,) * (1 - dim)).expand(*kernel).reshape(1, 1, -1, 1, 1)
    base = torch.arange(*out, device=offsets.device) * window.num + window.lo
    moved = offsets.detach().unflatten(1, (-1, taps.numel(), 2))[:, :, :, dim]
    moved = moved.float() if moved.dtype in (torch.float16, torch.bfloat16) else moved
    low, high = torch.aminmax((moved + taps + base.view(-1, *(1,) * (1 - dim))).nan_to_num())
    start = floor(min(max(float(low) - 1, 0.0), window.extent - 1.0))
    return Interval(start, max(start + 1, min(window.extent, floor(min(float(high), 1.0 * window.extent)) + 3)))


def enter() -> bool:
    """Whether torchvision's operators are loaded; if so, the rule is registered."""
    packet = getattr(torch.ops.torchvision, "deform_conv2d", None)
    for function in () if packet is None else (packet, packet.default):
        TABLE[function] = ("deform_conv2d", deform_conv2d)
    return packet is not None


def load() -> None:
    """Load torchvision's operators if it is installed with some that fit this torch, and register the rule.

    A CPU build of torch cannot load the operators of a torchvision built for CUDA. Its models need none, but its import
    refers to two, and fails if they do not exist: these are declared, without kernels, so that a call still raises.
    """
    found = importlib.util.find_spec("torchvision")
    if enter() or found is None or found.origin is None:
        return
    for library in sorted(Path(found.origin).parent.glob("_C*.so")):
        with suppress(OSError):
            torch.ops.load_library(str(library))
    if not enter() and not hasattr(torch.ops.torchvision, "nms"):
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


KINDS["deform_conv2d"] = "windowed"
load()
