"""The work of a streamed step, before it runs: operations, bytes on the device and over the link, pixels, and seconds.

A tile computes more than its own part, as windows overlap. Along each axis, what all tiles together compute of a value
is a sum of intervals; the axes are independent of each other, so a call's work is that on the whole image, times

    Π over axes ( Σ over tiles of the positions computed / the extent )
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch

from mural.cost.call_features import CallFeatures, work_of
from mural.cost.channels_last import channels_last_seconds
from mural.cost.fitted_model import Phase, load
from mural.cost.hardware import Hardware
from mural.geometry import Interval
from mural.graph.differentiable import differentiable
from mural.graph.nodes import Node, Place
from mural.memory.joined_passes import joined_passes
from mural.memory.passes import Passes, StreamPass
from mural.memory.stream_memory import StreamPeak
from mural.memory.sweep_costs import StreamCost, SweepCost
from mural.memory.sweeps import Sweep
from mural.memory.tile_calls import TileCall, TileValue
from mural.memory.tile_needs import AxisNeeds, Needs, hull
from mural.ranks.mesh import SPATIAL

NOTHING = Interval(0, 0)
HOST_TILE, HOST_FORWARD, HOST_BACKWARD = 1.0e-3, 0.6e-4, 1.3e-4
"""Seconds that the host takes for a tile, and for each of its calls if it runs from a tape and not as a graph: on the
host of an H200, with a frozen U-Net in tiles of 640."""
KERNEL, KERNELS_FORWARD, KERNELS_BACKWARD = 3e-6, 1.3, 2.7
"""Seconds that a kernel takes at least, with the gap after it, and how many a call has: those of the same tiles."""
START = 0.1
"""Seconds in which a step begins: the model is captured again, and the first window is read."""
CROPS = 1.08
"""How much longer tiles take that are cut along several axes: parts of tensors are copied, and copied back."""


Works = list[tuple[CallFeatures, float]]
"""Calls on a tile, and how many such tiles there are."""


def stream_cost(
    passes: Passes, needs: Needs, peak: StreamPeak, *, lower: torch.dtype | None = None,
    hosted: Collection[Place] = (), hardware: Hardware | None = None, channels_last: bool = False,
    blocks: Mapping[int, str] | None = None, bands: int = 0,
) -> StreamCost:  # fmt: skip
    """The cost of a step with the sweeps and types that were found with its peak; see `stream_peak`.

    What is on the host passes through `bands` bytes. What a sweep read or wrote last is still there when the next one
    begins, but for the room that windows under way take; and as much as then has room can come before.
    """
    tools = _SweepCosts(passes, needs, peak.kept, lower, frozenset(hosted), hardware, channels_last, blocks or {})
    found: list[SweepCost] = []
    sent = Sent(bands)
    for sweep in peak.sweeps:
        found.append(tools.cost(sweep, sweep.one, sent))
        sent = sent.after(sweep)
    return StreamCost(tuple(found), bands, START if hardware is not None and hardware.kind == "cuda" else 0.0)


@dataclass(frozen=True)
class Sent:
    """What was sent to the host: values, and gradients (True), by all sweeps and by the last one; what that one read or
    sent; and for how many bytes of it there is room here.
    """

    bands: int
    ever: frozenset[tuple[Place, bool]] = frozenset()
    last: frozenset[tuple[Place, bool]] = frozenset()
    near: frozenset[tuple[Place, bool]] = frozenset()

    def after(self, sweep: Sweep) -> Sent:
        """After another sweep."""
        return Sent(self.bands, self.ever | sweep.writes, sweep.writes, sweep.reads | sweep.writes)


class Moved(NamedTuple):
    """Bytes of kept values, and of gradients: from the host, to it, and copied on the device."""

    inward: float
    outward: float
    copied: float
    early: float
    """Those from the host that have room here while the sweep before goes on, and that it does not write."""


@dataclass(frozen=True)
class TileWork:
    """A call on one tile, and how many such tiles all tiles together make; 0 for a call that need not run."""

    call: TileCall
    node: Node
    times: float
    share: float
    """What all tiles compute, over the whole image."""


class _SweepCosts:
    """Works out the cost of sweeps."""

    def __init__(
        self, passes: Passes, needs: Needs, types: Mapping[Place, torch.dtype], lower: torch.dtype | None,
        hosted: frozenset[Place], hardware: Hardware | None, channels_last: bool, blocks: Mapping[int, str],
    ):  # fmt: skip
        self.passes, self.needs, self.types, self.lower = passes, needs, types, lower
        self.hosted, self.hardware, self.channels_last, self.blocks = hosted, hardware, channels_last, blocks
        self.values, self.joins = passes.graph.values, joined_passes(passes)
        self.model = None if hardware is None else replace(load(hardware.model), rates=hardware.rates)

    @cached_property
    def wanted(self) -> Collection[Place]:
        """The tensors that have gradients."""
        return differentiable(self.passes.graph.graph)

    def cost(self, sweep: Sweep, one: StreamPass, sent: Sent) -> SweepCost:
        """The cost of one sweep."""
        tasks = [self.whole(c) for c in one.calls] if one.whole else [self.tiled(one, c) for c in one.calls]
        tasks = [task for task in tasks if task.times]
        groups = one.groups(self.blocks) if sweep.back and not one.whole else ()
        again = {c.node.id for calls, twice in groups if twice for c in calls}
        behind = self.backward_parts(sweep, one)
        own = [(self.passes.graph.work[t.call.node.id], t.share, t.call.node.id) for t in tasks]
        flops = [((1 + (i in again)) * to + behind.get(i, 0.0) * fro, share) for (to, fro), share, i in own]
        works = [(work_of(t.node, self.wanted), t.times) for t in tasks]
        twice = [work for work, task in zip(works, tasks, strict=True) if task.call.node.id in again]
        backs = [(w, n * behind[t.call.node.id]) for (w, n), t in zip(works, tasks, strict=True)
                 if t.call.node.id in behind]  # fmt: skip
        read = sum(times * w.read for w, times in (*works, *twice))
        read += sum(times * (w.read + w.written) for w, times in backs)
        written = sum(times * w.written for w, times in (*works, *twice))
        written += sum(times * w.gradients for w, times in backs)
        moved = self.moved(sweep, one, sent)
        seconds = self.seconds([*works, *twice], backs, moved.copied)
        if seconds is not None and self.hardware is not None and self.hardware.kind == "cuda":
            seconds = self.seconds_of_tiles(sweep, len(tasks), seconds)
        return SweepCost(
            sweep, self.count(one), sum(f * s for f, s in flops), sum(f * min(s, 1.0) for f, s in flops),
            read + moved.copied, written + moved.copied, moved.inward, moved.outward, moved.early, self.pixels(one),
            seconds, None if self.hardware is None else self.hardware.host.bandwidth,
        )  # fmt: skip

    def seconds_of_tiles(self, sweep: Sweep, calls: int, kernels: float) -> float:
        """Seconds of a sweep whose kernels take so long on large tensors: on a GPU, or queueing by the host."""
        one, graphs = sweep.one, not any(one.keeps for one in self.passes.passes)
        cuts = {axis: cut for axis, cut in self.needs.grid_of(one).cuts.items() if axis in SPATIAL[1:]}
        crops = CROPS if any(len(cut.bounds) > 2 for cut in cuts.values()) and not one.whole else 1.0
        least = KERNEL * calls * (KERNELS_FORWARD + sweep.back * KERNELS_BACKWARD)
        queued = 0.0 if graphs else calls * (HOST_FORWARD + sweep.back * HOST_BACKWARD)
        return max(crops * kernels + self.count(one) * least, self.count(one) * (HOST_TILE + queued))

    def backward_parts(self, sweep: Sweep, one: StreamPass) -> dict[int, float]:
        """The calls that a sweep goes back through, and which part of their backward it computes."""
        if not sweep.back:
            return {}
        if sweep.writes_gradients:
            return {c.node.id: 1.0 for c in one.calls}
        return {c.node.id: 0.5 for c in self.joins.found[one.number].rest}  # no gradients of parameters

    def seconds(self, ahead: Works, behind: Works, copied: float) -> float | None:
        """Seconds of computing forward and backward, with copies of kept values."""
        if self.model is None:
            return None
        total = 2 * copied / self.model.rates.bandwidth
        phases: list[tuple[Works, Phase]] = [(ahead, "forward"), (behind, "backward")]
        for each, phase in phases:
            total += sum(n * s for (_, n), s in zip(each, self.calls(each, phase), strict=True))
        return total

    def calls(self, works: Works, phase: Phase) -> list[float]:
        """Seconds of each call on one tile."""
        if self.model is None:
            return []
        if self.channels_last:
            return [channels_last_seconds(work, self.model.rates, phase) for work, _ in works]
        return self.model.seconds([work for work, _ in works], phase)

    # -- positions -----------------------------------------------------------------------------------------------------

    def count(self, one: StreamPass) -> int:
        """How many tiles this rank has in a pass."""
        spatial = any(self.values[p].tiled for p in (*one.reads, *one.keeps))
        grid = self.needs.grid_of(one)
        axes = [a for a in grid.cuts if spatial or a == "data"]
        return 1 if one.whole else prod(len(grid.coordinates(a)) for a in axes)

    def over_tiles(self, one: StreamPass, axis: str, of: Callable[[AxisNeeds, int], Interval]) -> tuple[int, int]:
        """Positions along an axis of all tiles together, and of one in the middle of the image."""
        at = self.needs.grid_of(one).coordinates(axis)
        sizes = [of(self.needs.along(one, axis, c), c).size for c in at]
        return sum(sizes), sizes[len(sizes) // 2]

    def computed(self, one: StreamPass, call: TileCall) -> dict[str, tuple[int, int]]:
        """Positions that a call computes along each axis, of all tiles and of one."""
        measured = call.node.id in one.measured_calls
        if call.levels and not call.norm and not measured:
            return {}
        places = call.node.reads[:1] if measured else call.node.makes
        axes = {a: n for p in places for a, n in self.values[p].extents.items()}

        def out(axis: str, extent: int) -> Callable[[AxisNeeds, int], Interval]:
            def of(needs: AxisNeeds, coordinate: int) -> Interval:
                if measured:
                    return self.needs.grid_of(one).own(axis, extent, coordinate)
                found = NOTHING
                for place in places:
                    found = hull(found, needs.values.get(place, NOTHING))
                return found

            return of

        return {axis: self.over_tiles(one, axis, out(axis, extent)) for axis, extent in axes.items()}

    def tiled(self, one: StreamPass, call: TileCall) -> TileWork:
        """A call on a tile in the middle of the image."""
        if call.plain:
            return TileWork(call, self.typed(call.node), float(self.count(one)), float(self.count(one)))
        spans = self.computed(one, call)
        if not spans or any(not size for _, size in spans.values()):
            return TileWork(call, call.node, 0.0, 0.0)
        place = (call.node.reads if call.node.id in one.measured_calls else call.node.makes)[0]
        extents = self.values[place].extents
        shares = {axis: total / extents[axis] for axis, (total, _) in spans.items() if axis in extents}
        sizes = {axis: size / extents[axis] for axis, (_, size) in spans.items() if axis in extents}
        node = replace(
            call.node,
            input_shapes=tuple(self.shape(self.values[p], sizes) for p in call.node.reads),
            output_shapes=tuple(self.shape(self.values[p], sizes) for p in call.node.makes),
        )
        return TileWork(call, self.typed(node), prod(shares.values()) / prod(sizes.values()), prod(shares.values()))

    def shape(self, value: TileValue, sizes: Mapping[str, float]) -> tuple[int, ...]:
        """The shape of a tile of a value, which holds these parts of it."""
        axes = value.axes or (None,) * len(value.shape)
        parts = [sizes.get(a or "", 1.0) for a in axes]
        return tuple(max(1, round(n * part)) if part != 1.0 else n for n, part in zip(value.shape, parts, strict=True))

    def whole(self, call: TileCall) -> TileWork:
        """A call on whole tensors, as far as they are this rank's."""
        places = [p for p in (*call.node.makes, *call.node.reads) if self.values[p].extents]
        own = {a: self.needs.grid.here(a, n).size / n for p in places[:1] for a, n in self.values[p].extents.items()}
        share = prod(own.values())
        return TileWork(call, self.typed(call.node), share, share)

    def typed(self, node: Node) -> Node:
        """A call with the types of autocast."""
        if self.lower is None:
            return node
        inputs, outputs = ([self.lower if t == torch.float32 else t for t in ts]
                           for ts in (node.input_dtypes, node.dtypes))  # fmt: skip
        return replace(node, input_dtypes=tuple(inputs), dtypes=tuple(outputs))

    # -- what moves ----------------------------------------------------------------------------------------------------

    def window_positions(self, one: StreamPass, place: Place) -> float:
        """The elements of all windows of a value that a pass reads."""
        value = self.values[place]
        if one.whole:
            return prod(value.shape)
        total = prod(n for a, n in zip(value.axes or (None,) * len(value.shape), value.shape, strict=True) if a is None)
        for axis in value.extents:
            total *= self.over_tiles(one, axis, lambda needs, _: needs.values.get(place, NOTHING))[0]
        return total

    def moved(self, sweep: Sweep, one: StreamPass, sent: Sent) -> Moved:
        """What moves in a sweep. Rows that two windows have come once."""
        windows = {p: self.window_positions(one, p) * self.itemsize(p) for p in one.reads if not isinstance(p[0], str)}
        whole = {p: prod(self.values[p].shape) * self.itemsize(p) for p in (*windows, *one.keeps)}
        read = {p: min(size, whole[p]) for p, size in windows.items()}
        inward = {key: read.get(key[0], whole.get(key[0], 0.0)) for key in sweep.reads if key[0] in self.hosted}
        writes = sweep.writes
        if sweep.writes_gradients:  # those of other passes are added to
            inward |= {key: read[key[0]] for key in writes & sent.ever if key[0] in self.hosted}
        outward = sum(read.get(p, whole[p]) for p, _ in writes if p in self.hosted)
        copied = sum(windows.values()) * (1 + sweep.writes_gradients) + sum(whole[p] for p in one.keeps)
        under_way = (2 * sum(inward.values()) + outward) / max(1, self.count(one))
        room = max(0.0, sent.bands - under_way)
        there = min(room, sum(size for key, size in inward.items() if key in sent.near))
        coming = sum(inward.values()) - there
        early = min(coming, room - there, sum(size for key, size in inward.items() if key not in sent.last))
        return Moved(coming, outward, copied, early)

    def itemsize(self, place: Place) -> int:
        """The bytes of a number of a value."""
        return self.types.get(place, self.values[place].dtype).itemsize

    def pixels(self, one: StreamPass) -> int:
        """Positions read of the image, or of what else is given, whatever is more."""
        names = [p for p in one.reads if isinstance(p[0], str) and self.values[p].tiled]
        if one.whole or not names:
            return 0
        channels = {p: prod(n for a, n in zip(self.values[p].axes, self.values[p].shape, strict=True) if a is None)
                    for p in names}  # fmt: skip
        return max(round(self.window_positions(one, p) / max(1, channels[p])) for p in names)
