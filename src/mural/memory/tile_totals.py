"""Totals: what was added up over all tiles of all ranks, and the gradients that came back for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mural.comm import stack
from mural.memory.passes import TotalKey
from mural.memory.tile_task import Chunk
from mural.ranks import Mesh


@dataclass
class Totals:
    """What was added up over all tiles: values, and the gradients that came back for them."""

    mesh: Mesh
    axes: dict[TotalKey, tuple[str, ...]] = field(default_factory=dict[TotalKey, "tuple[str, ...]"])
    values: dict[tuple[TotalKey, Chunk], Tensor] = field(default_factory=dict[tuple[TotalKey, Chunk], Tensor])
    adjoints: dict[tuple[TotalKey, Chunk], Tensor] = field(default_factory=dict[tuple[TotalKey, Chunk], Tensor])
    differentiable: set[TotalKey] = field(default_factory=set[TotalKey])

    def over_ranks(self, key: TotalKey, parts: Tensor) -> Tensor:
        """The parts of all ranks along the axes of a total, (ranks, …)."""
        mesh = self.mesh
        axes = [a for a in self.axes[key] if mesh.size(a) > 1]
        return stack(parts, mesh.peers(axes), mesh.rank, mesh.transport, "totals of tiles")

    def add_adjoint(self, key: TotalKey, chunk: Chunk, grad: Tensor) -> None:
        """Add a tile's gradient of a total."""
        held = self.adjoints.get((key, chunk))
        self.adjoints[key, chunk] = grad if held is None else held + grad


def in_order(item: tuple[tuple[TotalKey, Chunk], Any]) -> tuple[TotalKey, int]:
    """Totals in the order of their calls and images."""
    (key, chunk), _ = item
    return key, -1 if chunk is None else chunk
