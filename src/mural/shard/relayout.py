"""Sharded tensors in another layout, and plain tensors of all ranks, stacked or added up, by messages."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mural.comm import fetch, stack
from mural.errors import UnsupportedOp
from mural.ranks import Mesh
from mural.shard.layout import Layout, Want, route
from mural.shard.tensor import ShardedTensor
from mural.shard.tiles import current_run, pull_tile


def pull(tensor: ShardedTensor, wants: tuple[Want, ...], name: str) -> Tensor:
    """The piece of a tensor that this rank needs, from wherever it is."""
    if tensor.mesh.tiled:
        return pull_tile(tensor, wants, name)
    return fetch(tensor.local, route(tensor.placement, wants), tensor.mesh.transport, name)


def relayout(tensor: ShardedTensor, target: Layout, name: str) -> ShardedTensor:
    """The same tensor in another layout; the very same object if nothing has to move."""
    if target.cuts == tensor.placement.cuts and target.axes == tensor.placement.axes:
        return tensor
    return ShardedTensor(pull(tensor, target.wants(), name), target)


def moves_data(tensor: ShardedTensor, target: Layout) -> bool:
    """Whether a change of layout has to communicate."""
    return not tensor.mesh.tiled and not route(tensor.placement, target.wants()).inside


def gather(tensor: ShardedTensor, dims: Sequence[int], name: str) -> ShardedTensor:
    """The same tensor with some dims whole on every rank."""
    if all(tensor.placement.cuts[d] is None for d in dims):
        return tensor
    return relayout(tensor, tensor.placement.gathered(dims), name)


def merged(value: Tensor, mesh: Mesh, axes: Sequence[str], name: str) -> Tensor:
    """The sum of the tensors of all ranks along those axes, added in the same order, so the same bits on each."""
    if axes and mesh.tiled:
        return current_run().total(value, axes, name)
    return stacked(value, mesh, axes, name).sum(0) if axes else value


def stacked(value: Tensor, mesh: Mesh, axes: Sequence[str], name: str) -> Tensor:
    """The tensors of all ranks along those axes in a new leading dim."""
    if axes and mesh.tiled:
        raise UnsupportedOp(f"{name} compares all positions of the image, which no tile holds: it is not local")
    return stack(value, mesh.peers(axes), mesh.rank, mesh.transport, name)
