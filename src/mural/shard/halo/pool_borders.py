"""Pooling without a copy of the interior: torch's kernel on the own pixels, and thin windows for the border.

Outputs whose window is within this rank's pixels come from one call of torch's kernel on them. It also computes the
outputs at a cut, wrongly; those are overwritten with the results of thin windows, made of own and received strips.

      own pixels  | cut          outputs
      o o o o o o | . .          i i i i b      i: from the own pixels, b: from a thin window across the cut
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mural.comm.exchange import (
    EVERY,
    Parts,
    Slices,
    count,
    empty_like,
    first_order,
    mark,
    pack,
    uncropped,
    unpack,
    unpack_each,
)
from mural.comm.messages import Transfer, Transport
from mural.geometry import Box, Interval, Window, moves, needs_of, overlap, slices, subtract, volume
from mural.shard.halo.conv_strips import symmetric
from mural.shard.layout import Layout, spatial_boxes
from mural.shard.rules import Place, Windowed, output_layout
from mural.shard.tensor import ShardedTensor


@dataclass(frozen=True)
class Kernel:
    """torch's own kernel of a pool, with symmetric padding, and its backward."""

    forward: Callable[[Tensor, tuple[int, ...]], tuple[Tensor, ...]]
    backward: Callable[[Tensor, Tensor, tuple[int, ...], tuple[Tensor, ...]], Tensor]
    widest: tuple[int, ...]
    """The largest padding that torch takes."""


@dataclass(frozen=True)
class Borders:
    """One rank's part of a pool, in local slices of the spatial dims."""

    crop: Slices
    padding: tuple[int, ...]
    outs: tuple[Slices, ...]
    windows: tuple[Box, ...]
    places: tuple[tuple[Place, ...], ...]
    keeps: tuple[tuple[int, Slices, Slices], ...]
    sends: tuple[tuple[int, tuple[Slices, ...]], ...]
    receives: tuple[tuple[int, Parts], ...]


def border_boxes(windows: tuple[Window, ...], own: Box, out: Box) -> tuple[Box, ...] | None:
    """The outputs that read across a cut, as disjoint boxes; None if there is no output in the interior."""
    inside: list[Interval] = []
    for window, mine, outs in zip(windows, own, out, strict=True):
        rows = [outs.start, outs.stop - 1]
        while rows[0] < outs.stop and not mine.contains(window.reads(Interval(rows[0], rows[0] + 1))[0]):
            rows[0] += 1
        while rows[1] >= rows[0] and not mine.contains(window.reads(Interval(rows[1], rows[1] + 1))[0]):
            rows[1] -= 1
        inside.append(Interval(rows[0], rows[1] + 1))
    return subtract(out, tuple(inside)) if all(i.size for i in inside) else None


