"""Tiles that compute the same in different places: their operations are noted once, and run again.

The rules take time in Python for each call, as long as a GPU takes for a small layer. But most tiles of a pass differ
in their place alone. After a few of them, one runs under a tape. Another one, elsewhere along an axis, has to give the
same tape, which shows that nothing depends on the place along that axis. From then on they run from the tape.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mural.memory.fused_steps import fused
from mural.memory.passes import TotalKey
from mural.memory.steady_steps import DividedSteps, SteadyValues, divided
from mural.memory.tape import Replay, Slot, Tape
from mural.memory.tile_function import TileFunction, TileGiven, TileMade
from mural.shard.autocasting import casts, is_autocast, without_autocast
from mural.shard.tiles import OwnMoments

WARM_UP = 2
"""How many tiles of a kind run by the rules before one runs under a tape, which takes longer."""

MOST_KINDS = 10_000
"""How many kinds are known at a time: a model whose buffers are replaced in each step has others in each."""
PARTS = ("sums", "kept", "moments", "of_windows", "of_held")
"""The parts of `TileMade` whose names are those of all tiles of a kind."""
Label = tuple[str, Any]
"""What a tensor is that a tile gives: which part of `TileMade`, and its name there."""


@dataclass(frozen=True)
class Noted:
    """The tape of a tile, and what it gave."""

    tape: Tape
    labels: tuple[Label, ...]
    axes: Mapping[TotalKey, tuple[str, ...]]
    """The axes of the totals that it adds to."""
    norms: Mapping[TotalKey, OwnMoments]

    def same(self, other: Noted) -> bool:
        """Whether another tile did the same."""
        return (self.labels, self.axes) == (other.labels, other.axes) and self.tape.same(other.tape)


@dataclass
class TileKind:
    """Tiles that are one function, as far as geometry tells."""

    seen: int = 0
    noted: Noted | None = None
    place: Mapping[str, int] = field(default_factory=dict[str, int])
    """Where the tile is that was noted."""
    free: set[str] = field(default_factory=set[str])
    """The axes along which nothing depends on the place."""
    differ: bool = False
    """Whether they are not one function, or cannot be noted."""
    steps: DividedSteps | None = None
    replay: Replay | None = None
    """What runs once in a sweep, and what runs in each tile."""

    def unproven(self, place: Mapping[str, int]) -> set[str]:
        """The axes along which a tile is in another place than the one that was noted, and that may matter."""
        return {axis for axis, start in place.items() if self.place.get(axis) != start} - self.free

    def learn(self, noted: Noted, place: Mapping[str, int]) -> None:
        """Take a tape as that of all tiles, or compare it with theirs."""
        if noted.tape.failed:
            self.differ = True
        elif self.noted is None:
            self.noted, self.place = noted, place
        elif self.noted.same(noted):
            self.free |= self.unproven(place)
        else:
            self.differ = True


class RecordedTiles:
    """Runs tiles, by the rules or from tapes."""

    def __init__(self) -> None:
        self.kinds: dict[Hashable, TileKind] = {}
        self.steady = SteadyValues()

    def run(self, tile: TileFunction, given: TileGiven) -> TileMade:
        """What a tile gives."""
        if any(call.random for call in tile.one.calls):
            return tile(given)  # random numbers depend on the place
        if len(self.kinds) > MOST_KINDS:
            self.kinds.clear()
            self.steady.begin(None)
        kind, place = self.kinds.setdefault(key_of(tile, given), TileKind()), tile.place
        kind.seen += 1
        if kind.differ or kind.seen <= WARM_UP:
            return tile(given)
        if kind.noted is not None:
            unproven = kind.unproven(place)
            if not unproven:
                self.steady.begin(tile.one.number)
                return replayed(kind, tile, given, self.steady)
            if len(unproven) > 1:
                return tile(given)  # equal tapes would not say which of them is free
        made, noted = note(tile, given)
        kind.learn(noted, place)
        return made


def key_of(tile: TileFunction, given: TileGiven) -> Hashable:
    """Equal for tiles that can be one function: geometry, the form of all tensors, and buffers that norms update."""
    forms = tuple((axis, tile.needs.form(tile.one, axis, at)) for axis, at in tile.at.items())
    tensors = tuple((tuple(t.shape), t.stride(), t.dtype, t.requires_grad) for t in given.tensors)
    # A norm that is noted knows the buffers in which it learns: others may have taken their place.
    learning = tuple(id(given.held[name]) for name in tile.one.learning if name in given.held)
    modes = is_autocast(tile.device), casts(), torch.are_deterministic_algorithms_enabled()
    return tile.one.number, forms, given.names, tensors, learning, modes


def note(tile: TileFunction, given: TileGiven) -> tuple[TileMade, Noted]:
    """What a tile gives, by the rules, and its tape."""
    tape = Tape(given.tensors)
    with uncached_autocast(), tape:
        made = tile(given)
    found: list[tuple[Label, Tensor]] = [
        ((part, name), tensor) for part in PARTS for name, tensor in getattr(made, part).items()
    ]
    order = list(given.known)  # of which image they are depends on the tile
    found += [(("of_known", order.index(at)), grad) for at, grad in made.of_known.items()]
    tape.end([tensor for _, tensor in found])
    axes = {key: tile.axes_of_totals[key] for key in (*made.sums, *made.moments)}
    return made, Noted(tape, tuple(label for label, _ in found), axes, made.norms)


def replayed(kind: TileKind, tile: TileFunction, given: TileGiven, steady: SteadyValues) -> TileMade:
    """What a tile gives, from the tape."""
    if kind.noted is None:
        raise RuntimeError("there is no tape to run")
    tensors, places = given.tensors, given.steady
    if kind.replay is None or kind.steps is None:
        tape = kind.noted.tape
        kind.steps = divided(fused(tape.steps, tape.results), tape.results, [Slot(i) for i in places])
        kind.replay = tape.replay(kind.steps.each, kind.steps.carried)
    with torch.no_grad(), without_autocast(tile.device):
        known = steady.of(id(kind), kind.steps, [(Slot(i), tensors[i]) for i in places])
        found = kind.replay(*tensors, *known)
    parts: dict[str, dict[Any, Tensor]] = {part: {} for part in (*PARTS, "of_known")}
    order = list(given.known)
    for (part, name), tensor in zip(kind.noted.labels, found, strict=True):
        parts[part][order[name] if part == "of_known" else name] = tensor
    tile.axes_of_totals.update(kind.noted.axes)
    return TileMade(**parts, norms=kind.noted.norms)


@contextmanager
def uncached_autocast() -> Generator[None]:
    """A block in which autocast casts parameters anew: casts from before would come from elsewhere for a tape."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
