"""What one tile computes, as a function: tensors go in, tensors come out, and nothing else lasts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from mural.geometry import Box
from mural.graph.nodes import Place
from mural.memory.passes import StreamPass, TotalKey
from mural.memory.tile_calls import TileValue
from mural.memory.tile_needs import Needs
from mural.memory.tile_task import Chunk, Coordinates, TileTask
from mural.shard.autocasting import casts
from mural.shard.tensor import local_of
from mural.shard.tiles import OwnMoments, tile_of

ADD: Any = torch.ops.aten._foreach_add_.List
"""Adds tensors to others, all at once."""
TotalAt = tuple[TotalKey, Chunk]
"""A total, and the images that it is of."""


@dataclass(frozen=True)
class Wanted:
    """Whose gradients are wanted of a tile: windows, parameters and totals."""

    windows: tuple[Place, ...] = ()
    held: tuple[str, ...] = ()
    known: tuple[TotalAt, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.windows or self.held or self.known)


@dataclass(frozen=True)
class TileGiven:
    """All tensors that a tile depends on, and whose gradients are wanted of it."""

    windows: Mapping[Place, Tensor]
    held: Mapping[str, Tensor]
    """Parameters, buffers and constants by name."""
    known: Mapping[TotalAt, Tensor]
    """The totals that are known."""
    wanted: Wanted = Wanted()
    grads: Mapping[Place, Tensor] = field(default_factory=dict[Place, Tensor])
    """The gradients of what it keeps."""
    adjoints: Mapping[TotalAt, Tensor] = field(default_factory=dict[TotalAt, Tensor])
    """The gradients of the totals that it adds to."""
    sums: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Where it adds the gradients of parameters that are wanted."""

    @property
    def tensors(self) -> list[Tensor]:
        """All of them, in a fixed order."""
        return [tensor for part in self._parts for tensor in part.values()]

    @property
    def steady(self) -> list[tuple[int, Hashable, bool]]:
        """Which of `tensors` are the same for all tiles of a sweep, as long as they are of one image: their places and
        names, and whether they are at the same address in each step.
        """
        places, found = count(), list[tuple[int, Hashable, bool]]()
        for part, kind in zip(self._parts, ("", "held", "known", "", "adjoints", ""), strict=True):
            for name, place in zip(part, places, strict=False):
                stays = kind == "held"
                found += [(place, (kind, name if stays else (name[0], name[1] is None)), stays)] if kind else []
        return found

    @property
    def names(self) -> tuple[Any, ...]:
        """What `tensors` are and whose gradients are wanted, whichever image they are of."""
        windows, held, known, grads, adjoints, _ = map(tuple, self._parts)
        totals = (tuple((key, chunk is None) for key, chunk in part) for part in (known, adjoints, self.wanted.known))
        return windows, held, grads, self.wanted.windows, self.wanted.held, *totals

    @property
    def form(self) -> Hashable:
        """What decides which of its results have gradients, and of which types they are."""
        return self.names, tuple((t.dtype, t.requires_grad) for t in self.tensors), casts()

    def with_leaves(self) -> TileGiven:
        """The same, where windows and totals whose gradients are wanted are leaves; parameters are."""
        windows = {p: leaf(t) if p in self.wanted.windows else t for p, t in self.windows.items()}
        return replace(self, windows=windows, known={k: leaf(t) if k in self.wanted.known else t
                                                     for k, t in self.known.items()})  # fmt: skip

    @property
    def _parts(self) -> tuple[Mapping[Any, Tensor], ...]:
        return self.windows, self.held, self.known, self.grads, self.adjoints, self.sums


