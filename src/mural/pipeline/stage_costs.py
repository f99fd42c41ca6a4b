"""What each possible stage of a model would cost: for all pairs of cut points at once, as matrices.

`matrix[a, b]` is the stage from the a-th to the b-th point, where points are the first node, the cut points, and the
end. Something that a stage holds once, however many of its calls use it, is held from its first use in the stage on:

    uses            ·   x   ·   ·   x   ·
    stage starts    ^           first use behind `start`: node 4
                                            stages that end behind node 4 hold it

so for one start all ends follow from a sum over first uses, and the starts are walked from the back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mural.graph.bytes import kept, roots, size_of
from mural.graph.liveness import Flow, flows, last_use
from mural.graph.nodes import Graph

Matrix = NDArray[np.float64]


@dataclass
class Piece:
    """Memory that stages may hold: where backward keeps it, and the values in it that travel."""

    bytes: int = 0
    saved: list[int] = field(default_factory=list[int])
    flows: list[Flow] = field(default_factory=list[Flow])


def parameter_bytes(graph: Graph, copies: int) -> list[Piece]:
    """Each parameter with its copies, and each buffer once, at the nodes that read it."""
    read: dict[str, list[int]] = {value.name: [] for value in graph.parameters}
    for node in graph:
        for source in node.inputs:
            if isinstance(source, str) and source in read:
                read[source].append(node.id)
    times = {value.name: copies if value.role == "parameter" else 1 for value in graph.parameters}
    return [
        Piece(times[value.name] * size_of(value.shape, value.dtype), read[value.name]) for value in graph.parameters
    ]


def activation_bytes(graph: Graph) -> list[Piece]:
    """The memory that backward keeps, and that of values that travel, each once."""
    known = {value.name: value for value in graph.parameters}
    found: dict[object, Piece] = {}
    memories: dict[object, set[object]] = {}
    for node in graph:
        for held in kept(node, known):
            piece = found.setdefault(held.memory, Piece())
            piece.bytes = max(piece.bytes, held.bytes)
            piece.saved.append(node.id)
        for saved in node.saved:
            memories.setdefault(saved.owner, set()).add(saved.memory)
    below = roots(graph)
    for flow in flows(graph):
        root = below[flow.value[0]]
        same = memories.get(root, set())
        alone = not isinstance(root, int) or len(graph.nodes[root].output_shapes) == 1
        key = next(iter(same)) if len(same) == 1 and alone else ("value", root, flow.value[1])
        piece = found.setdefault(key, Piece())
        piece.flows.append(flow)
        piece.bytes = piece.bytes if piece.saved else max(piece.bytes, flow.bytes)
    return list(found.values())


def held_matrix(graph: Graph, points: Sequence[int], pieces: Sequence[Piece]) -> Matrix:
    """The bytes that each stage holds from its forward to its backward pass.

    What its backward keeps, what it receives, and what it made for others, each memory once.
    """
    all_flows = [(flow, i) for i, piece in enumerate(pieces) for flow in piece.flows]
    owner = np.array([i for _, i in all_flows], dtype=np.int64)
    source = np.array([flow.value[0] for flow, _ in all_flows], dtype=np.int64)
    end = np.array([last_use(graph, flow) for flow, _ in all_flows], dtype=np.int64)
    size = np.array([piece.bytes for piece in pieces], dtype=np.float64)
    saved = Uses(graph, [piece.saved for piece in pieces])
    read = Uses(graph, [uses_of(graph, flow) for flow, _ in all_flows])
    never = len(graph)

    def row(start: int) -> Matrix:
        first = saved.following.copy()
        came = source < start
        np.minimum.at(first, owner[came], read.following[came])
        held = binned(first, size, never + 1)
        # Made here and read behind the stage: held until the stage reaches to its last reader, or for good if kept.
        begin, stop = np.full(len(pieces), never), np.full(len(pieces), -1)
        np.minimum.at(begin, owner[~came], source[~came])
        np.maximum.at(stop, owner[~came], end[~came])
        stop = np.minimum(first, stop)
        out = begin < stop
        held += binned(begin[out], size[out], never + 1) - binned(stop[out], size[out], never + 1)
        return held

    return walked(graph, points, row, (saved, read))


def received_matrix(graph: Graph, points: Sequence[int]) -> Matrix:
    """The bytes that each stage receives: each value once that was made before it and that it reads."""
    found = flows(graph)
    source = np.array([flow.value[0] for flow in found], dtype=np.int64)
    size = np.array([flow.bytes for flow in found], dtype=np.float64)
    read = Uses(graph, [uses_of(graph, flow) for flow in found])

    def row(start: int) -> Matrix:
        return binned(read.following, np.where(source < start, size, 0.0), len(graph) + 1)

    return walked(graph, points, row, (read,))


def static_matrix(graph: Graph, points: Sequence[int], pieces: Sequence[Piece]) -> Matrix:
    """The bytes of parameters and buffers that each stage holds."""
    size = np.array([piece.bytes for piece in pieces], dtype=np.float64)
    read = Uses(graph, [piece.saved for piece in pieces])
    return walked(graph, points, lambda _: binned(read.following, size, len(graph) + 1), (read,))


def summed_matrix(points: Sequence[int], amounts: Sequence[float]) -> Matrix:
    """The sum of the nodes' amounts over each stage; infinite where a stage would be empty."""
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(amounts, dtype=np.float64))])[list(points)]
    return no_empty_stage(sums[None, :] - sums[:, None])


def no_empty_stage(matrix: Matrix) -> Matrix:
    """The matrix with infinity where the end does not lie behind the start."""
    return np.where(np.tri(len(matrix), dtype=np.bool_), np.inf, matrix)


def uses_of(graph: Graph, flow: Flow) -> list[int]:
    """The nodes that a value must reach; what the model returns must reach the last."""
    return [*flow.readers, len(graph) - 1] if flow.returned else list(flow.readers)


def binned(places: NDArray[np.int64], amounts: Matrix, count: int) -> Matrix:
    """The sum of the amounts at each place from 0 to `count` - 1."""
    return np.asarray(np.bincount(places, amounts, count), dtype=np.float64)


class Uses:
    """For things that are used at some nodes: the first use at or behind a node, while walking back over the nodes."""

    def __init__(self, graph: Graph, uses: Sequence[Sequence[int]]) -> None:
        self.following = np.full(len(uses), len(graph), dtype=np.int64)
        self._at: Mapping[int, list[int]] = _inverted(uses)

    def step(self, node: int) -> None:
        """Go back to a node."""
        if node in self._at:
            self.following[self._at[node]] = node


def _inverted(uses: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for thing, nodes in enumerate(uses):
        for node in set(nodes):
            found.setdefault(node, []).append(thing)
    return found


def walked(graph: Graph, points: Sequence[int], row: Callable[[int], Matrix], uses: Sequence[Uses]) -> Matrix:
    """The matrix whose rows are sums of `row(start)` up to each end, for starts from the back."""
    matrix = np.full((len(points), len(points)), np.inf)
    ends = np.asarray(points) - 1
    at = {start: a for a, start in enumerate(points[:-1])}
    for node in range(len(graph) - 1, -1, -1):
        for each in uses:
            each.step(node)
        if node in at:
            a = at[node]
            matrix[a, a + 1 :] = np.cumsum(row(node))[ends[a + 1 :]]
    return matrix
