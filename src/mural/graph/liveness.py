"""Liveness: which values are alive at a cut, between two calls, and which cuts may not be made.

A value is alive at a cut if it was made before and is read after it, near or far, or is returned by the model. The
model's inputs do not count: every stage has them. Neither do parameters and buffers: a stage holds those it reads.

    0  a = conv(x)        ── cut at 1: a
    1  b = relu(a)        ── cut at 2: a, b
    2  c = down(b)        ── cut at 3: a, c
    3  return cat(a, c)

A stage that receives a tensor has a copy. So where memory is written through one tensor and read through another,
everything from the first of them up to the write must be in one stage, or the other would not see the write.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from mural.errors import PlanError
from mural.graph.bytes import size_of
from mural.graph.differentiable import carries, differentiable
from mural.graph.nodes import Graph, Node, Shape, Source

Result = tuple[int, int]
"""A value that a call made: the id of the node, and which of its outputs."""


@dataclass(frozen=True)
class Flow:
    """A value that a call made and others read: `readers` in order; `returned` if the model returns it."""

    value: Result
    readers: tuple[int, ...]
    returned: bool
    shape: Shape
    dtype: torch.dtype
    gradient: bool

    @property
    def bytes(self) -> int:
        """The bytes that travel where the value does."""
        return size_of(self.shape, self.dtype)


def flows(graph: Graph) -> tuple[Flow, ...]:
    """All values that go from one call to another, or out of the model, in the order in which they were made."""
    found = differentiable(graph)
    passing = {source for source, _ in found}
    readers: dict[Result, list[int]] = {}
    written: dict[Result, set[int]] = {}
    for node in graph:
        for source, pick in zip(node.inputs, node.picks, strict=True):
            if isinstance(source, int):
                readers.setdefault((source, pick), []).append(node.id)
                written.setdefault((source, pick), set()).update(node.after)
    returned = {(o.source, o.pick): o.after for o in graph.outputs if isinstance(o.source, int)}

    def flow(place: Result) -> Flow:
        node, pick = graph.nodes[place[0]], place[1]
        dtype = node.dtypes[pick]
        after = written.get(place, set()) | set(returned.get(place, ()))
        gradient = carries(dtype) and (place in found or not passing.isdisjoint(after))
        read = tuple(dict.fromkeys(readers.get(place, ())))
        return Flow(place, read, place in returned, node.output_shapes[pick], dtype, gradient)

    return tuple(flow(place) for place in sorted({*readers, *((int(s), p) for s, p in returned)}))


def last_use(graph: Graph, flow: Flow) -> int:
    """The last node that a value must reach: the last of all for what the model returns."""
    return len(graph) - 1 if flow.returned else flow.readers[-1]


def alive(graph: Graph, cut: int) -> tuple[Flow, ...]:
    """The values that were made before the node `cut` and are needed from there on."""
    return tuple(flow for flow in flows(graph) if flow.value[0] < cut <= last_use(graph, flow))


def alive_bytes(graph: Graph) -> tuple[int, ...]:
    """For each cut from 0 to the number of nodes, the bytes that are alive there."""
    changes = [0] * (len(graph) + 1)
    for flow in flows(graph):
        if last_use(graph, flow) > flow.value[0]:
            changes[flow.value[0] + 1] += flow.bytes
            changes[last_use(graph, flow) + 1] -= flow.bytes
    return tuple(accumulate(changes))


def refused(graph: Graph) -> dict[int, str]:
    """The cuts that would separate tensors that share memory, each with the reason."""
    found: dict[int, str] = {}
    for source, write, reader in _written_and_read(graph):
        writer = graph.nodes[write]
        read = f"{graph.nodes[reader].site!r} reads it" if reader < len(graph) else "the model returns it"
        if isinstance(source, int):
            span, of = range(source + 1, write + 1), f"of {graph.nodes[source].site!r}"
        else:
            span, of = range(_first_view(writer) + 1, reader + 1), f"of {source!r}"
        for cut in span:
            found.setdefault(cut, f"{writer.site!r} writes to the memory {of} in place, and {read} afterwards")
    return {cut: found[cut] for cut in sorted(found) if 0 < cut < len(graph)}


def _written_and_read(graph: Graph) -> Iterator[tuple[Source, int, int]]:
    """Each (source, writer, reader) where the reader sees, through the source, what the writer wrote."""
    reads = [(node.inputs, node.after, node.id) for node in graph]
    reads += [((output.source,), output.after, len(graph)) for output in graph.outputs]
    for sources, writes, reader in reads:
        for write in writes:
            shared = set(graph.nodes[write].writes)
            older = (source for source in sources if not isinstance(source, int) or source < write)
            yield from ((source, write, reader) for source in older if source in shared)


def _first_view(writer: Node) -> int:
    """The first call whose result shares the memory that a call writes to: the call itself if none does."""
    return min([writer.id, *(source for source in writer.writes if isinstance(source, int))])


# -- values that go from one stage to others ---------------------------------------------------------------------------


@dataclass(frozen=True)
class CrossingValue:
    """A value that a stage makes and later stages read; `gradient` if its gradient comes back.

    The value is that at the end of the producer's forward pass: calls of the producer may still write to its memory.
    """

    value: Result
    producer: int
    consumers: tuple[int, ...]
    gradient: bool
    bytes: int
    shape: Shape
    dtype: torch.dtype


def edges(graph: Graph, starts: Sequence[int]) -> tuple[CrossingValue, ...]:
    """The edges between the stages that begin at these nodes, in the order in which their values are made.

    The first stage begins at node 0, which may be left out. What the model returns goes to the last stage.
    """
    begins = stage_starts(graph, starts)
    last = len(begins) - 1
    found: list[CrossingValue] = []
    for flow in flows(graph):
        producer = bisect_right(begins, flow.value[0]) - 1
        stages = {bisect_right(begins, reader) - 1 for reader in flow.readers}
        consumers = sorted((stages | {last} if flow.returned else stages) - {producer})
        if consumers:
            edge = CrossingValue(
                flow.value, producer, tuple(consumers), flow.gradient, flow.bytes, flow.shape, flow.dtype
            )
            found.append(edge)
    return tuple(found)


def stage_starts(graph: Graph, starts: Sequence[int]) -> list[int]:
    """Where all stages begin, node 0 first; raises PlanError for a stage that would be empty."""
    begins = [*([] if list(starts[:1]) == [0] else [0]), *starts]
    for before, after in zip(begins, [*begins[1:], len(graph)], strict=True):
        if before >= after:
            raise PlanError(
                f"stages that begin at the nodes {begins} of {len(graph)} leave one without calls: "
                f"give rising node ids between 1 and {len(graph) - 1}"
            )
    return begins
