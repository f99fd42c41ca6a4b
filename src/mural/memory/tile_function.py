"""What one tile computes, as a function: tensors go in, tensors come out, and nothing else lasts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mural.geometry import Box
from mural.graph.nodes import Place
from mural.memory.passes import StreamPass, TotalKey
from mural.memory.tile_calls import TileValue
from mural.memory.tile_needs import Needs
from mural.memory.tile_task import Chunk, Coordinates, TileTask
from mural.shard.tiles import OwnMoments, tile_of

TotalAt = tuple[TotalKey, Chunk]
"""A total, and the images that it is of."""
Leaf = Place | str | TotalAt
"""What may have a gradient: a window, a parameter by its name, a total."""


@dataclass(frozen=True)
class TileGiven:
    """All tensors that a tile depends on, and whose gradients are wanted of it."""

    windows: Mapping[Place, Tensor]
    held: Mapping[str, Tensor]
    """Parameters, buffers and constants by name."""
    known: Mapping[TotalAt, Tensor]
    """The totals that are known."""
    wanted: tuple[Leaf, ...] = ()
    grads: Mapping[Place, Tensor] = field(default_factory=dict[Place, Tensor])
    """The gradients of what it keeps."""
    adjoints: Mapping[TotalAt, Tensor] = field(default_factory=dict[TotalAt, Tensor])
    """The gradients of the totals that it adds to."""

    @property
    def tensors(self) -> list[Tensor]:
        """All of them, in a fixed order."""
        return [tensor for part in self._parts for tensor in part.values()]

    @property
    def names(self) -> tuple[Any, ...]:
        """What `tensors` are and whose gradients are wanted, whichever image they are of."""
        return tuple(tuple(map(nameless, part)) for part in (*self._parts, self.wanted))

    @property
    def _parts(self) -> tuple[Mapping[Any, Tensor], ...]:
        return self.windows, self.held, self.known, self.grads, self.adjoints


@dataclass(frozen=True)
class TileMade:
    """What comes out of a tile: values to keep and parts of totals; where gradients are wanted, sums and gradients."""

    kept: Mapping[Place, Tensor]
    sums: Mapping[TotalKey, Tensor]
    moments: Mapping[TotalKey, Tensor]
    gradients: Mapping[Leaf, Tensor]
    norms: Mapping[TotalKey, OwnMoments]
    """What knows how to merge the moments, without the tile."""


@dataclass(frozen=True)
class TileFunction:
    """One tile of one pass."""

    one: StreamPass
    at: Coordinates
    needs: Needs
    axes_of_totals: dict[TotalKey, tuple[str, ...]]
    before_random: Callable[[int], None]
    device: torch.device
    blocks: Mapping[int, str]

    @property
    def place(self) -> dict[str, int]:
        """Where it begins along each axis."""
        cuts = self.needs.grid_of(self.one).cuts
        return {axis: cuts[axis].bounds[at] for axis, at in self.at.items()}

    def __call__(self, given: TileGiven) -> TileMade:
        """All that comes out."""
        return self.made(given, *self.run(given))

    def run(self, given: TileGiven) -> tuple[TileTask, dict[Leaf, Tensor]]:
        """The tile after its calls, and the leaves whose gradients are wanted."""
        wanted, written = set(given.wanted), {s for call in self.one.calls for s in call.node.writes}
        leaves: dict[Leaf, Tensor] = {name: given.held[name] for name in given.held if name in wanted}

        def leaf(name: Leaf, tensor: Tensor) -> Tensor:
            if name in wanted:
                tensor = leaves[name] = tensor.detach().requires_grad_()
            return tensor

        windows: dict[Place, Tensor] = {}
        for place, window in given.windows.items():
            local = leaf(place, window)
            box, value = self.needs.window(self.one, place, self.at), self.needs.graph.values[place]
            windows[place] = as_tile(value, box or (), local.clone() if place[0] in written else local)
        known = {at: leaf(at, total) for at, total in given.known.items()}
        task = TileTask(
            self.one, self.at, self.needs, windows, given.held, known, self.axes_of_totals, self.before_random,
            self.device, self.blocks,
        )  # fmt: skip
        with torch.set_grad_enabled(bool(wanted)):
            task.run()
        return task, leaves

    def made(self, given: TileGiven, task: TileTask, leaves: Mapping[Leaf, Tensor]) -> TileMade:
        """What comes out of a tile that has run."""
        sums = {key: part.detach() for key, part in task.sums.items()}
        if leaves:
            return TileMade({}, sums, {}, self._gradients(given, task, leaves), {})
        kept = {place: tile.local.detach() for place, tile in task.kept.items()}
        moments = {key: own.moments() for key, own in task.moments.items()}
        return TileMade(kept, sums, moments, {}, {key: own.without_values() for key, own in task.moments.items()})

    def _gradients(self, given: TileGiven, task: TileTask, leaves: Mapping[Leaf, Tensor]) -> dict[Leaf, Tensor]:
        """What the tile contributes to the gradients of its leaves."""
        roots = self._roots(given, task)
        if not roots:
            return {}
        tensors, grads = zip(*roots, strict=True)
        found = torch.autograd.grad(tensors, list(leaves.values()), grads, allow_unused=True)
        return {name: grad for name, grad in zip(leaves, found, strict=True) if grad is not None}

    def _roots(self, given: TileGiven, task: TileTask) -> list[tuple[Tensor, Tensor]]:
        """Where backward begins: at what the tile kept, and at its parts of totals."""
        roots = [(tile.local, given.grads[place]) for place, tile in task.kept.items() if place in given.grads]
        for key, part in task.sums.items():
            if (key, task.chunk(key)) in given.adjoints:
                roots.append((part, given.adjoints[key, task.chunk(key)]))
        for key, own in task.moments.items():
            at = (key, task.chunk(key))
            if at in given.adjoints:
                roots.append((own.values, own.gradient(given.adjoints[at], given.known[at])))
        return [(tensor, grad) for tensor, grad in roots if tensor.requires_grad]


def nameless(name: Leaf) -> Any:
    """A name without the number of an image."""
    return (name[0], name[1] is None) if isinstance(name[0], tuple) else name


def as_tile(value: TileValue, box: Box, local: Tensor) -> Tensor:
    """The part of a value at a box as a tile; as it is, if the value is not cut."""
    spans = {a: i for a, i in zip(value.axes, box, strict=False) if a is not None}
    return tile_of(local, value.shape, value.axes, spans, value.folds) if spans else local
