"""What a tile of a pass needs: the interval of every value along each axis, from the last call back to the first.

The axes are independent of each other, so needs are found for each coordinate of the grid of tiles along one axis.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from mural.geometry import Box, Cuts, Interval, Reads
from mural.graph.nodes import Place
from mural.memory.passes import Passes, StreamPass
from mural.memory.tile_calls import TileCall
from mural.shard.layout import Want

B = TypeVar("B", "Box", "Box | None")
MOST_BOXES = 50_000
"""How many boxes of tiles are remembered: those that come first."""


@dataclass(frozen=True, eq=False)
class Form:
    """What tiles have in common that compute the same in different places; its hash is computed once."""

    parts: tuple[Any, ...]

    @cached_property
    def _hash(self) -> int:
        return hash(self.parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Form) and self.parts == other.parts)


@dataclass(frozen=True)
class TileGrid:
    """How an image is cut into tiles along each axis, and which of them are this rank's: `first` to `last` - 1."""

    cuts: Mapping[str, Cuts]
    first: Mapping[str, int]
    last: Mapping[str, int]
    ranks: Mapping[str, tuple[tuple[int, int], ...]]
    """The first and last tile of each rank along an axis."""

    def of_rank(self, axis: str, coordinate: int) -> TileGrid:
        """The same grid, of another rank along one axis."""
        first, last = self.ranks[axis][coordinate]
        return replace(self, first={**self.first, axis: first}, last={**self.last, axis: last})

    def own(self, axis: str, extent: int, coordinate: int) -> Interval:
        """The positions that belong to a tile alone, of a tensor with that extent."""
        return self.cuts[axis].scaled(extent).interval(coordinate)

    def coordinates(self, axis: str) -> range:
        """This rank's tiles along an axis."""
        return range(self.first[axis], self.last[axis])

    def here(self, axis: str, extent: int) -> Interval:
        """The positions that belong to this rank."""
        cuts = self.cuts[axis].scaled(extent)
        return Interval(cuts.bounds[self.first[axis]], cuts.bounds[self.last[axis]])


@dataclass
class AxisNeeds:
    """What one coordinate of an axis needs: an interval for each value, and what each windowed rule computes."""

    values: dict[Place, Interval] = field(default_factory=dict[Place, Interval])
    windows: dict[int, tuple[Interval, ...]] = field(default_factory=dict[int, "tuple[Interval, ...]"])

    def add(self, place: Place, need: Interval) -> None:
        """Need more of a value."""
        held = self.values.get(place)
        self.values[place] = need if held is None else hull(held, need)


def hull(a: Interval, b: Interval) -> Interval:
    """The smallest interval around both; an empty one adds nothing."""
    if not a.size or not b.size:
        return a if a.size else b
    return Interval(min(a.start, b.start), max(a.stop, b.stop))


