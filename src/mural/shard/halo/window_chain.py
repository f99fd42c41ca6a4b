"""Chains: which windowed operations followed which in earlier runs, and which margins would serve them.

A *site* is one windowed operation at one place in the program. The *level* of a later site is the number of exchanges
on the way to it. One wide exchange can serve all sites up to some level.

    level 0            level 1                     level 2
    conv ─ relu ─ pool ─ conv ─ relu ────────────── conv
                      └─ conv k1 (does not exchange: still level 0)

Every rank runs the same operations, so every rank learns the same chains; nothing here depends on one rank's piece.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf, prod
from typing import Any

from mural.geometry import Interval, Reads, Window
from mural.shard.halo.fuse_cost import Constants, FusedLayer, Layer, alone, first_part, together
from mural.shard.halo.margin import Spans, common, covers, hull, own_spans
from mural.shard.layout import Layout

LEVELS = 8
"""The most exchanges that one may replace."""
MEMBERS = 64
"""The most exchanging sites that are considered after one."""
PATIENCE = 2
"""A site that has not followed for this many runs is no longer expected to."""

_serials = count()


@dataclass(eq=False)
class Site:
    """A windowed operation at one place in the program, with the operations that followed it.

    `sources` are the sites whose results it read, through pointwise operations; `followers` gives, for each site that
    read its result, the last run in which it did.
    """

    sources: tuple[Site, ...]
    dims: tuple[Reads, ...]
    have: Layout
    target: Layout
    layer: Layer
    width: int
    """Bytes of one input position, of all channels and images."""
    gradients: bool
    serial: int = field(default_factory=lambda: next(_serials))
    followers: dict[Site, int] = field(default_factory=dict["Site", int])
    runs: int = 0
    changes: int = 0
    plans: dict[Any, Any] = field(default_factory=dict[Any, Any])

    def __post_init__(self) -> None:
        self.top: Site = self.sources[0].top if self.sources else self

    @property
    def own(self) -> Spans:
        """The outputs that every rank owns."""
        return own_spans(self.target)

    def reads(self, outs: Spans) -> Spans:
        """What every rank reads for those outputs; () if some rank reads nothing, or several intervals."""
        found = reads_of(self.dims, outs)
        lead = len(outs) - len(self.dims)
        return found and (*own_spans(self.have)[:lead], *found[lead:])

    def run(self) -> None:
        """Note that the operation runs, and follows its sources.

        Only runs of operations that exchange count: a rank may run others alone.
        """
        if self.layer.exchanges:
            self.runs += 1
            for late in [f for f, last in self.followers.items() if self.runs - last > PATIENCE]:
                del self.followers[late]
                self.top.changes += 1
        for source in self.sources:
            if self not in source.followers:
                source.top.changes += 1
            source.followers[self] = source.runs

    def planned(self, key: Any, make: Any) -> Any:
        """The result of `make()`, cached until the chain changes."""
        found = self.plans.get(key)
        if found is None or found[0] != self.top.changes:
            found = self.plans[key] = self.top.changes, make()
        return found[1]

    def depths(self) -> tuple[tuple[Spans, Spans], ...]:
        """What this operation should compute, and read, so that no site up to level 0, 1, … has to exchange."""
        return self.planned("depths", lambda: _depths(self))

    def within_reach(self, available: Spans) -> tuple[Spans, Spans] | None:
        """The deepest of these that can be had without an exchange, or None."""
        return next((plan for plan in reversed(self.depths()) if plan[1] and covers(available, plan[1])), None)

    def worth(self, constants: Constants | None) -> tuple[Spans, Spans] | None:
        """What to compute and read with one exchange, None if the usual one is best; as deep as possible if forced.

        `constants` None forces it, whatever the cost.
        """
        return self.planned(constants, lambda: _worth(self, constants))


def reads_of(dims: tuple[Reads, ...], outs: Spans) -> Spans:
    """What every rank reads for its outputs along these last dims; () if it is nothing, or several intervals."""
    lead = len(outs) - len(dims)
    found = [[r.reads(o) for o in intervals] for r, intervals in zip(dims, outs[lead:], strict=True)]
    if not all(len(parts) == 1 and parts[0].size for of_dim in found for parts in of_dim):
        return ()
    return (*outs[:lead], *(tuple(parts[0] for parts in of_dim) for of_dim in found))


def new_site(
    sources: tuple[Site, ...],
    dims: tuple[Reads, ...],
    have: Layout,
    target: Layout,
    flops: float,
    width: int,
    gradients: bool,
) -> Site | None:
    """The site of an operation; None if it cannot be one: cut differently from its input, or without positions."""
    if any((a is None) != (b is None) for a, b in zip(have.cuts, target.cuts, strict=True)):
        return None
    lead = have.ndim - len(dims)
    if "data" in have.axes_of(range(lead, have.ndim)):
        return None
    owned, outs = own_spans(have), own_spans(target)
    if not all(i.size for spans in (owned, outs) for intervals in spans for i in intervals):
        return None
    ins = reads_of(dims, outs)
    if not ins:
        return None
    halo = width * (largest(ins, lead) - largest(common(ins, owned), lead))
    pads = any(
        isinstance(w, Window)
        and (w.span(Interval(0, 1)).start < 0 or w.span(Interval(0, w.out_extent)).stop > w.extent)
        for d, w in enumerate(dims, lead)
        if have.is_cut(d)
    )
    layer = Layer(flops, largest(outs, lead), halo, not covers(owned, ins), pads)
    return Site(sources, dims, have, target, layer, width, gradients)


def largest(spans: Spans, lead: int) -> int:
    """The positions of the largest box, without the first `lead` dims."""
    return prod(max(i.size for i in intervals) for intervals in spans[lead:])


def levels_after(site: Site) -> dict[Site, int]:
    """The sites whose input a wide exchange at this one can serve, with their levels; sources come before followers."""
    found = {site: 0}
    queue: list[tuple[int, Site]] = []
    queued = {site}

    def push(of: Site) -> None:
        for follower in of.followers:
            if follower not in queued:
                queued.add(follower)
                heappush(queue, (follower.serial, follower))

    push(site)
    room = MEMBERS
    while queue and room:
        _, follower = heappop(queue)
        if not all(s in found for s in follower.sources):
            continue  # it also reads a tensor that will have no margin
        level = max(found[s] for s in follower.sources) + follower.layer.exchanges
        if level < LEVELS:
            found[follower] = level
            room -= follower.layer.exchanges
            push(follower)
    return found


def needs(members: dict[Site, int], first: int, last: int) -> dict[Site, Spans] | None:
    """What each site at these levels should compute so that those after it need no exchange; None if they must."""
    outs: dict[Site, Spans] = {}
    for site in reversed([s for s, level in members.items() if first <= level <= last]):
        spans = site.own
        for follower in site.followers:
            if follower in outs:
                ins = follower.reads(outs[follower])
                if not ins:
                    return None
                spans = hull(spans, ins)
        outs[site] = spans
    return outs


def _depths(site: Site) -> tuple[tuple[Spans, Spans], ...]:
    members = levels_after(site)
    found: list[tuple[Spans, Spans]] = []
    for last in range(max(members.values()) + 1):
        outs = needs(members, 0, last)
        if outs is None:
            break
        found.append((outs[site], site.reads(outs[site])))
    return tuple(found)


def thin(ins: Spans, owned: Spans) -> bool:
    """Whether some rank's piece has fewer positions than the halo that another one wants."""
    for wanted, own in zip(ins, owned, strict=True):
        reach = max(max(o.start - w.start, w.stop - o.stop) for w, o in zip(wanted, own, strict=True))
        if reach > min(i.size for i in own):
            return True
    return False


