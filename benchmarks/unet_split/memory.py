"""What a stage needs: its peak of memory, predicted from the graph alone by walking its calls forward and backward.

    forward    what it received, what backward keeps so far, results that are still read, and what a call makes
    between    what backward keeps, a copy of each result on its way to another stage, and room for its gradient
    backward   what is still kept, gradients that came from outside, and those that calls make and need

A convolution needs a workspace as large as its input and its result together (cuDNN orders them anew), a call in place
on what was received a copy of it. Blocks that are recomputed keep their inputs alone, and are walked once more in
backward. Memory grows with the pixels of the image, but for parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mural.graph import Graph
from mural.graph.bytes import kept, lies_in, owning, size_of
from mural.graph.cut_points import cut_points
from mural.graph.liveness import flows
from mural.graph.nodes import Source
from mural.pipeline.cut_search import least_largest, least_sum
from mural.pipeline.stage_traffic import received_matrix

Span = tuple[int, int]
COPIES = 2
"""Of each parameter: itself and its gradient."""
SLACK = 1 + 1e-12
"""Sums in another order differ by rounding."""


@dataclass(frozen=True)
class Need:
    """Bytes that a stage needs whatever the image, and those that it needs for the graph's image."""

    fixed: float
    pixels: float

    def at(self, scale: float) -> float:
        """The bytes for an image of that many times the pixels."""
        return self.fixed + scale * self.pixels


