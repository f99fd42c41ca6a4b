"""Tiles that compute the same in different places: their operations are noted once, and run again.

The rules take time in Python for each call, as long as a GPU takes for a small layer. But most tiles of a pass differ
in their place alone. The first one runs under a tape. Another one, elsewhere along an axis, has to give the same
tape, which shows that nothing depends on the place along that axis. From then on they run from the tape; on a
GPU, tapes become graphs where they can (`TileGraphs`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mural.memory.fused_steps import fused
from mural.memory.passes import TotalKey
from mural.memory.steady_steps import DividedSteps, SteadyGiven, SteadyValues, divided
from mural.memory.tape import Replay, Slot, Tape
from mural.memory.tile_function import TileFunction, TileGiven, TileMade
from mural.memory.tile_graphs import TileGraphs, can_be_graph
from mural.shard.autocasting import casts, is_autocast, without_autocast
from mural.shard.tiles import OwnMoments

MOST_KINDS = 10_000
"""How many kinds are known at a time: a model whose buffers are replaced in each step has others in each."""
PARTS = ("sums", "kept", "moments", "of_windows")
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
    added: tuple[str, ...]
    """The parameters whose gradients it added up."""

    def same(self, other: Noted) -> bool:
        """Whether another tile did the same."""
        mine, theirs = ((one.labels, one.axes, one.added) for one in (self, other))
        return mine == theirs and self.tape.same(other.tape)

    def made(self, tensors: Sequence[Tensor], tile: TileFunction, given: TileGiven) -> TileMade:
        """What a tile gives, of the tensors that the tape returned."""
        parts: dict[str, dict[Any, Tensor]] = {part: {} for part in (*PARTS, "of_known")}
        order = list(given.known)
        for (part, name), tensor in zip(self.labels, tensors, strict=True):
            parts[part][order[name] if part == "of_known" else name] = tensor
        tile.axes_of_totals.update(self.axes)
        return TileMade(**parts, norms=self.norms, added=self.added)


@dataclass(frozen=True)
class KindProgram:
    """What runs for tiles of a kind: some steps once in a sweep, and a function for each tile."""

    steps: DividedSteps
    replay: Replay
    steady: Sequence[tuple[int, Hashable, bool]]
    """Which of the tensors that are given are the same for all tiles of a sweep, their names, and whether they stay."""
    numbers: Sequence[int]
    """Those of the steps that run once."""
    graphable: bool

    @classmethod
    def of(cls, noted: Noted, given: TileGiven, values: SteadyValues, device: torch.device) -> KindProgram:
        """The program of a tape."""
        tape, steady = noted.tape, given.steady
        steps = divided(fused(tape.steps, tape.results), tape.results, [Slot(at) for at, _, _ in steady])
        numbers = values.numbered(steps, [(Slot(at), name) for at, name, _ in steady])
        graphable = can_be_graph(steps.each, [part for part, _ in noted.labels], given.tensors, device)
        return cls(steps, tape.replay(steps.each, steps.carried), steady, numbers, graphable)


@dataclass
class TileKind:
    """Tiles that are one function, as far as geometry tells."""

    noted: Noted | None = None
    place: Mapping[str, int] = field(default_factory=dict[str, int])
    """Where the tile is that was noted."""
    free: set[str] = field(default_factory=set[str])
    """The axes along which nothing depends on the place."""
    differ: bool = False
    """Whether they are not one function, or cannot be noted."""
    program: KindProgram | None = None
    """What runs for them from the tape."""

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
        self.graphs: TileGraphs | None = None
        self.unsettled = 0
        """How many tiles ran otherwise than later ones of their kind will: by the rules, or to become a graph."""
        self.guesses: dict[Hashable, tuple[TotalKey, Tensor]] = {}
        """Of the last pass: its only total with a gradient, and the guess for it, by what its tiles are given."""

    def run(self, tile: TileFunction, given: TileGiven) -> TileMade:
        """What a tile gives."""
        kind = self._kind(tile, given)
        unproven = set[str]() if kind is None or kind.noted is None else kind.unproven(tile.place)
        if kind is not None and kind.noted is not None and not kind.differ and not unproven:
            return self.replayed(kind, kind.noted, tile, given)
        self.unsettled += kind is not None and not kind.differ
        if self.graphs is not None:
            self.graphs.release()
        if kind is None or kind.differ or len(unproven) > 1:
            return tile(given)  # of several axes, an equal tape would not say along which nothing depends on the place
        made, noted = note(tile, given)
        kind.learn(noted, tile.place)
        return made

    def _kind(self, tile: TileFunction, given: TileGiven) -> TileKind | None:
        """The kind of a tile; None if it has random numbers, which depend on the place."""
        if any(call.random for call in tile.one.calls):
            return None
        if len(self.kinds) > MOST_KINDS:
            self.kinds.clear()
            self.steady.begin(None)
        return self.kinds.setdefault(key_of(tile, given), TileKind())

    def _ready_graphs(self, program: KindProgram) -> TileGraphs | None:
        """The graphs, if a tile is to be one of them."""
        if self.graphs is not None and not program.graphable:
            self.graphs.release()
        return self.graphs if self.graphs is not None and program.graphable and self.graphs.ready() else None

    def replayed(self, kind: TileKind, noted: Noted, tile: TileFunction, given: TileGiven) -> TileMade:
        """What a tile gives, from the tape."""
        if kind.program is None:
            kind.program = KindProgram.of(noted, given, self.steady, tile.device)
        program, graphs = kind.program, self._ready_graphs(kind.program)
        self.steady.begin(tile.one.number, None if graphs is None else graphs.lasting(self))
        tensors, first = given.tensors, len(given.windows)
        with torch.no_grad(), without_autocast(tile.device):
            steady = [SteadyGiven(Slot(at), tensors[at], name, stays) for at, name, stays in program.steady]
            takes = self.steady.of(id(kind), program.steps, program.numbers, steady)
            for (at, _, _), tensor in zip(program.steady, takes, strict=False):
                tensors[at] = tensor
            windows, others = tensors[:first], [*tensors[first:], *takes[len(steady) :]]
            self.unsettled += graphs is not None and not graphs.holds(kind)
            found = None if graphs is None else graphs.run(kind, program.replay, windows, others, given.sums)
            found = program.replay(*windows, *others) if found is None else found
        return noted.made(found, tile, given)


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
    with tape:
        made = tile(given)
    found: list[tuple[Label, Tensor]] = [
        ((part, name), tensor) for part in PARTS for name, tensor in getattr(made, part).items()
    ]
    order = list(given.known)  # of which image they are depends on the tile
    found += [(("of_known", order.index(at)), grad) for at, grad in made.of_known.items()]
    tape.end([tensor for _, tensor in found])
    axes = {key: tile.axes_of_totals[key] for key in (*made.sums, *made.moments)}
    return made, Noted(tape, tuple(label for label, _ in found), axes, made.norms, made.added)