class Needs:
    """What every tile of every pass needs on this rank.

    A kept value is computed for all positions that this rank reads of it, its own and a margin that other ranks
    compute too; `region` says which.
    """

    def __init__(self, passes: Passes, grid: TileGrid, grids: Mapping[int, TileGrid] | None = None):
        self.passes, self.grid, self.graph = passes, grid, passes.graph
        self.grids = grids or {}
        """The grids of passes whose tiles are of another size."""
        self._found: dict[tuple[int, str, int], AxisNeeds] = {}
        self._forms: dict[tuple[int, str, int], Form] = {}
        self._boxes: dict[Hashable, Box | None] = {}
        """Boxes that were asked for: each step asks for the same ones."""
        self._regions: dict[tuple[Place, str], Interval] = {}
        for one in reversed(passes.passes):
            self._settle(one)

    def _settle(self, one: StreamPass) -> None:
        """The regions of what a pass reads: those of what it keeps are known from the passes after it."""
        for place in one.reads:
            for axis, extent in self.graph.values[place].extents.items():
                if one.whole:
                    need = self.grid.here(axis, extent)
                else:
                    at = self.grid_of(one).coordinates(axis)
                    spans = [self.along(one, axis, c).values.get(place) for c in at]
                    need = Interval(0, 0)
                    for span in spans:
                        need = need if span is None else hull(need, span)
                held = self._regions.get((place, axis), Interval(0, 0))
                self._regions[place, axis] = hull(held, need)

    def grid_of(self, one: StreamPass) -> TileGrid:
        """The tiles of a pass."""
        return self.grids.get(one.number if one.like is None else one.like, self.grid)

    def region(self, place: Place, axis: str) -> Interval:
        """The positions of a value that this rank reads, and its own."""
        own = self.grid.here(axis, self.graph.values[place].extents[axis])
        return hull(own, self._regions.get((place, axis), own))

    def regions(self, place: Place, axis: str) -> tuple[Interval, ...]:
        """The region of a value of each rank along an axis."""
        ranks = range(len(self.grid.ranks[axis]))
        if len(ranks) == 1:
            return (self.region(place, axis),)
        found: list[Interval] = []
        for c in ranks:
            others = {number: grid.of_rank(axis, c) for number, grid in self.grids.items()}
            found.append(Needs(self.passes, self.grid.of_rank(axis, c), others).region(place, axis))
        return tuple(found)

    def wants(self, place: Place) -> tuple[Want, ...]:
        """The regions of a value of all ranks."""
        value = self.graph.values[place]
        axes = value.axes or (None,) * len(value.shape)
        return tuple(
            (None, ((Interval(0, n),),)) if a is None else (a, tuple((i,) for i in self.regions(place, a)))
            for a, n in zip(axes, value.shape, strict=True)
        )

    def kept(self, one: StreamPass, place: Place, axis: str, coordinate: int) -> Interval:
        """The positions of a kept value that a tile computes: its own, and at the rank's rim the margin."""
        grid = self.grid_of(one)
        own = grid.own(axis, self.graph.values[place].extents[axis], coordinate)
        region, at = self.region(place, axis), grid.coordinates(axis)
        start = region.start if coordinate == at[0] else own.start
        return Interval(start, region.stop if coordinate == at[-1] else own.stop)

    def uncut(self, call: TileCall) -> tuple[str, ...]:
        """The axes of the grid that cut nothing of what a call reads: along them, all tiles hold the same."""
        axes = {axis for place in call.node.reads for axis in self.graph.values[place].extents}
        return tuple(axis for axis in self.grid.cuts if axis not in axes)

    # -- boxes ---------------------------------------------------------------------------------------------------------

    def region_box(self, place: Place) -> Box:
        """The positions of a value that this rank reads, and its own, in all dims."""
        value = self.graph.values[place]
        return value.box({a: self.region(place, a) for a in value.extents})

    def kept_box(self, one: StreamPass, place: Place, at: Mapping[str, int]) -> Box:
        """The positions of a kept value that a tile computes, in all dims."""
        key = ("kept", one.number, place, *at.items())
        if (known := self._boxes.get(key)) is not None:
            return known
        value = self.graph.values[place]
        return self._noted(key, value.box({a: self.kept(one, place, a, at[a]) for a in value.extents if a in at}))

    def window(self, one: StreamPass, place: Place, at: Mapping[str, int]) -> Box | None:
        """What a tile reads of a value; None for nothing."""
        key = ("read", one.number, place, *at.items())
        return self._boxes[key] if key in self._boxes else self._noted(key, self._window(one, place, at))

    def _noted(self, key: Hashable, box: B) -> B:
        """A box, which is remembered."""
        if len(self._boxes) < MOST_BOXES:
            self._boxes[key] = box
        return box

    def _window(self, one: StreamPass, place: Place, at: Mapping[str, int]) -> Box | None:
        value = self.graph.values[place]
        spans: dict[str, Interval] = {}
        for axis in value.extents:
            found = self.along(one, axis, at[axis]).values.get(place) if axis in at else None
            if found is None:
                return None
            spans[axis] = found
        return value.box(spans)

    # -- needs ---------------------------------------------------------------------------------------------------------

    def along(self, one: StreamPass, axis: str, coordinate: int) -> AxisNeeds:
        """What a coordinate of an axis needs in a pass."""
        key = (one.number, axis, coordinate)
        if key not in self._found:
            self._found[key] = self._walk(one, axis, coordinate)
        return self._found[key]

    def form(self, one: StreamPass, axis: str, coordinate: int) -> Form:
        """All that a coordinate needs, with positions counted from its own: equal where the same is computed."""
        key = (one.number, axis, coordinate)
        if key not in self._forms:
            self._forms[key] = self._form(one, axis, coordinate)
        return self._forms[key]

    def _form(self, one: StreamPass, axis: str, coordinate: int) -> Form:
        needs, grid, values = self.along(one, axis, coordinate), self.grid_of(one), self.graph.values

        def seen(extent: int, *parts: Interval) -> tuple[Any, ...]:
            own = grid.own(axis, extent, coordinate)
            return tuple((i.start - own.start, i.size, i.start == 0, i.stop == extent) for i in (own, *parts))

        found: list[Any] = [(p, seen(values[p].extents[axis], i)) for p, i in needs.values.items()]
        if any(axis in self.uncut(self.graph.calls[number]) for number in one.measured_calls):
            found.append(coordinate == 0)  # whose part counts
        kept = (p for p in one.keeps if axis in values[p].extents)
        found += [(p, seen(values[p].extents[axis], self.kept(one, p, axis, coordinate))) for p in kept]
        for call in one.calls:
            outs = needs.windows.get(call.node.id, ())
            for window, out in zip(call.windows, outs, strict=False):
                reads = dict(window).get(axis)
                if reads is not None:
                    read = reads.reads(out) if out.size else ()
                    found.append((call.node.id, seen(reads.out_extent, out), seen(reads.extent, *read)))
        return Form(tuple(found))

    def _walk(self, one: StreamPass, axis: str, coordinate: int) -> AxisNeeds:
        needs = AxisNeeds()
        values = self.graph.values
        for place in one.keeps:
            if axis in values[place].extents:
                needs.add(place, self.kept(one, place, axis, coordinate))
        for call in reversed(one.calls):
            measuring = call.node.id in one.measured_calls
            if call.levels and not call.norm and not measuring:
                continue
            out = Interval(0, 0)
            for place in call.node.makes:
                out = hull(out, needs.values.get(place, Interval(0, 0)))
            if measuring or call.shaped:
                for place in call.node.reads:
                    extent = values[place].extents.get(axis)
                    if extent is not None:
                        needs.add(place, self.grid_of(one).own(axis, extent, coordinate))
            if not call.levels or call.norm:
                self._through(call, axis, out, needs)
            self._written(one, call, axis, needs)
        return needs

    def _written(self, one: StreamPass, call: TileCall, axis: str, needs: AxisNeeds) -> None:
        """What a call reads, those that wrote to it through other tensors have to have written."""
        for writer in (one.writers[i] for i in call.node.after if i in one.writers):
            for place in call.node.reads:
                need = needs.values.get(place)
                if need is None or place[0] not in writer.writes:
                    continue
                for made in writer.makes:
                    if self.graph.values[made].extents.get(axis) == self.graph.values[place].extents.get(axis):
                        needs.add(made, need)

    def _through(self, call: TileCall, axis: str, out: Interval, needs: AxisNeeds) -> None:
        """What a call reads for an interval of its output."""
        made = [self.graph.values[p].extents.get(axis) for p in call.node.makes]
        read = [self.graph.values[p].extents.get(axis) for p in call.node.reads]
        dropped = 1 in read and not any(made) and len(self.grid.ranks[axis]) == 1
        if dropped:  # a dim that its results do not have, as that of a batch of one: they have all of it
            out = Interval(0, 1)
        chain = [reads for window in call.windows for reads in (dict(window).get(axis),)]
        if call.beside:
            outs = [needs.values.get(place, Interval(0, 0)) for place in call.node.makes]
            out = Interval(0, 0)
            for reads, each in zip(chain, outs, strict=True):
                out = hull(out, each if reads is None or not each.size else read_by(reads, each))
        else:
            outs = []
            for reads in reversed(chain):
                outs.insert(0, out)
                if reads is not None and out.size:
                    out = read_by(reads, out)
        needs.windows[call.node.id] = tuple(outs)
        for place, extent in zip(call.node.reads, read, strict=True):
            if extent is not None and (chain or dropped or extent in made):
                needs.add(place, out)


