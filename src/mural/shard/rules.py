"""Windowed rules as data: what an operation reads along each dim, and how it runs valid on a piece.

A rule does not communicate. Whoever executes it decides where the input comes from: other ranks (`windowed`),
or tiles in time on one device (`tile`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mural.errors import UnsupportedOp
from mural.geometry import Box, Interval, Reads, Window, slice_of
from mural.shard.layout import Layout, Want, recurring
from mural.shard.parts import cut_out, padded
from mural.shard.relayout import pull
from mural.shard.tensor import ShardedTensor
from mural.shard.tiles import around, computing_tiles, current_run


@dataclass(frozen=True)
class Place:
    """One dim of a piece: the output interval to compute, and the input intervals that the piece holds."""

    reads: Reads
    out: Interval
    have: tuple[Interval, ...]

    @property
    def border(self) -> tuple[int, int]:
        """How many positions of the window are before and after the image: the rule fills them."""
        if not isinstance(self.reads, Window):
            return 0, 0
        span, (have,) = self.reads.span(self.out), self.have
        if have.size == 0:
            return span.size, 0
        return have.start - span.start, span.stop - have.stop


@dataclass(frozen=True)
class Windowed:
    """A windowed operation on the last dims of a tensor.

    `run(piece, places)` computes exactly the outputs of `places`, from a piece that holds what they read.
    """

    name: str
    dims: tuple[Reads, ...]
    run: Callable[[Tensor, tuple[Place, ...]], Tensor]


def is_identity(reads: Reads) -> bool:
    """Whether every output reads only the input at its own position."""
    return reads == Window(reads.extent, reads.extent)


def tile(x: Tensor, rule: Windowed, out: Box) -> Tensor:
    """One output tile of a rule, from the window of a plain tensor that it reads.

    Disjoint tiles together give the operation's result, and their gradients add up to its gradients.
    """
    places = tuple(Place(r, o, r.reads(o)) for r, o in zip(rule.dims, out, strict=True))
    first = x.ndim - len(places)
    for dim, place in enumerate(places, first):
        parts = [x.narrow(dim, i.start, i.size) for i in place.have]
        x = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return rule.run(x, places)


@recurring
def output_layout(layout: Layout, dims: tuple[Reads, ...]) -> Layout:
    """The layout of the output of a rule for the last dims; its other dims are those of the input."""
    first = layout.ndim - len(dims)
    return layout.resized({first + i: r.out_extent for i, r in enumerate(dims) if not is_identity(r)})


@recurring
def output_of_whole(layout: Layout, dims: tuple[Reads, ...]) -> Layout | None:
    """The same if ranks have whole images before and after, and this one has any; None otherwise."""
    target = output_layout(layout, dims)
    cut = any(layout.is_cut(d) or target.is_cut(d) for d in range(layout.ndim - len(dims), layout.ndim))
    return None if cut or 0 in layout.local_shape else target


def wants_of(layout: Layout, target: Layout, rule_dims: tuple[Reads, ...]) -> tuple[Want, ...]:
    """What every rank needs of the input to compute its piece of the output."""
    wants = list(target.wants())
    first = layout.ndim - len(rule_dims)
    for dim, reads in enumerate(rule_dims, first):
        axis, intervals = wants[dim]
        wants[dim] = (axis, tuple(reads.reads(out) for (out,) in intervals))
    return tuple(wants)


def windowed(x: ShardedTensor, rule: Windowed) -> ShardedTensor:
    """A rule's result on a sharded tensor: exchange what the windows reach, then run valid."""
    if x.mesh.tiled:
        return windowed_tile(x, rule)
    target = output_layout(x.placement, rule.dims)
    piece = pull(x, wants_of(x.placement, target, rule.dims), rule.name)
    first = x.ndim - len(rule.dims)
    outs = target.box[first:]
    places = tuple(Place(r, o, r.reads(o)) for r, o in zip(rule.dims, outs, strict=True))
    filled = all(o.size for o in outs) and all(piece.shape[:first])
    local = rule.run(piece, places) if filled else run_empty(piece, rule, outs)
    return ShardedTensor(local, target.uncut_resized(local.shape))