def _worth(site: Site, constants: Constants | None) -> tuple[Spans, Spans] | None:
    members = levels_after(site)
    total = max(members.values()) + 1
    piece = largest(own_spans(site.have), site.have.ndim - len(site.dims)) * site.width
    if total == 1 or (constants is not None and piece > constants.piece):
        return None
    price = [
        [_price(members, i, j, constants, site.gradients) if i <= j else inf for j in range(total)]
        for i in range(total)
    ]
    forced = max(j for j in range(total) if price[0][j] < inf)
    last = forced if constants is None else first_part(total, price) - 1
    return site.depths()[last] if last else None


def _price(members: dict[Site, int], first: int, last: int, constants: Constants | None, gradients: bool) -> float:
    """The price of levels first, …, last as one part; infinite if they cannot share an exchange."""
    costs = constants or Constants(piece=inf)
    starts = [s for s, level in members.items() if level == first and s.layer.exchanges]
    if first == last:
        return sum(alone(s.layer, costs, gradients) for s in starts)
    outs = needs(members, first, last)
    if outs is None:
        return inf
    parts: list[FusedLayer] = []
    for site, spans in outs.items():
        ins, owned, lead = site.reads(spans), own_spans(site.have), site.have.ndim - len(site.dims)
        if not ins or (site in starts and thin(ins, owned)):
            return inf
        read = largest(ins, lead)
        halo = site.width * (read - largest(common(ins, owned), lead)) if site in starts else None
        parts.append(FusedLayer(site.layer, largest(spans, lead) - site.layer.outputs, read * site.width, halo))
    return together(parts, costs, gradients)