@dataclass(frozen=True)
class TileMade:
    """What comes out of a tile: values to keep and parts of totals, or sums and the gradients that are wanted.

    Those of parameters are added where the tile was told to.
    """

    sums: Mapping[TotalKey, Tensor]
    kept: Mapping[Place, Tensor] = field(default_factory=dict[Place, Tensor])
    moments: Mapping[TotalKey, Tensor] = field(default_factory=dict[TotalKey, Tensor])
    norms: Mapping[TotalKey, OwnMoments] = field(default_factory=dict[TotalKey, OwnMoments])
    """What knows how to merge the moments, without the tile."""
    of_windows: Mapping[Place, Tensor] = field(default_factory=dict[Place, Tensor])
    of_known: Mapping[TotalAt, Tensor] = field(default_factory=dict[TotalAt, Tensor])
    """Gradients."""
    added: tuple[str, ...] = ()
    """The parameters that have one."""


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
        given = given.with_leaves()
        return self.made(given, self.run(given))

    def run(self, given: TileGiven) -> TileTask:
        """The tile after its calls."""
        written = self.one.written
        windows: dict[Place, Tensor] = {}
        for place, window in given.windows.items():
            box, value = self.needs.window(self.one, place, self.at), self.needs.graph.values[place]
            windows[place] = as_tile(value, box or (), window.clone() if place[0] in written else window)
        task = TileTask(
            self.one, self.at, self.needs, windows, given.held, given.known, self.axes_of_totals, self.before_random,
            self.device, self.blocks,
        )  # fmt: skip
        with torch.set_grad_enabled(bool(given.wanted)):
            task.run()
        return task

    def made(self, given: TileGiven, task: TileTask) -> TileMade:
        """What comes out of a tile that has run."""
        sums = {key: part.detach() for key, part in task.sums.items()}
        if given.wanted:
            return TileMade(sums, **self._gradients(given, task))
        kept = {place: local_of(tile).detach() for place, tile in task.kept.items()}
        moments = {key: own.moments() for key, own in task.moments.items()}
        return TileMade(sums, kept, moments, {key: own.without_values() for key, own in task.moments.items()})

    def _gradients(self, given: TileGiven, task: TileTask) -> dict[str, Any]:
        """What the tile contributes to the gradients that are wanted."""
        wanted = given.wanted
        windows, held, known = gradients_of(
            self._roots(given, task),
            {p: given.windows[p] for p in wanted.windows},
            {n: given.held[n] for n in wanted.held},
            {k: given.known[k] for k in wanted.known},
        )
        if held:
            ADD([given.sums[name] for name in held], list(held.values()))
        return {"of_windows": windows, "of_known": known, "added": tuple(held)}

    def _roots(self, given: TileGiven, task: TileTask) -> list[tuple[Tensor, Tensor]]:
        """Where backward begins: at what the tile kept, and at its parts of totals."""
        roots = [(local_of(tile), given.grads[place]) for place, tile in task.kept.items() if place in given.grads]
        for key, part in task.sums.items():
            if (key, task.chunk(key)) in given.adjoints:
                roots.append((part, given.adjoints[key, task.chunk(key)]))
        for key, own in task.moments.items():
            at = (key, task.chunk(key))
            if at in given.adjoints:
                roots.append((own.values, own.gradient(given.adjoints[at], given.known[at])))
        return [(tensor, grad) for tensor, grad in roots if tensor.requires_grad]


def gradients_of(
    roots: Sequence[tuple[Tensor, Tensor]], *leaves: Mapping[Any, Tensor]
) -> tuple[dict[Any, Tensor], ...]:
    """The gradients of leaves by their names, kind by kind, from those of roots; leaves without one are left out."""
    wanted = [tensor for part in leaves for tensor in part.values()]
    if not roots or not wanted:
        return tuple({} for _ in leaves)
    tensors, grads = zip(*roots, strict=True)
    found: Iterator[Any] = iter(torch.autograd.grad(tensors, wanted, grads, allow_unused=True))
    return tuple({n: grad for n, grad in zip(part, found, strict=False) if grad is not None} for part in leaves)


def leaf(tensor: Tensor) -> Tensor:
    """The same numbers, as something that has a gradient."""
    return tensor.detach().requires_grad_()


def as_tile(value: TileValue, box: Box, local: Tensor) -> Tensor:
    """The part of a value at a box as a tile; as it is, if the value is plain."""
    spans = {a: i for a, i in zip(value.axes, box, strict=False) if a is not None}
    return tile_of(local, value.shape, value.axes, spans, value.folds) if value.axes else local