class Walk:
    """The calls of a graph and the memory they touch; `again` are the spans of calls that are recomputed."""

    def __init__(self, graph: Graph, again: Sequence[Span] = ()) -> None:
        self.graph = graph
        below = roots(graph)
        parameters = {value.name: value for value in graph.parameters}
        self.sizes = [sum(map(size_of, node.output_shapes, node.dtypes)) for node in graph]
        self.saved: list[dict[object, float]] = [
            {held.memory: float(held.bytes) for held in kept(node, parameters)} for node in graph
        ]
        owned = {(s.owner, s.memory) for node in graph for s in node.saved if isinstance(s.owner, int)}
        memory = {below[owner]: memory for owner, memory in owned}
        self.name: list[object] = [memory.get(below[i], ("made", below[i])) for i in range(len(graph))]
        """What the memory of each result is called."""
        self.last = list(range(len(graph)))
        """The last call that reads each result; itself where none does, the number of calls where it is returned."""
        for (made, _), flow in ((flow.value, flow) for flow in flows(graph)):
            self.last[made] = max(self.last[made], *flow.readers, len(graph) if flow.returned else 0)
        self.before = [[s for s in dict.fromkeys(node.inputs) if isinstance(s, int)] for node in graph]
        """The calls whose results each call reads."""
        self.workspace = [
            float(self.sizes[i] + max(map(math.prod, node.input_shapes)) * node.dtypes[0].itemsize)
            if node.op.startswith("conv") else 0.0
            for i, node in enumerate(graph)
        ]  # fmt: skip
        """Where cuDNN puts input and result in another order."""
        self.again, self.block = list(again), dict[int, Span]()

    # -- one stage ----------------------------------------------------------------------------------------------------

    def peak(self, start: int, stop: int) -> float:
        """The largest of the bytes that a stage holds at a time, without parameters."""
        # A block that a cut divides is not recomputed: it is not called as a whole.
        self.block = {i: s for s in self.again if start <= s[0] and s[1] <= stop for i in range(*s)}
        received = {s for i in range(start, stop) for s in self.before[i] if s < start}
        gives = [i for i in range(start, stop) if self.last[i] >= stop and self.last[i] < len(self.graph)]
        came = self.held(received)
        written = {s for i in range(start, stop) for s in self.graph.nodes[i].writes if s in received}
        # A call that writes in place to what the stage received writes to a copy.
        came |= {("copy", s): float(self.sizes[s]) for s in written if isinstance(s, int)}
        kept_so_far = self.keeping(start, stop, came)
        peaks = self.forward(start, stop, kept_so_far)
        mail = float(sum(self.sizes[i] for i in gives))
        # Results that backward does not keep, the copies of all on the way, and room for gradients, made ahead.
        names = {name for i in range(start, stop) for name in self.kept_by(i)}
        loose = float(sum(self.sizes[i] for i in gives if self.name[i] not in names))
        peaks.append(kept_so_far[-1] + loose + 2 * mail)
        outside = mail if stop < len(self.graph) else 3.0 * self.sizes[-1]  # scores, their softmax and its gradient
        return max(peaks + self.backward(start, stop, kept_so_far, outside, received))

    def held(self, sources: Iterable[int]) -> dict[object, float]:
        """The memory of some results."""
        return {self.name[s]: float(self.sizes[s]) for s in sources}

    def behind(self, start: int, stop: int) -> dict[object, float]:
        """The memory that a stage holds between its forward and its backward."""
        found = self.held(s for i in range(start, stop) for s in self.before[i] if s < start)
        for i in range(start, stop):
            found |= self.saved[i]
        return found

    def keeping(self, start: int, stop: int, came: Mapping[object, float]) -> list[float]:
        """The bytes of what was received and what backward keeps, before each call and behind the last."""
        held, found = dict(came), [total(came)]
        amount = found[0]
        for i in range(start, stop):
            for name, size in self.kept_by(i).items():
                if name not in held:
                    held[name] = size
                    amount += size
            found.append(amount)
        return found

    def kept_by(self, i: int) -> dict[object, float]:
        """What a call keeps; in a block that is recomputed, what it reads from outside of the block."""
        span = self.block.get(i)
        if span is None:
            return self.saved[i]
        return {self.name[s]: float(self.sizes[s]) for s in self.before[i] if s < span[0]}

    def forward(self, start: int, stop: int, kept_so_far: Sequence[float]) -> list[float]:
        """The bytes held at each call: what is kept, and results that are not, but are still read."""
        live: dict[object, tuple[float, int]] = {}
        kept_names: set[object] = set()
        peaks: list[float] = []
        for i in range(start, stop):
            name = self.name[i]
            size, until = live.get(name, (0.0, 0))
            live[name] = (max(size, self.sizes[i]), max(until, self.last[i]))
            kept_names.update(self.kept_by(i))
            loose = sum(size for other, (size, _) in live.items() if other not in kept_names)
            peaks.append(kept_so_far[i - start + 1] + loose + self.workspace[i])
            live = {n: (s, u) for n, (s, u) in live.items() if u > i}
        return peaks

    def backward(
        self, start: int, stop: int, kept_so_far: Sequence[float], outside: float, received: set[int]
    ) -> list[float]:
        """The bytes held at each call, from the last to the first."""
        peaks: list[float] = []
        grads: dict[int, float] = {}
        again: list[float] = []
        for i in reversed(range(start, stop)):
            span = self.block.get(i)
            if span is not None and (i == stop - 1 or self.block.get(i + 1) != span):
                again = self.recomputed(max(start, span[0]), i + 1)
                peaks.append(kept_so_far[max(start, span[0]) - start] + outside + sum(grads.values()) + max(again))
            now = kept_so_far[i - start + 1]
            if span is not None:
                first = max(start, span[0])
                now = kept_so_far[first - start] + again[i - first]
            mine = grads.pop(i, 0.0)
            asked = [s for s in self.before[i] if self.graph.nodes[s].gradients[0]]
            made = {s: float(self.sizes[s]) for s in asked if s not in grads}
            # A concatenation's gradients are views of the one that came.
            fresh = sum(made.values())
            extra = max(0.0, fresh - mine) if self.graph.nodes[i].op == "cat" else fresh
            peaks.append(now + outside + mine + sum(grads.values()) + extra + self.workspace[i])
            grads |= made
        leaving = sum(size for source, size in grads.items() if source in received)
        return [*peaks, kept_so_far[0] + outside + 2 * leaving]

    def recomputed(self, first: int, stop: int) -> list[float]:
        """The bytes that a block keeps when it is computed again, behind each of its calls."""
        held: dict[object, float] = {}
        found: list[float] = []
        for i in range(first, stop):
            held |= self.saved[i]
            found.append(total(held))
        return found


def total(held: Mapping[object, float]) -> float:
    """The bytes of all."""
    return float(sum(held.values()))


