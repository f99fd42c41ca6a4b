"""Convolution with thin halo strips: the large interior is never copied, and is computed while strips travel.

Convolution is linear: the exact result is the local convolution with zeros beyond the cut, plus what the
received strips contribute to the border. Backward is the local backward, plus strips of gradient sent home.

      window of this rank's outputs          slab 0 (top neighbours' strips)
      +-----------------------+        ->    its own pixels (not copied)
      |  own pixels           |              slab 1 (bottom neighbours' strips)
      +-----------------------+
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from mural.comm.exchange import (
    EVERY,
    Parts,
    Slices,
    count,
    dense,
    empty_like,
    extents,
    first_order,
    mark,
    pack,
    uncropped,
    unpack,
    unpack_each,
)
from mural.comm.messages import Transfer, Transport
from mural.geometry import Box, Interval, Window, moves, needs_of, overlap, slices, subtract, volume
from mural.shard.layout import Layout, spatial_boxes
from mural.shard.tensor import ShardedTensor


@dataclass(frozen=True)
class Slab:
    """A part of the window that other ranks own, and the outputs that it contributes to.

    It is at `inner` in the window of those outputs, which has the shape `padded` and is zero elsewhere. A stride may
    leave a rim of it unread: `read` is what is read, None for all of it.
    """

    shape: tuple[int, ...]
    out: Slices
    padded: tuple[int, ...]
    inner: Slices
    read: Slices | None


@dataclass(frozen=True)
class Strips:
    """One rank's part of a convolution with strips, in local slices; `crop` is None if it is the whole piece."""

    crop: Slices | None
    padding: tuple[int, ...]
    slabs: tuple[Slab, ...]
    sends: tuple[tuple[int, tuple[Slices, ...]], ...]
    receives: tuple[tuple[int, Parts], ...]


def symmetric(window: Window, own: Interval, out: Interval) -> bool:
    """Whether torch's symmetric padding of the own pixels gives exactly these outputs."""
    span = window.span(out)
    before, after = max(0, own.start - span.start), max(0, span.stop - own.stop)
    cropped = (own & span).size
    reach = window.hi - window.lo
    return cropped > 0 and after <= before and (cropped + 2 * before - reach) // window.num + 1 == out.size


@lru_cache(maxsize=4096)
def strips(have: Layout, target: Layout, windows: tuple[Window, ...]) -> Strips | None:
    """This rank's part, or None if no rank exchanges or the outputs of some rank need another method."""
    mesh, lead = have.mesh, have.ndim - len(windows)
    own, out = spatial_boxes(have, target, lead)
    peers = tuple(own)
    if have.cuts[:lead] != target.cuts[:lead] or not all(volume(out[r]) and volume(own[r]) for r in peers):
        return None
    if not all(symmetric(w, s, o) for r in peers for w, s, o in zip(windows, own[r], out[r], strict=True)):
        return None
    need: dict[int, Box] = {r: tuple(w.reads(o)[0] for w, o in zip(windows, out[r], strict=True)) for r in peers}
    if all(overlap(own[r], need[r]) == need[r] for r in peers):
        return None
    mine, box, outs = own[mesh.rank], need[mesh.rank], out[mesh.rank]
    inner = overlap(mine, box)
    parts = subtract(box, inner)
    sends: dict[int, list[Slices]] = {}
    receives: dict[int, list[tuple[int, Slices]]] = {}
    for source, destination, moved in moves(own, {r: needs_of(b) for r, b in need.items()}, mesh.rank):
        if source == destination:
            continue
        if source == mesh.rank:
            sends.setdefault(destination, []).append(EVERY + slices(moved, mine))
        else:
            index = next(i for i, p in enumerate(parts) if volume(overlap(p, moved)))
            receives.setdefault(source, []).append((index, slices(moved, parts[index])))
    padding = tuple(max(0, m.start - w.span(o).start) for w, m, o in zip(windows, mine, outs, strict=True))
    return Strips(
        crop=EVERY + slices(inner, mine) if inner != mine else None,
        padding=padding,
        slabs=tuple(_slab(part, windows, outs) for part in parts),
        sends=tuple((p, tuple(s)) for p, s in sorted(sends.items())),
        receives=tuple((p, tuple(s)) for p, s in sorted(receives.items())),
    )


def _slab(part: Box, windows: tuple[Window, ...], outs: Box) -> Slab:
    touched = tuple(o & w.touching(p) for w, p, o in zip(windows, part, outs, strict=True))
    spans = tuple(w.span(t) for w, t in zip(windows, touched, strict=True))
    read = overlap(part, spans)
    return Slab(
        shape=tuple(i.size for i in part),
        out=EVERY + slices(touched, outs),
        padded=tuple(i.size for i in spans),
        inner=EVERY + slices(read, spans),
        read=EVERY + slices(read, part) if read != part else None,
    )


