"""Windows that depend on data: every rank determines what it reads, and tells the others."""

from __future__ import annotations

import torch
from torch import Tensor

from mural.comm import fetch
from mural.comm.exchange import ExchangeRoute
from mural.geometry import Box, Interval, slices
from mural.shard.layout import Layout
from mural.shard.relayout import pull, stacked
from mural.shard.tensor import ShardedTensor


def fetched(x: ShardedTensor, mine: Box, name: str) -> Tensor:
    """The part of a tensor at the box that this rank requests; every rank requests its own."""
    layout, mesh = x.placement, x.mesh
    axes = layout.axes_of(range(layout.ndim))
    asked = stacked(torch.tensor([list(interval) for interval in mine]), mesh, axes, name).tolist()
    places = {rank: layout.box_at(mesh.coordinates_of(rank)) for rank in mesh.peers(axes)}
    needs = {rank: tuple((Interval(int(a), int(b)),) for a, b in box) for rank, box in zip(places, asked, strict=True)}
    plan = ExchangeRoute.of(mesh.rank, places, needs)
    return fetch(x.local, plan, mesh.transport, name)


def part_at(tensor: Tensor, layout: Layout, name: str) -> Tensor:
    """This rank's piece of a sharded tensor in another layout, or of one that every rank holds whole."""
    if isinstance(tensor, ShardedTensor):
        return pull(tensor, layout.wants(), name)
    return tensor[slices(layout.box)]


def empty_piece(layout: Layout, first: Tensor, *others: Tensor) -> Tensor:
    """The empty piece of a rank without outputs, of the first tensor's type and connected to all tensors.

    It saves a tensor, as the kernels of its peers do: a checkpoint recomputes when backward first needs a saved tensor,
    with its exchanges, and that must happen at the same point on every rank.
    """
    nothing = sum((other.sum().to(first.dtype) for other in others), first.sum())
    return first.new_zeros(layout.local_shape) + nothing * first.new_zeros(())