@lru_cache(maxsize=4096)
def borders(have: Layout, target: Layout, windows: tuple[Window, ...], widest: tuple[int, ...]) -> Borders | None:
    """This rank's part, or None if no rank exchanges or some rank's outputs need the attached window."""
    mesh, lead = have.mesh, have.ndim - len(windows)
    own, out = spatial_boxes(have, target, lead)
    peers = tuple(own)
    if have.cuts[:lead] != target.cuts[:lead] or lead != 2 or not all(volume(out[r]) * volume(own[r]) for r in peers):
        return None
    need: dict[int, tuple[Box, ...]] = {}
    for rank in peers:
        dims = list(zip(windows, own[rank], out[rank], widest, strict=True))
        boxes = border_boxes(windows, own[rank], out[rank])
        if boxes is None or not all(symmetric(w, s, o) and s.start - w.span(o).start <= m for w, s, o, m in dims):
            return None
        # torch's kernels refuse a piece that is thinner than the kernel, even if its padding makes up for it.
        if any((s & w.reads(o)[0]).size < w.hi - w.lo for w, s, o, _ in dims):
            return None
        need[rank] = boxes
    if not any(need.values()):
        return None
    reads = {r: tuple(tuple(w.reads(o)[0] for w, o in zip(windows, b, strict=True)) for b in need[r]) for r in peers}
    mine, outs = own[mesh.rank], out[mesh.rank]
    inner = overlap(mine, tuple(w.reads(o)[0] for w, o in zip(windows, outs, strict=True)))
    sends: dict[int, list[Slices]] = {}
    receives: dict[int, list[tuple[int, Slices]]] = {}
    keeps: list[tuple[int, Slices, Slices]] = []
    for k in range(max(map(len, reads.values()))):
        wanted = {r: needs_of(boxes[k]) for r, boxes in reads.items() if k < len(boxes)}
        for source, destination, part in moves(own, wanted, mesh.rank):
            if source == destination:
                keeps.append((k, slices(part, mine), slices(part, reads[mesh.rank][k])))
            elif source == mesh.rank:
                sends.setdefault(destination, []).append(slices(part, mine))
            else:
                receives.setdefault(source, []).append((k, slices(part, reads[mesh.rank][k])))
    return Borders(
        crop=slices(inner, mine),
        padding=tuple(max(0, m.start - w.span(o).start) for w, m, o in zip(windows, mine, outs, strict=True)),
        outs=tuple(slices(b, outs) for b in need[mesh.rank]),
        windows=reads[mesh.rank],
        places=tuple(tuple(Place(w, o, w.reads(o)) for w, o in zip(windows, b, strict=True)) for b in need[mesh.rank]),
        keeps=tuple(keeps),
        sends=tuple((p, tuple(s)) for p, s in sorted(sends.items())),
        receives=tuple((p, tuple(s)) for p, s in sorted(receives.items())),
    )


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Borders, rule: Windowed, kernel: Kernel, transport: Transport) -> Tensor:
        ctx.plan, ctx.rule, ctx.kernel, ctx.transport = plan, rule, kernel, transport
        lead = x.shape[:2]
        shapes = [tuple(i.size for i in box) for box in plan.windows]
        sends = {peer: pack(x, [EVERY + part for part in parts]) for peer, parts in plan.sends}
        sizes = {p: sum(count(lead, shapes[k], s) for k, s in parts) for p, parts in plan.receives}
        transfer = Transfer(transport, rule.name, sends, sizes, x)
        with transfer, transport.span("interior"):
            y, *kept = kernel.forward(x[EVERY + plan.crop], plan.padding)
        thin = [empty_like(x, (*lead, *shape)) for shape in shapes]
        for k, held, wanted in plan.keeps:
            thin[k][EVERY + wanted] = x[EVERY + held]
        arrived = transfer.wait()
        for peer, parts in plan.receives:
            unpack_each(arrived[peer], thin, parts)
        for out, piece, places in zip(plan.outs, thin, plan.places, strict=True):
            y[EVERY + out] = rule.run(piece, places)
        ctx.save_for_backward(x, *kept, *thin)
        ctx.kept = len(kept)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        plan: Borders = ctx.plan
        x, *rest = ctx.saved_tensors
        kept, thin = tuple(rest[: ctx.kept]), rest[ctx.kept :]
        inside = grad.clone()
        homes: list[Tensor] = []
        for out, piece, places in zip(plan.outs, thin, plan.places, strict=True):
            homes.append(gradient_of(ctx.rule, piece, places, grad[EVERY + out]))
            inside[EVERY + out] = 0
        sends = {p: torch.cat([homes[k][EVERY + s].reshape(-1) for k, s in parts]) for p, parts in plan.receives}
        sizes = {p: sum(count(x.shape[:2], x.shape[2:], s) for s in parts) for p, parts in plan.sends}
        transfer = Transfer(ctx.transport, f"{ctx.rule.name} backward", sends, sizes, x)
        inner = x[EVERY + plan.crop]
        with ctx.transport.span("interior"):
            gx = ctx.kernel.backward(inside, inner, plan.padding, kept)
        gx = uncropped(gx, x.shape, plan.crop)
        for k, held, wanted in plan.keeps:
            gx[EVERY + held] += homes[k][EVERY + wanted]
        arrived = transfer.wait()
        for peer, parts in plan.sends:
            unpack(arrived[peer], gx, [EVERY + part for part in parts], add=True)
        return gx, None, None, None, None


def gradient_of(rule: Windowed, piece: Tensor, places: tuple[Place, ...], grad: Tensor) -> Tensor:
    """The gradient of a thin window, whose outputs are recomputed."""
    with torch.enable_grad():
        again = piece.detach().requires_grad_()
        (found,) = torch.autograd.grad(rule.run(again, places), again, grad)
    return found


def pooled(x: ShardedTensor, rule: Windowed, kernel: Kernel) -> ShardedTensor | None:
    """A pool by interior and borders; None if the attached window has to be used."""
    windows = tuple(w for w in rule.dims if isinstance(w, Window))
    target = output_layout(x.placement, rule.dims)
    plan = borders(x.placement, target, windows, kernel.widest) if x.is_floating_point() else None
    if plan is None or not x.local.shape[0]:
        return None
    local: Tensor = _Pool.apply(x.local, plan, rule, kernel, x.mesh.transport)  # type: ignore[assignment]
    mark()
    return ShardedTensor(local, target)