@dataclass(frozen=True)
class ConvArguments:
    """Stride, dilation and groups of a convolution."""

    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, ...]) -> Tensor:
        """The convolution."""
        zeros = (0,) * len(padding)
        return torch.convolution(x, weight, bias, self.stride, padding, self.dilation, False, zeros, self.groups)

    def backward(
        self,
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        padding: tuple[int, ...],
        needs: tuple[bool, bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of input, weight and bias."""
        zeros = [0] * len(padding)
        return torch.ops.aten.convolution_backward(
            grad,
            x,
            weight,
            [weight.shape[0]],
            self.stride,
            padding,
            self.dilation,
            False,
            zeros,
            self.groups,
            needs,
        )


class _StripConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: Strips,
        conv: ConvArguments,
        transport: Transport,
    ) -> Tensor:
        ctx.plan, ctx.conv, ctx.transport, ctx.has_bias = plan, conv, transport, bias is not None
        lead = x.shape[:2]
        sends = {peer: pack(x, parts) for peer, parts in plan.sends}
        counts = {
            peer: sum(count(lead, plan.slabs[i].shape, part) for i, part in parts) for peer, parts in plan.receives
        }
        transfer = Transfer(transport, "convolution", sends, counts, x)
        with transfer, transport.span("interior"):
            y = conv.forward(x if plan.crop is None else x[plan.crop], weight, bias, plan.padding)
        arrived = transfer.wait()
        padded = [empty_like(x, (*lead, *slab.padded)).zero_() for slab in plan.slabs]
        slabs = [
            whole[slab.inner] if slab.read is None else empty_like(x, (*lead, *slab.shape))
            for whole, slab in zip(padded, plan.slabs, strict=True)
        ]
        for peer, parts in plan.receives:
            unpack_each(arrived[peer], slabs, parts)
        for whole, slab, strip in zip(padded, plan.slabs, slabs, strict=True):
            if slab.read is not None:
                whole[slab.inner] = strip[slab.read]
        none = (0,) * len(plan.padding)
        for strip, slab in zip(padded, plan.slabs, strict=True):
            y[slab.out].add_(conv.forward(strip, weight, None, none))
        ctx.save_for_backward(x, weight, *padded)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        plan: Strips = ctx.plan
        conv: ConvArguments = ctx.conv
        x, weight, *padded = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        none = (0,) * len(plan.padding)
        homes: list[Tensor] = []
        weights: list[Tensor] = []
        for strip, slab in zip(padded, plan.slabs, strict=True):
            part = dense(grad[slab.out], strip)
            home, of_weight, _ = conv.backward(part, strip, weight, none, (need_x, need_weight, False))
            if home is not None:
                homes.append(home[slab.inner] if slab.read is None else unread(home, slab))
            if of_weight is not None:
                weights.append(of_weight)
        transfer = None
        if need_x:
            sends = {
                peer: torch.cat([homes[i][EVERY + part].reshape(-1) for i, part in parts])
                for peer, parts in plan.receives
            }
            counts = {peer: sum(prod(extents(x.shape, part)) for part in parts) for peer, parts in plan.sends}
            transfer = Transfer(ctx.transport, "convolution backward", sends, counts, x)
        inner = x if plan.crop is None else x[plan.crop]
        with ctx.transport.span("interior"):
            gx, gw, gb = conv.backward(
                grad, inner, weight, plan.padding, (need_x, need_weight, bool(need_bias and ctx.has_bias))
            )
        if gw is not None:
            for of_weight in weights:
                gw += of_weight
        if transfer is not None and gx is not None:
            gx = gx if plan.crop is None else uncropped(gx, x.shape, plan.crop[2:])
            arrived = transfer.wait()
            for peer, parts in plan.sends:
                unpack(arrived[peer], gx, parts, add=True)
        return gx, gw, gb if ctx.has_bias else None, None, None, None


def unread(home: Tensor, slab: Slab) -> Tensor:
    """The gradient of a slab with an unread rim."""
    whole = empty_like(home, (*home.shape[:2], *slab.shape)).zero_()
    whole[slab.read] = home[slab.inner]
    return whole


def strip_conv(
    x: ShardedTensor, weight: Tensor, bias: Tensor | None, plan: Strips, target: Layout, conv: ConvArguments
) -> ShardedTensor:
    """A convolution by strips, with autocast's types."""
    kind = x.device.type
    operands = [x.local, weight, bias]
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        operands = [t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in operands]
    local: Tensor = _StripConv.apply(*operands, plan, conv, x.mesh.transport)
    mark()
    return ShardedTensor(local, target.uncut_resized(local.shape))
