"""Passes: how often the tiles of an image are gone through, what each pass computes, and what is kept in between.

A value is computed in the first pass in which everything that it depends on is known: the total of a sum or a norm is
known after the pass that measured it, and a kept value can be read in the passes after the one that made it. What is
not kept is computed again wherever it is needed.

    pass 0   image ── conv ── y, kept          measures the norm of y
    pass 1   y ── norm ── relu ── conv ── z    measures the norm of z
    pass 2   y ── norm ── relu ── conv ── norm ── … ── loss

Backward goes through the passes in reverse: each is a function from what it reads (kept values, totals, parameters) to
what it makes (kept values, totals), and gradients of what it makes become gradients of what it reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from mural.errors import UnsupportedOp
from mural.graph.nodes import Node, Place, Source
from mural.memory.tile_calls import TileCall, TileGraph

TotalKey = tuple[int, int]
"""A total: the id of the call that asks for it, and which of the call's totals it is."""


@dataclass(frozen=True)
class StreamPass:
    """One pass: its calls in order, the values that it reads and keeps, and the totals that it measures.

    `whole` says that it runs once, on whole tensors. `uses` are the totals that it takes as known. Its tiles are those
    of the pass `like`, if there is one.
    """

    number: int
    calls: tuple[TileCall, ...]
    reads: tuple[Place, ...]
    keeps: tuple[Place, ...]
    measures: tuple[TotalKey, ...]
    uses: tuple[TotalKey, ...]
    whole: bool = False
    like: int | None = None

    @cached_property
    def measured_calls(self) -> frozenset[int]:
        """The calls that measure something here."""
        return frozenset(call for call, _ in self.measures)

    def groups(self, blocks: Mapping[int, str]) -> Iterator[tuple[list[TileCall], bool]]:
        """Its calls in order, in groups, and whether backward computes a group again: one of the blocks by call.

        Calls can be made twice if they keep and measure nothing, and write to nothing from outside.
        """
        for block, group in groupby(self.calls, key=lambda call: blocks.get(call.node.id)):
            calls = list(group)
            inside = {c.node.id for c in calls}
            once = inside & self.measured_calls or any(p in self.keeps for c in calls for p in c.node.makes)
            yield calls, block is not None and not once and all(inside.issuperset(c.node.writes) for c in calls)

    @cached_property
    def written(self) -> frozenset[int | str]:
        """The tensors that its calls write to."""
        return frozenset(source for call in self.calls for source in call.node.writes)

    @cached_property
    def writers(self) -> dict[int, Node]:
        """Its calls that write, by id."""
        return {call.node.id: call.node for call in self.calls if call.node.writes}

    @cached_property
    def written_first(self) -> frozenset[Source]:
        """Of the tensors that its calls write to, those that are no views of others."""
        made = {call.node.id: call.node for call in self.calls}
        found = ((s, one) for one in self.writers.values() for s in one.writes if s in made)
        return frozenset(s for s, one in found if not any(p in one.writes for p in made[int(s)].inputs))

    @cached_property
    def learning(self) -> tuple[str, ...]:
        """The buffers that its calls write to."""
        return tuple(sorted(source for source in self.written if isinstance(source, str)))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The inputs, parameters, buffers and constants that its calls read."""
        places = (place for call in self.calls for place in call.node.reads)
        return tuple(dict.fromkeys(source for source, _ in places if isinstance(source, str)))

    @cached_property
    def last_use(self) -> dict[Place, int]:
        """For each tensor, the last call that reads it."""
        return {place: call.node.id for call in self.calls for place in call.node.reads}


@dataclass(frozen=True)
class Passes:
    """All passes over a graph, and the calls that remain once all totals are known."""

    graph: TileGraph
    passes: tuple[StreamPass, ...]
    tail: tuple[TileCall, ...]
    kept: frozenset[Place]


def passes_of(graph: TileGraph, kept: Iterable[Place], whole: Iterable[int] = ()) -> Passes:
    """The passes over a graph that keeps these values between them, and runs these calls on whole tensors."""
    return _Planner(graph, frozenset(kept), frozenset(whole)).plan()


def plain_before(graph: TileGraph, calls: Iterable[int]) -> set[int]:
    """The calls on plain tensors that some calls read from, near or far: each pass makes them anew."""
    found: set[int] = set()
    todo = list(calls)
    while todo:
        for source in graph.calls[todo.pop()].node.inputs:
            if isinstance(source, int) and graph.calls[source].plain and source not in found:
                found.add(source)
                todo.append(source)
    return found


class _Planner:
    """Finds when each value can be computed."""

    def __init__(self, graph: TileGraph, kept: frozenset[Place], whole: frozenset[int]):
        self.graph, self.kept, self.whole = graph, kept, whole
        self.made: dict[Place, int] = {place: 0 for place in graph.values if isinstance(place[0], str)}
        self.first: dict[int, int] = {}  # the pass in which a call's first totals are measured, or it runs
        self.call_of = {place: call for call in graph.calls for place in call.node.makes}
        self.inputs = {(value.name, 0) for value in graph.graph.inputs}

    def _stored(self, place: Place) -> bool:
        """Whether a value is read from where it is kept, and not computed in the pass that needs it."""
        call = self.call_of.get(place)
        return call is not None and (place in self.kept or call.node.id in self.whole)

    def _use(self, place: Place) -> int:
        """The first pass that can use a value: the one that makes it, unless that runs on whole tensors."""
        call = self.call_of.get(place)
        return self.made[place] + (1 if call is not None and call.node.id in self.whole else 0)

    def plan(self) -> Passes:
        for call in self.graph.calls:
            self._check_aliases(call)
            self._time(call)
        tiles = 1 + max((self.made[p] for p in self.kept if self.call_of[p].node.id not in self.whole), default=-1)
        tiles = max([tiles, *(self.first[c.node.id] + c.rounds for c in self.graph.calls if self._reduces(c))])
        wholes = {self.first[i] for i in self.whole}
        passes: list[StreamPass] = []
        for number in range(max([tiles, *(w + 1 for w in wholes)])):
            found = self._pass(number)
            passes += [found] if found.calls else []
            passes += [self._whole_pass(number)] if number in wholes else []
        return Passes(self.graph, tuple(passes), self._tail(), self.kept)

    def _reduces(self, call: TileCall) -> bool:
        return bool(call.levels) and call.node.id not in self.whole

    def _time(self, call: TileCall) -> None:
        node = call.node
        if node.id in self.whole:
            same = [p for p in node.reads if (c := self.call_of.get(p)) is not None and c.node.id in self.whole]
            others = [self.made[p] + (p in self.kept) for p in node.reads if p not in same]
            at = max([0, *others, *(self.made[p] for p in same)])
        else:
            before = [i for i in node.after if i not in self.whole and not self._only_learns(self.graph.calls[i])]
            at = max([0, *map(self._use, node.reads), *(self.first[i] for i in before)])
        self.first[node.id] = at
        done = at + (call.rounds if self._reduces(call) else 0)
        self.made.update(dict.fromkeys(node.makes, done))

    def _pass(self, number: int) -> StreamPass:
        here = [p for p in self.kept if self.made[p] == number and self.call_of[p].node.id not in self.whole]
        keeps = tuple(sorted(here, key=str))
        measuring = [
            c for c in self.graph.calls
            if self._reduces(c) and self.first[c.node.id] <= number < self.first[c.node.id] + c.rounds
        ]  # fmt: skip
        measures = tuple(
            (c.node.id, k)
            for c in measuring
            for k, level in enumerate(c.levels)
            if self.first[c.node.id] + level == number
        )
        targets = [self.call_of[p] for p in keeps] + measuring
        calls, reads = self._closure(number, targets, {c.node.id for c in measuring})
        uses = tuple(
            (c.node.id, k)
            for c in calls
            for k, level in enumerate(c.levels)
            if self._reduces(c) and self.first[c.node.id] + level < number
        )
        return StreamPass(number, calls, reads, keeps, measures, uses)

    def _closure(
        self, number: int, targets: Sequence[TileCall], measuring: set[int]
    ) -> tuple[tuple[TileCall, ...], tuple[Place, ...]]:
        """The calls that the targets need, and the values that those read from elsewhere."""
        found: dict[int, TileCall] = {}
        reads: dict[Place, None] = {}
        todo = list(targets)
        while todo:
            call = todo.pop()
            if call.node.id in found:
                continue
            found[call.node.id] = call
            if self._reduces(call) and not call.norm and call.node.id not in measuring:
                continue  # its totals are known: they do not depend on the tile
            for place in call.node.reads:
                other = self.call_of.get(place)
                if other is None:
                    if place in self.inputs:
                        reads[place] = None
                elif self._stored(place) and (self.made[place] < number or other.node.id in self.whole):
                    reads[place] = None
                else:
                    todo.append(other)
            before = (self.graph.calls[i] for i in call.node.after if i not in self.whole)
            todo += [other for other in before if not self._only_learns(other)]
        return tuple(found[i] for i in sorted(found)), tuple(reads)

    def _only_learns(self, call: TileCall) -> bool:
        """Whether a call writes running buffers alone, which no call of the step reads."""
        writes = call.node.writes
        return bool(writes) and all(isinstance(s, str) and (s, 0) not in self.inputs for s in writes)

    def _whole_pass(self, number: int) -> StreamPass:
        chosen = {i for i in self.whole if self.first[i] == number}
        chosen |= plain_before(self.graph, chosen) - self.whole
        calls = tuple(self.graph.calls[i] for i in sorted(chosen))
        own = {place for call in calls for place in call.node.makes}
        taken = dict.fromkeys(p for c in calls for p in c.node.reads if p not in own)
        reads = tuple(p for p in taken if p in self.call_of or p in self.inputs)
        for place in reads:
            if place in self.call_of and not self._stored(place):
                raise RuntimeError(f"{self.call_of[place].node.site!r} is read by a whole pass, and not kept")
        self._check_written(calls, chosen)
        inside = {p for c in calls for p in c.node.reads}
        read_later = {p for c in self.graph.calls if c not in calls for p in c.node.reads}
        read_later |= {(o.source, o.pick) for o in self.graph.graph.outputs}
        keeps = tuple(p for p in sorted(own, key=str) if p in read_later or p in self.kept or p not in inside)
        return StreamPass(number, calls, reads, keeps, (), (), whole=True)

    def _check_aliases(self, call: TileCall) -> None:
        """Raise if a call reads what was written in place through another tensor, and passes hold the two apart.

        A value that is kept is read anew, with the views of it that a pass makes; a view that is kept is on its own.
        """
        here = call.node.id in self.whole
        for place in call.node.reads:
            if place not in self.call_of and place not in self.inputs:
                continue
            for writer in (self.graph.calls[i].node for i in call.node.after):
                if place[0] not in writer.writes:
                    continue
                self._check_slices(writer, call.node, place)
                kept = {s for s in writer.writes for p in self.graph.values if p[0] == s and self._stored(p)}
                apart = not kept.issubset([first_of(writer.writes)])
                if (writer.id not in self.whole) if here else (writer.id in self.whole or apart):
                    raise UnsupportedOp(
                        f"{writer.op} at {writer.site!r} writes in place to memory that {call.node.op} at "
                        f"{call.node.site!r} reads through another tensor, in another pass: use the operation that "
                        f"returns a new tensor"
                    )

    def _check_slices(self, writer: Node, reader: Node, place: Place) -> None:
        """Raise if one of the two sees a slice of the image, which a tile has as a copy, and the other does not.

        x[:, :, ::2] *= 2 reads a slice, writes to it and puts it back, by an assignment.
        """
        if any(c.node.op == "__setitem__" and writer.id in c.node.inputs for c in self.graph.calls):
            return
        written = {s for p in writer.reads if p[0] in writer.writes for s in self._slices(p, writer)}
        if written != self._slices(place, writer) and not {writer.id, reader.id} & self.whole:
            raise UnsupportedOp(
                f"{writer.op} at {writer.site!r} writes in place to a slice of the image, and {reader.op} at "
                f"{reader.site!r} reads what it is a slice of: a tile has slices as copies. Assign to it, as by "
                f"x[:, :, ::2] = …, or use the operation that returns a new tensor"
            )

    def _slices(self, place: Place, writer: Node) -> set[int]:
        """The slices of the image that a tensor is made by, of the memory that a call writes to."""
        found: set[int] = set()
        call = self.call_of.get(place)
        while call is not None:
            shared = [p for p in call.node.reads if p[0] in writer.writes]
            found |= {call.node.id} if shared and call.windows else set()
            call = self.call_of.get(shared[0]) if shared else None
        return found

    def _check_written(self, calls: Sequence[TileCall], chosen: set[int]) -> None:
        """Raise if a call writes to memory that tensors from elsewhere share: each of them is read by itself."""
        for call in calls:
            node = call.node
            if len({s for s in node.writes if s not in chosen and (isinstance(s, int) or (s, 0) in self.inputs)}) > 1:
                raise UnsupportedOp(
                    f"{node.op} at {node.site!r} writes in place to a view of a tensor, between calls that see whole "
                    f"tensors: write to a copy, or use the operation that returns a new tensor"
                )

    def _tail(self) -> tuple[TileCall, ...]:
        """The calls that make the results that are no tiles, once all totals are known."""
        outputs = [(o.source, o.pick) for o in self.graph.graph.outputs]
        ends = [self.call_of[p] for p in outputs if p in self.call_of and not any(self.graph.values[p].axes)]
        found: dict[int, TileCall] = {}
        todo = [c for c in ends if c.node.id not in self.whole]
        while todo:
            call = todo.pop()
            if call.node.id in found:
                continue
            found[call.node.id] = call
            if self._reduces(call):
                continue
            for place in call.node.reads:
                other = self.call_of.get(place)
                if place in self.inputs or (other is not None and other.node.id in self.whole):
                    raise UnsupportedOp(
                        f"{call.node.op} at {call.node.site!r} takes a value without dims of batch or image out of "
                        f"{place[0] if other is None else other.node.site!r}: keep the dim of the batch until a sum "
                        f"or a mean, as by x[:1] for x[0]"
                    )
                if other is not None:
                    todo.append(other)
            todo += [self.graph.calls[i] for i in call.node.after if i not in self.whole]
        return tuple(found[i] for i in sorted(found))


def first_of(sources: Sequence[Source]) -> Source | None:
    """The source of the tensor that the others are views of: an input, or what was made first."""
    named = [s for s in sources if isinstance(s, str)]
    return named[0] if named else min(sources, key=int, default=None)
