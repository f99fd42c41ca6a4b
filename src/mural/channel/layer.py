"""A layer split by channels: each rank of the channel axis computes some of its outputs, or with some of its inputs.

Activations are cut as everywhere else: the ranks of the channel axis hold different images. The layer gathers the
images of its group, computes with this rank's part of the weight, and sends the results back:

                     rank 0       rank 1               images × channels of a group of two
    input           │ images a │ images b │            all channels
    split by output │ images a and b, all inputs  │ → this rank's outputs  │ → own images, all outputs
    split by input  │ images a and b, some inputs │ → all outputs, partial │ → own images, added up

The images of a group travel at once, or in turns (see `turns.py`); spatial cuts stay as they are, and the convolution
exchanges its halos among the ranks that hold the same part of the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import _StopRecomputationError

from mural.channel.turns import Delivery, Line, taken
from mural.comm.exchange import ExchangeRoute, saving_hooks
from mural.geometry import Cuts, Interval
from mural.ranks import Mesh
from mural.shard.folds.reshape import settled
from mural.shard.layout import Layout
from mural.shard.relayout import relayout
from mural.shard.tensor import ShardedTensor, unfolded

KIND = "channel"
"""The prefix of its messages' names, before the layer's name."""
Exchange = Literal["batch", "rank", "part"]
Rows = tuple[tuple[Interval, ...], ...]
"""The images of one turn: for each coordinate of the data axis, intervals of the batch."""


@dataclass(frozen=True)
class ChannelParts:
    """Which channels of a layer the ranks of the channel axis work on: intervals by coordinate, None for all."""

    inputs: tuple[Interval, ...] | None
    outputs: tuple[Interval, ...] | None


@dataclass(frozen=True)
class ChannelLayer:
    """A layer whose `run` computes the result of this rank's channels, from an input on `mesh` and its parameters.

    `mesh` has the channel axis; tensors are on `mesh.folded`. `dim` is the dim of the channels, counted from the end.
    `late` is applied to the whole result: a bias that is added once; `trains` says whether the weight's gradient needs
    the input.
    """

    name: str
    mesh: Mesh
    channels: ChannelParts
    widths: tuple[int, int]
    """All input channels, and all output channels."""
    dim: int
    exchange: Exchange
    run: Callable[..., ShardedTensor]
    late: Callable[[Tensor], Tensor]
    trains: Callable[[], bool]

    def __call__(self, x: Tensor, *args: Any) -> Tensor:
        """The whole layer's result: a sharded tensor for a sharded input, a plain one for a plain input."""
        self._check(x)
        lone = x.ndim == -self.dim  # one image without a batch dim
        given = on_mesh(x.unsqueeze(0) if lone else x, self.mesh.folded)
        try:
            y = self.late(self._computed(self._batched(given), args))
        except _StopRecomputationError:  # how a checkpoint ends its recompute, on every rank
            raise
        except BaseException as error:
            self.mesh.transport.raised(error)  # the peers would wait for this rank
            raise
        y = y.squeeze(0) if lone else y
        return y if isinstance(x, ShardedTensor) or not isinstance(y, ShardedTensor) else y.full()

    def _check(self, x: Tensor) -> None:
        """Raise what torch would raise, before anything is sent."""
        if isinstance(x, ShardedTensor) and x.mesh != self.mesh.folded:
            raise RuntimeError(f"{self.name} is split on {self.mesh}, but its input is on {x.mesh}")
        if x.ndim < -self.dim or x.shape[self.dim] != self.widths[0]:
            raise RuntimeError(f"{self.name} needs {self.widths[0]} channels, its input has the shape {tuple(x.shape)}")

    def _batched(self, x: ShardedTensor) -> ShardedTensor:
        """The input with its first dim cut over data × channel in order, and with its channels whole."""
        if x.folds and self.channels.inputs is not None:
            x = settled(x)
        at, parts = x.placement, x.mesh.size("data")
        lost = [d for d in at.cut_dims if (at.axes[d] == "data") != (d == 0)]
        if self.channels.inputs is not None:
            lost.append(at.ndim + self.dim)
        target = at.gathered(lost)
        cuts = target.cuts[0]
        if cuts is None or cuts.parts != parts or cuts.owners != tuple(range(parts)):
            bounds = cuts.bounds if cuts is not None and cuts.parts == parts else Cuts.even(at.shape[0], parts).bounds
            target = target.with_cut(0, Cuts.of(bounds), at.shape[0])
        target = replace(target, axes=("data", *(None if a == "data" else a for a in target.axes[1:])))
        moved = relayout(unfolded(x), target, self.name)
        return ShardedTensor(moved.local, moved.placement, "", x.folds)

    def _computed(self, x: ShardedTensor, args: Sequence[Any]) -> ShardedTensor:
        """The results of all turns, on the ranks whose images they are."""
        local = computed_in(x.local)
        turns = turns_of(x.placement, self.mesh, self.exchange)
        channel = x.placement.ndim + self.dim
        routes = [routed(x.placement, self.mesh, rows, channel, self.channels.inputs) for rows in turns]
        incoming = Line(local.shape, routes, self.mesh.transport, f"{KIND}: {self.name}")
        # A checkpoint recomputes all turns before its backward, so forgetting them would save nothing.
        lean = len(turns) > 1 and self.trains() and torch.is_grad_enabled() and not saving_hooks()
        delivery: Delivery | None = None
        target: Layout | None = None
        folds: tuple[int, ...] = ()
        for turn, (rows, piece) in enumerate(zip(turns, taken(local, incoming), strict=True)):
            layout = group_layout(x.placement, self.mesh, rows, channel, piece.shape[channel])
            with incoming.forgetting(turn, piece) if lean else nullcontext():
                y = self.run(ShardedTensor(piece, layout, "", x.folds), *args)
            if delivery is None or target is None:
                out, folds = y.placement.ndim + self.dim, y.folds
                target = home_layout(x.placement, y.placement, out, self.widths[1])
                ways = [routed(target, self.mesh, r, out, self.channels.outputs) for r in turns]
                outgoing = Line(target.local_shape, ways, self.mesh.transport, f"{KIND}: {self.name}")
                delivery = Delivery(outgoing, incoming, local.detach()) if lean else Delivery(outgoing)
            delivery.give(y.local)
        if delivery is None or target is None:
            raise RuntimeError(f"{self.name}: an exchange without turns")
        return ShardedTensor(delivery.collect(), target, "", folds)