def read_by(reads: Reads, out: Interval) -> Interval:
    """The interval around everything that a window reads for an output interval."""
    found = Interval(0, 0)
    for part in reads.reads(out):
        found = hull(found, part)
    return found


def grid_of(extents: Mapping[str, int], tile: Mapping[str, int], ranks: Mapping[str, tuple[Cuts, int]]) -> TileGrid:
    """The grid of tiles of that size; each rank's own part of an axis is cut by itself.

    >>> grid = grid_of({"spatial0": 10}, {"spatial0": 4}, {})
    >>> grid.cuts["spatial0"].bounds
    (0, 4, 8, 10)
    """
    cuts: dict[str, Cuts] = {}
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    own: dict[str, tuple[tuple[int, int], ...]] = {}
    for axis, extent in extents.items():
        parts, rank = ranks.get(axis, (Cuts.of((0, extent)), 0))
        bounds, size = [0], max(1, tile[axis])
        held: list[tuple[int, int]] = []
        for part in parts.intervals():
            before = len(bounds) - 1
            bounds += [*range(part.start + size, part.stop, size), part.stop]
            held.append((before, len(bounds) - 1))
        own[axis] = tuple(held)
        first[axis], last[axis] = held[rank]
        cuts[axis] = Cuts.of(bounds)
    return TileGrid(cuts, first, last, own)
