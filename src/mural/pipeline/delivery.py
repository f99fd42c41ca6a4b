"""Delivery: a tensor on the ranks of one stage, brought to the ranks of another, whatever their grids are.

A `TensorForm` says what the receivers have to know of a tensor; it is learned once. From it both sides derive the
layouts here and there, and from these the boxes that travel between each pair of ranks:

    stage 0 on ranks 0, 1        stage 1 on rank 2
    ┌────────┐ rows 0 to 4
    │ rank 0 │ ─────────────┐   ┌────────┐
    ├────────┤              ├──▶│ rank 2 │
    │ rank 1 │ ─────────────┘   └────────┘
    └────────┘ rows 4 to 8

Where several ranks hold the same piece, a receiver takes it from the one with the same coordinates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache

import torch
from torch import Tensor

from mural.errors import LayoutError
from mural.geometry import Cuts, Move, moves, needs_of
from mural.ranks import AXES, Mesh
from mural.shard import ShardedTensor
from mural.shard.layout import Layout

HEADER_BYTES = 4096
Bounds = tuple[int, ...]


@dataclass(frozen=True)
class TensorForm:
    """What a receiver has to know of a tensor: its global shape and type, and along which axes it was cut, where.

    `plain` tensors are whole on every rank and not of the image: numbers made of parameters, or of nothing.
    """

    shape: tuple[int, ...]
    dtype: str
    plain: bool
    axes: tuple[str | None, ...]
    cuts: tuple[Bounds | None, ...]
    images: tuple[tuple[str, Bounds], ...]
    folds: tuple[int, ...] = ()

    @classmethod
    def of(cls, tensor: Tensor) -> TensorForm:
        """The form of a tensor as this stage holds it."""
        name = str(tensor.dtype).removeprefix("torch.")
        if not isinstance(tensor, ShardedTensor):
            shape = tuple(tensor.shape)
            return cls(shape, name, True, (None,) * len(shape), (None,) * len(shape), ())
        place = tensor.placement
        cuts = tuple(None if c is None else tuple(c.bounds) for c in place.cuts)
        images = tuple((axis, tuple(c.bounds)) for axis, c in place.images)
        return cls(place.shape, name, False, place.axes, cuts, images, tuple(tensor.folds))

    @property
    def type(self) -> torch.dtype:
        """The type of its values."""
        return getattr(torch, self.dtype)

    def packed(self) -> Tensor:
        """The form as a message."""
        text = json.dumps(asdict(self)).encode()
        if len(text) > HEADER_BYTES:
            raise LayoutError(
                f"a tensor of shape {self.shape} has too many parts to be described in {HEADER_BYTES} bytes"
            )
        return torch.tensor(list(text.ljust(HEADER_BYTES)), dtype=torch.uint8)

    @classmethod
    def unpacked(cls, message: Tensor) -> TensorForm:
        """The form in a message."""
        found = json.loads(bytes(message.cpu().tolist()).decode())
        return cls(
            tuple(found["shape"]),
            found["dtype"],
            found["plain"],
            tuple(found["axes"]),
            tuple(None if c is None else tuple(c) for c in found["cuts"]),
            tuple((axis, tuple(c)) for axis, c in found["images"]),
            tuple(found["folds"]),
        )

    def layout(self, mesh: Mesh, align: int = 1) -> Layout:
        """How the tensor is cut over a mesh: as it was where the mesh has as many ranks along an axis, else evenly."""
        images = {axis: on_mesh(bounds, mesh, axis, align) for axis, bounds in self.images}
        kept = tuple(sorted(images.items()))
        plain = Layout(mesh, self.shape, self.axes, (None,) * len(self.shape), kept)
        cuts: list[Cuts | None] = []
        for dim, (axis, bounds) in enumerate(zip(self.axes, self.cuts, strict=True)):
            if axis is not None and bounds is not None and len(bounds) - 1 == mesh.size(axis):
                cuts.append(Cuts.of(bounds))
            else:
                cuts.append(plain.cut_for(dim, self.shape[dim]) if axis in images else None)
        return Layout(mesh, self.shape, self.axes, tuple(cuts), kept)

    def tensor(self, local: Tensor, layout: Layout) -> Tensor:
        """A piece as the tensor that this form describes."""
        return local if self.plain else ShardedTensor(local, layout, "", self.folds)


def on_mesh(bounds: Bounds, mesh: Mesh, axis: str, align: int) -> Cuts:
    """The cuts of an image along an axis of a mesh, which may have another number of ranks."""
    if len(bounds) - 1 == mesh.size(axis):
        return Cuts.of(bounds)
    return Cuts.even(bounds[-1], mesh.size(axis), 1 if axis == "data" else align)


@lru_cache(maxsize=4096)
def delivery(rank: int, have: Layout, need: Layout) -> tuple[Move, ...]:
    """What a rank sends and receives, one box at most for each peer; what it has itself comes from itself."""
    owners = ranks_of(have.mesh)
    found: list[Move] = []
    for taker, place in ranks_of(need.mesh).items():
        held = {giver: have.box_at(owners[giver]) for giver in nearest(owners, have, place, taker)}
        found += moves(held, {taker: needs_of(need.box_at(place))}, rank)
    return tuple(found)


def ranks_of(mesh: Mesh) -> dict[int, dict[str, int]]:
    """The ranks of a mesh and their places on it; those of other times are none."""
    return {rank: mesh.coordinates_of(rank) for rank in mesh.ranks or range(mesh.world) if rank >= 0}


def nearest(owners: Mapping[int, Mapping[str, int]], have: Layout, place: Mapping[str, int], taker: int) -> list[int]:
    """The owners of disjoint pieces that a rank takes from: of those with the same piece, itself or its counterpart."""
    cut = set(have.axes_of(range(have.ndim)))
    free = [axis for axis in AXES if axis not in cut]
    mesh = have.mesh
    wanted = owners.get(taker) or {axis: place[axis] % mesh.size(axis) for axis in AXES}
    return [rank for rank, at in owners.items() if all(at[axis] == wanted[axis] for axis in free)]