def fixed_bytes(graph: Graph, bounds: Sequence[int]) -> list[float]:
    """The bytes of parameters, gradients and buffers of each stage between bounds."""
    found = static_matrix(graph, bounds)
    return [float(found[k, k + 1]) for k in range(len(bounds) - 1)]


def static_matrix(graph: Graph, points: Sequence[int]) -> NDArray[np.float64]:
    """The bytes of parameters, gradients and buffers from each point to any later one; infinite where nothing lies."""
    sizes = {v.name: (COPIES if v.role == "parameter" else 1) * size_of(v.shape, v.dtype) for v in graph.parameters}
    found = np.full((len(points), len(points)), np.inf)
    for a in range(len(points) - 1):
        read: set[Source] = set()
        for b in range(a + 1, len(points)):
            read |= {s for node in graph.nodes[points[b - 1] : points[b]] for s in node.inputs if s in sizes}
            found[a, b] = sum(sizes[str(name)] for name in read)
    return found


def roots(graph: Graph) -> dict[int, Source]:
    """For each node, the oldest source whose memory its result lies in: itself where it has its own."""
    owners = owning(graph)
    found: dict[int, Source] = {}
    for node in graph:
        below = lies_in(node, owners)
        found[node.id] = node.id if below is None else found[below] if isinstance(below, int) else below
    return found


def needs(graph: Graph, starts: Sequence[int], again: Sequence[Span] = (), ranks: Sequence[int] = ()) -> list[Need]:
    """What a rank of each stage needs that begins at one of these nodes, if the stage has so many ranks."""
    walk, bounds = Walk(graph, again), [*starts, len(graph)]
    peaks = [walk.peak(a, b) for a, b in pairwise(bounds)]
    shares = ranks or [1] * len(peaks)
    return [Need(f, p / n) for f, p, n in zip(fixed_bytes(graph, bounds), peaks, shares, strict=True)]


def shared_needs(graph: Graph, starts: Sequence[int], seats: Sequence[int]) -> list[Need]:
    """What each seat needs that has several stages: a later one works while it holds what the earlier ones keep."""
    walk, bounds = Walk(graph), [*starts, len(graph)]
    spans, fixed = list(pairwise(bounds)), fixed_bytes(graph, bounds)
    found: list[Need] = []
    for seat in sorted(set(seats)):
        mine = [k for k, place in enumerate(seats) if place == seat]
        peaks: list[float] = []
        for k in mine:
            own = walk.behind(*spans[k])
            earlier: dict[object, float] = {}
            for j in (j for j in mine if j < k):
                earlier |= walk.behind(*spans[j])
            peaks.append(walk.peak(*spans[k]) + total({n: b for n, b in earlier.items() if n not in own}))
        found.append(Need(sum(fixed[k] for k in mine), max(peaks)))
    return found


def opposite_needs(graph: Graph, starts: Sequence[int]) -> list[Need]:
    """What each seat of GEMS needs, one image at a time: two stages' parameters, and the larger of their peaks."""
    one = needs(graph, starts)
    return [Need(a.fixed + b.fixed, max(a.pixels, b.pixels)) for a, b in zip(one, reversed(one), strict=True)]


def best(graph: Graph, ranks: Sequence[int], scale: float, again: Sequence[Span] = ()) -> tuple[tuple[int, ...], float]:
    """The cuts under which the largest predicted peak is least for that many times the pixels, and that peak.

    `ranks` says for each stage among how many ranks its images are cut.
    """
    points = [0, *cut_points(graph), len(graph)]
    walk = Walk(graph, again)
    fixed = static_matrix(graph, points)
    peaks = np.zeros_like(fixed)
    for a, start in enumerate(points[:-1]):
        for b in range(a + 1, len(points)):
            peaks[a, b] = walk.peak(start, points[b])
    costs = [fixed + scale * peaks / n for n in ranks]
    least = least_largest(costs, math.inf)
    chosen = least_sum(costs, least * SLACK, np.where(np.isfinite(fixed), received_matrix(graph, points), np.inf))
    return tuple(points[b] for b in chosen), least


def largest(needed: Sequence[Need], side: int, limit: float) -> int:
    """The side of the largest image at which all ranks stay within a limit, if the needs are those of `side`."""
    scale = min((limit - need.fixed) / need.pixels for need in needed)
    return int(side * math.sqrt(max(0.0, scale)))