def on_mesh(x: Tensor, mesh: Mesh) -> ShardedTensor:
    """A tensor as a sharded one; a plain one counts as replicated on every rank."""
    if isinstance(x, ShardedTensor):
        return x
    images = (("data", Cuts.even(x.shape[0], mesh.size("data"))),)
    return ShardedTensor(x, Layout(mesh, tuple(x.shape), (None,) * x.ndim, (None,) * x.ndim, images))


def computed_in(local: Tensor) -> Tensor:
    """The piece in the type that the layer computes in, so that no more is sent than needed."""
    kind = local.device.type
    lower = torch.is_autocast_enabled(kind) and local.dtype == torch.float32
    return local.to(torch.get_autocast_dtype(kind)) if lower else local


@lru_cache(maxsize=4096)
def turns_of(layout: Layout, mesh: Mesh, exchange: Exchange) -> tuple[Rows, ...]:
    """The images of each turn: all of the group, those of one rank, or a part of those of every rank."""
    cuts, ranks = layout.cuts[0], mesh.size("channel")
    if cuts is None:
        raise RuntimeError(f"{layout} is not cut along the batch")
    own = [[cuts.interval(d * ranks + c) for c in range(ranks)] for d in range(mesh.size("data"))]
    if exchange == "batch":
        return (tuple((Interval(group[0].start, group[-1].stop),) for group in own),)
    if exchange == "rank":
        return tuple(tuple((group[turn],) for group in own) for turn in range(ranks))
    return tuple(tuple(tuple(some(i, turn, ranks) for i in group) for group in own) for turn in range(ranks))


def some(interval: Interval, part: int, parts: int) -> Interval:
    """One of the equal parts of an interval.

    >>> [some(Interval(4, 9), i, 2) for i in range(2)]
    [Interval(start=4, stop=7), Interval(start=7, stop=9)]
    """
    return Cuts.even(interval.size, parts).interval(part).shift(interval.start)


@lru_cache(maxsize=4096)
def routed(layout: Layout, mesh: Mesh, rows: Rows, dim: int, channels: tuple[Interval, ...] | None) -> ExchangeRoute:
    """This rank's part of the exchange from a layout to one turn's images, with some of the channels in dim `dim`."""
    group = mesh.peers(("channel",))
    own = {r: layout.box_at(layout.mesh.coordinates_of(r)) for r in group}
    need = {}
    for rank in group:
        at = mesh.coordinates_of(rank)
        wanted = [tuple(i for i in rows[at["data"]] if i.size), *((i,) for i in own[rank][1:])]
        if channels is not None:
            wanted[dim] = (channels[at["channel"]],)
        need[rank] = tuple(wanted)
    return ExchangeRoute.of(mesh.rank, own, need)


@lru_cache(maxsize=4096)
def group_layout(layout: Layout, mesh: Mesh, rows: Rows, dim: int, width: int) -> Layout:
    """The layout of a turn's piece on the mesh with the channel axis: cut over data only, and as before in space."""
    cuts = Cuts.of((0, *accumulate(sum(i.size for i in intervals) for intervals in rows)))
    grouped = replace(
        layout.with_cut(0, cuts, cuts.extent),
        mesh=mesh,
        images=tuple(sorted({**dict(layout.images), "data": cuts}.items())),
    )
    return grouped.with_cut(dim, layout.cuts[dim], width) if layout.cuts[dim] is None else grouped


@lru_cache(maxsize=4096)
def home_layout(layout: Layout, made: Layout, dim: int, width: int) -> Layout:
    """The layout of the whole layer's result: its images where the input's are, all channels on every rank."""
    return replace(
        made.with_cut(dim, None, width).with_cut(0, layout.cuts[0], layout.shape[0]),
        mesh=layout.mesh,
        axes=("data", *made.axes[1:]),
        images=layout.images,
    )


class _Shared(torch.autograd.Function):
    """A parameter's share as the layer uses it; its gradient is divided by the ranks of the channel axis.

    Every rank differentiates its own copy of the loss, so a share's gradients, summed over the ranks that hold it, are
    the gradient times the number of all ranks. Their mean is the gradient times the size of the channel axis, since
    each of its ranks holds another share.
    """

    @staticmethod
    def forward(ctx: Any, share: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        # Bypasses the check for uses of a share outside its layer: this is the layer.
        with torch._C.DisableTorchFunction():
            return share.view_as(share)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.ranks, None


def shared(parameter: nn.Parameter, mesh: Mesh) -> Tensor:
    """A parameter's share for use in its layer."""
    return _Shared.apply(parameter, mesh.size("channel"))  # type: ignore[no-any-return]
