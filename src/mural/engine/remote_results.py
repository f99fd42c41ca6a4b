"""Results that live on the ranks of the last stage: their pieces there, and the whole wherever it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from mural.engine.extra_state import shared
from mural.engine.stage_ranks import StageRanks
from mural.geometry import Box, Interval
from mural.ranks import Mesh
from mural.shard import ShardedTensor


class StagedTensor(ShardedTensor):
    """A sharded tensor on the last stage's grid; `full` gives the whole tensor to all ranks of the run."""

    world: Mesh

    def full(self) -> Tensor:
        """The whole tensor on every rank of the run, as a plain tensor; collective over all of them."""
        return shared(super().full(), self.world, self.mesh.ranks[0])


@dataclass(frozen=True)
class Elsewhere:
    """What a rank without the last stage has of a result: its shape and type, no piece, and the way to the whole."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    world: Mesh
    owner: int

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @property
    def local(self) -> Tensor:
        """This rank's piece, which is empty."""
        return torch.empty((0,) * self.ndim, dtype=self.dtype, device=self.device)

    @property
    def box(self) -> Box:
        """The place of the empty piece."""
        return (Interval(0, 0),) * self.ndim

    def size(self, dim: int | None = None) -> Any:
        """The global shape, or one extent of it."""
        return self.shape if dim is None else self.shape[dim]

    def full(self) -> Tensor:
        """The whole tensor, as on every rank of the run; collective over all of them."""
        return shared(torch.empty(self.shape, dtype=self.dtype, device=self.device), self.world, self.owner)


def staged(result: Callable[[], Any], stage_ranks: StageRanks, world: Mesh, device: torch.device) -> Any:
    """A model's result as every rank of the run gets it. Collective."""
    if len(stage_ranks.meshes) == 1:
        return result()
    last = stage_ranks.schedule(1).seat_of[0, stage_ranks.plan.stages - 1]
    here, owner = stage_ranks.own == last, stage_ranks.ranks(last)[0]
    found = result() if here else None
    told: list[Any] = [pytree.tree_map(described, found) if here else None]
    dist.broadcast_object_list(told, src=owner, group=world.transport.group)
    if not here:
        return pytree.tree_map(lambda leaf: there(leaf, world, owner, device), told[0])
    return pytree.tree_map(lambda leaf: on_stage(leaf, world, owner), found)


@dataclass(frozen=True)
class Described:
    """What the other ranks have to know of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    sharded: bool


def described(leaf: Any) -> Any:
    """A tensor's description; anything else as it is."""
    if not isinstance(leaf, Tensor):
        return leaf
    return Described(tuple(leaf.shape), leaf.dtype, isinstance(leaf, ShardedTensor))


def there(leaf: Any, world: Mesh, owner: int, device: torch.device) -> Any:
    """A leaf of the result on a rank that does not hold it; a plain tensor comes whole."""
    if not isinstance(leaf, Described):
        return leaf
    found = Elsewhere(torch.Size(leaf.shape), leaf.dtype, device, world, owner)
    return found if leaf.sharded else found.full()


def on_stage(leaf: Any, world: Mesh, owner: int) -> Any:
    """A leaf of the result on a rank that holds a piece of it."""
    if not isinstance(leaf, ShardedTensor):
        return shared(leaf, world, owner) if isinstance(leaf, Tensor) else leaf
    tensor: Any = StagedTensor(leaf.local, leaf.placement, leaf.aliased, leaf.folds)
    tensor.world = world
    return tensor
