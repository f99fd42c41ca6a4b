"""Which calls of a streamed model run on whole tensors, which values are kept between passes, and where.

A value that is kept is computed once and read by later passes; one that is not is computed again in each. On the device
there is room for some; the others go to the host and come back, which takes time on the link while the device computes.
So the choice is by time: beginning with everything that a norm measures, values are left out and taken in again one by
one, the largest first, as long as that makes more of it fit or the step faster. Where not everything fits, a second
choice begins with nothing and takes the value that saves most for its bytes; the better one counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import inf, prod

from mural.errors import PlanError
from mural.graph.nodes import Place
from mural.graph.work_and_depth import work
from mural.memory.joined_passes import Joins, joined_passes
from mural.memory.passes import StreamPass, passes_of, plain_before
from mural.memory.tile_calls import TileGraph

LOOSE = 4
"""How many times the positions of a tile a whole tensor may have."""
SHARE = 0.14
"""The part of all results that may be kept where nothing says how much memory there is."""
SWEEPS = 4
"""How often all values are tried."""
MOST_TRIED = 48
"""How many values are tried, the largest ones."""
FEW = 24
"""Of so many values, all are looked at again after each that is taken."""


@dataclass(frozen=True)
class Speeds:
    """What the choice reckons with: operations and bytes a second on the device, and bytes a second over the link."""

    flops: float = 6.5e14
    memory: float = 3.6e12
    link: float = 5.0e10


@dataclass(frozen=True)
class Room:
    """How many bytes kept values may take on the device and on the host, and how many bytes a number has.

    Without a number for the device: a part of what a step in one piece would keep. `bands` are bytes on the device
    through which values pass on their way to the host and back.
    """

    device: int | None = None
    host: int = 0
    itemsize: int = 4
    speeds: Speeds = Speeds()
    bands: int = 0


@dataclass(frozen=True)
class Kept:
    """The values that are kept, and those of them that are on the host, which pass through `bands` bytes here."""

    values: frozenset[Place] = frozenset()
    host: frozenset[Place] = frozenset()
    bands: int = 0


def whole_calls(graph: TileGraph, tile: Sequence[int]) -> frozenset[int]:
    """The calls that run on whole tensors: those that cannot run on tiles, what lies between them, and what comes after
    them at no higher resolution.
    """
    refused = [c for c in graph.calls if c.refused]
    if not refused:
        return frozenset()
    room = LOOSE * prod(tile)
    for call in refused:
        largest = max((positions(graph, p) for p in call.node.reads), default=0)
        if largest > room:
            raise PlanError(
                f"{call.refused}. It would have to see a whole tensor of {largest:,} positions, more than {LOOSE} "
                f"tiles of {tuple(tile)}: raise stream, or move it to a lower resolution"
            )
    limit = max(positions(graph, p) for c in refused for p in c.node.reads)
    down = {c.node.id for c in refused}
    for call in graph.calls:
        if any(s in down for s in call.node.inputs) and all(positions(graph, p) <= limit for p in call.node.makes):
            down.add(call.node.id)
    up = {c.node.id for c in refused}
    for call in reversed(graph.calls):
        if call.node.id in up:
            up |= {s for s in call.node.needs if isinstance(s, int)}
    between = {i for i in down if i in up}
    after = {i for i in down if all(positions(graph, p) <= limit for p in graph.calls[i].node.reads)}
    return frozenset(between | after | {c.node.id for c in refused})


def plain_at(graph: TileGraph, place: Place) -> bool:
    """Whether a value comes from a call on plain tensors, which every pass makes anew."""
    return isinstance(place[0], int) and graph.calls[place[0]].plain


def positions(graph: TileGraph, place: Place) -> int:
    """How many positions of the image a value has."""
    value = graph.values[place]
    return prod(n for a, n in value.extents.items() if a != "data") if value.tiled else 1


class KeptChoice:
    """Chooses the values that are kept."""

    def __init__(self, graph: TileGraph, whole: Collection[int], room: Room, delivered: bool = False):
        self.graph, self.whole, self.room = graph, frozenset(whole), room
        made = {p for c in graph.calls if c.node.id not in self.whole for p in c.node.makes}
        written = {s for c in graph.calls for s in c.node.writes}
        reading = self.whole | plain_before(graph, self.whole)
        needed = {p for i in reading for p in graph.calls[i].node.reads if p in made and not plain_at(graph, p)}
        outputs = {p for o in graph.graph.outputs if (p := (o.source, o.pick)) in made and any(graph.values[p].axes)}
        self.needed = frozenset(needed | outputs)
        """What has to be kept: what whole calls read, and results."""
        read = {p for one in passes_of(graph, self.needed, whole).passes for p in one.reads} if delivered else outputs
        self.delivered = frozenset(outputs - read)
        """Results that leave with their tile: no later pass reads them."""
        here = [c for c in graph.calls if c.node.id not in self.whole]
        wanted = {c.node.reads[0] for c in here if c.norm}
        smaller = {
            c.node.makes[0] for c in here
            if c.windows and positions(graph, c.node.makes[0]) < positions(graph, c.node.reads[0])
        }  # fmt: skip
        self.candidates = (
            frozenset(p for p in (wanted | smaller if wanted else ()) if p in made and p[0] not in written)
            - self.needed
        )
        """What may be kept: what norms measure, and what a call makes smaller."""

    def choose(self, keep: str | None = None) -> Kept:
        """The values that are kept; `keep` may be "all" or "none" of what norms measure."""
        if keep == "none" or not self.candidates:
            return self._placed(self.needed)
        kept: frozenset[Place] = self.needed | self.candidates
        if keep == "all":
            return Kept(kept)
        order = sorted(self.candidates, key=lambda p: (-self.bytes_of(p), str(p)))[:MOST_TRIED]
        starts = [kept] if not self._price(kept)[0] else [kept, self._filled(order)]
        found = [self._refined(start, order) for start in starts]
        return self._placed(min(found, key=self._price))

    def _filled(self, order: Sequence[Place]) -> frozenset[Place]:
        """As much as fits, beginning with nothing: each time the value that saves most for its bytes."""
        kept, best = self.needed, self._price(self.needed)
        last = dict.fromkeys(order, inf)
        while last:
            place = max(last, key=lambda p: last[p])
            if last.pop(place) <= 0:
                break
            price = self._price(kept | {place})
            saves = (best[1] - price[1]) / max(1, self.bytes_of(place)) if price[0] <= best[0] else -1.0
            if saves < max(last.values(), default=0.0):
                last[place] = saves  # those that seemed to save more come first
            elif saves > 0:
                kept, best = kept | {place}, price
                last = dict.fromkeys(last, inf) if len(order) <= FEW else last
        return kept

    def _refined(self, kept: frozenset[Place], order: Sequence[Place]) -> frozenset[Place]:
        """What is kept after all changes that make it better."""
        best = self._price(kept)
        tight = best[0] > 0
        for _ in range(SWEEPS):
            before = best
            kept, best = self._improved(kept, best, [{place} for place in order])
            if best == before and tight:  # a value may have to make room for another
                kept, best = self._improved(kept, best, [{a, b} for a, b in combinations(order, 2)], swaps=True)
            if best == before:
                break
        return kept

    def _improved(
        self, kept: frozenset[Place], best: tuple[int, float], changes: Sequence[set[Place]], swaps: bool = False
    ) -> tuple[frozenset[Place], tuple[int, float]]:
        """What is kept after the changes that make it better, one after the other."""
        for change in changes:
            if swaps and len(change & kept) != 1:
                continue
            price = self._price(kept ^ change)
            if price < best:
                kept, best = kept ^ change, price
        return kept, best

    def _price(self, kept: Collection[Place]) -> tuple[int, float]:
        """What is to be as small as possible: bytes that do not fit on the host, then seconds."""
        placed = self._placed(kept)
        passes = passes_of(self.graph, placed.values, self.whole)
        joins = joined_passes(passes)
        most = self._hosted(placed, passes.passes, joins)
        return max(0, most - self.room.host), self._seconds(placed, passes.passes, joins)

    def bytes_of(self, place: Place) -> int:
        """The size of a value."""
        value = self.graph.values[place]
        return prod(value.shape) * min(value.dtype.itemsize, self.room.itemsize)

    def _hosted(self, kept: Kept, passes: Sequence[StreamPass], joins: Joins) -> int:
        """Bytes on the host: values, and gradients of those that several passes find. Others take a value's place."""
        times = Counter(place for one in passes if not joins.skips(one) for place in one.reads)
        return sum(self.bytes_of(p) * (2 if times[p] > 1 else 1) for p in kept.host)

    def _placed(self, kept: Collection[Place]) -> Kept:
        """Where values are: on the device as far as there is room, the smallest first."""
        here, host = list[int](), set[Place]()
        for place in sorted(set(kept) - self.delivered, key=lambda p: (self.bytes_of(p), str(p))):
            # A value goes when its gradient is complete: at most one is there next to all values.
            fits = sum(here) + 2 * self.bytes_of(place) <= self._device_room
            if fits or "spatial0" not in self.graph.values[place].axes:
                here.append(self.bytes_of(place))
            else:
                host.add(place)
        return Kept(frozenset(kept), frozenset(host), self.room.bands if host else 0)

    @cached_property
    def _device_room(self) -> int:
        if self.room.device is not None:
            return self.room.device
        made = (p for c in self.graph.calls for p in c.node.makes if self.graph.values[p].tiled)
        return int(SHARE * sum(map(self.bytes_of, made)))

    # -- time ----------------------------------------------------------------------------------------------------------

    @cached_property
    def _costs(self) -> Mapping[int, tuple[float, float]]:
        """Seconds of each call on the whole image, forward and backward."""
        speeds = self.room.speeds
        found: dict[int, tuple[float, float]] = {}
        for call, cost in zip(self.graph.calls, work(self.graph.graph).nodes, strict=True):
            places = [p for p in (*call.node.reads, *call.node.makes) if any(self.graph.values[p].axes)]
            moved = sum(map(self.bytes_of, places)) / speeds.memory
            forward = cost.products / speeds.flops + moved
            found[call.node.id] = forward, 2 * forward
        return found

    def _seconds(self, placed: Kept, found: Sequence[StreamPass], joins: Joins) -> float:
        """The time of a step."""
        total, later = 0.0, set[Place]()
        for one, before, after in reversed(list(zip(found, (None, *found), (*found[1:], None), strict=False))):
            total += self._pass_seconds(one, before, after, later, placed, joins)
            later |= set(one.reads)
        return total

    def _pass_seconds(
        self, one: StreamPass, before: StreamPass | None, after: StreamPass | None, later: set[Place], kept: Kept,
        joins: Joins,
    ) -> float:  # fmt: skip
        """The time of a pass, forward and backward, between its neighbours; gradients of what is read `later` are
        there in backward, and are added to.
        """
        forward = sum(self._costs[c.node.id][0] for c in one.calls)
        backward = sum(self._costs[c.node.id][1] for c in one.calls)

        def seconds(places: Iterable[Place]) -> float:
            return sum(self.bytes_of(p) for p in places if p in kept.host) / self.room.speeds.link

        def new(places: Iterable[Place]) -> float:
            """What the sweep before has just sent to the host, as far as it is still here."""
            return min(kept.bands / self.room.speeds.link, seconds(places))

        read, made, reads = seconds(one.reads), seconds(one.keeps), set(one.reads)
        there = new(reads.intersection(before.keeps if before else ()))
        first = 0.0 if after is None else max(forward, read - there, made)
        if joins.skips(one):
            return first
        if (join := joins.of(one)) is not None:
            first += max(forward + sum(self._costs[c.node.id][1] for c in join.rest) / 2, read + made)
        fresh = {*one.keeps, *reads.intersection(later)}.intersection(after.reads if after else ())
        return first + max(forward + backward, read + made + seconds(reads & later) - new(fresh), read)


def pass_weight(one: StreamPass, graph: TileGraph) -> float:
    """The bytes that the calls of a pass make, for each position of the image."""
    image = max(positions(graph, (value.name, 0)) for value in graph.graph.inputs)
    sizes = (prod(v.shape) * v.dtype.itemsize for c in one.calls for p in c.node.makes if (v := graph.values[p]).axes)
    return sum(sizes) / image