def windowed_tile(x: ShardedTensor, rule: Windowed) -> ShardedTensor:
    """The outputs of a rule that the run asks for, run valid on what they read; there may be none."""
    layout, first = x.placement, x.ndim - len(rule.dims)
    wanted = current_run().out(layout, rule.dims, rule.name)
    axes = [a if c is not None else None for a, c in zip(layout.axes, layout.cuts, strict=True)][first:]
    outs = tuple(Interval(0, r.out_extent) if a is None else wanted[a] for r, a in zip(rule.dims, axes, strict=True))
    places = tuple(Place(r, o, r.reads(o)) for r, o in zip(rule.dims, outs, strict=True))
    filled = all(o.size for o in outs)
    local = rule.run(tile_window(x, rule, places), places) if filled else run_empty(x.local, rule, outs)
    lead = [n if c is None else m for n, m, c in zip(local.shape, layout.shape, layout.cuts, strict=True)][:first]
    shape = (*lead, *(r.out_extent for r in rule.dims))
    cuts = [None if a is None else around(o, n) for a, o, n in zip(axes, outs, shape[first:], strict=True)]
    return ShardedTensor(local, replace(layout, shape=shape, cuts=(*layout.cuts[:first], *cuts)))


def tile_window(x: ShardedTensor, rule: Windowed, places: tuple[Place, ...]) -> Tensor:
    """What a rule reads of a tile at those places."""
    piece, layout = x.local, x.placement
    window = [slice(0, n) for n in piece.shape]
    for dim, place in enumerate(places, x.ndim - len(places)):
        held, have = layout.box[dim], place.have
        if not all(held.contains(i) for i in have if i.size):
            raise UnsupportedOp(
                f"{rule.name} reads {have} along {layout.axes[dim]} for {place.out}, but its tile holds {held}"
            )
        if len(have) == 1:
            window[dim] = slice_of(have[0], (held,)) if have[0].size else slice(0, 0)
        else:
            piece = torch.cat([piece.narrow(dim, slice_of(i, (held,)).start, i.size) for i in have], dim)
            window[dim] = slice(0, piece.shape[dim])
    return cut_out(piece, tuple(window))


def of_whole_images(x: ShardedTensor, rule: Windowed, call: Callable[[Tensor], Tensor]) -> ShardedTensor | None:
    """The result of torch's own call, if ranks have whole images and this one has any; None otherwise.

    torch pads inside its kernels; a window around the piece would be a copy.
    """
    target = output_of_whole(x.placement, rule.dims)
    if target is None:
        return None
    local = call(x.local)
    return ShardedTensor(local, target.uncut_resized(local.shape))


def run_empty(piece: Tensor, rule: Windowed, outs: Box) -> Tensor:
    """The empty piece of a rank that owns no output, or no image of the batch.

    torch's kernels refuse empty tensors, but the rank must build the same graph as its peers: it runs the
    operation for one position of zeros, drops the result, and stays connected to the exchange.
    """
    some = tuple(o if o.size else Interval(0, 1) for o in outs)
    places = tuple(Place(r, o, r.reads(o)) for r, o in zip(rule.dims, some, strict=True))
    lead = piece.ndim - len(places)
    shape = (*(max(1, n) for n in piece.shape[:lead]), *(sum(i.size for i in p.have) for p in places))
    dummy = piece.new_zeros(shape)
    if piece.is_floating_point():
        dummy = dummy + piece.sum() * 0
    result = rule.run(dummy, places)
    kept = (slice(0, 0) if n == 0 else slice(None) for n in piece.shape[:lead])
    return result[(*kept, *(slice(0, o.size) for o in outs))]


def pad_border(piece: Tensor, places: tuple[Place, ...], value: float) -> Tensor:
    """The piece with its window's border filled with a constant."""
    amounts = [n for place in reversed(places) for n in place.border]
    return padded(piece, amounts, value, fast=computing_tiles()) if any(amounts) else piece
