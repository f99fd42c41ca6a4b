"""What each possible stage of a model takes and receives: for all pairs of cut points at once, as matrices.

`matrix[a, b]` is the stage from the a-th to the b-th point, where points are the first node, the cut points, and the
end. A value that a stage receives once, however many of its calls read it, counts from its first reader on:

    readers         ·   x   ·   ·   x   ·
    stage starts    ^           first reader after `start`: node 4
                                            stages that end after node 4 receive it

so for one start all ends follow from a sum over first readers, and the starts are walked from the back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mural.cost.stage_memory import Matrix
from mural.graph.liveness import Flow, flows
from mural.graph.nodes import Graph


def received_matrix(graph: Graph, points: Sequence[int]) -> Matrix:
    """The bytes that each stage receives: each value once that was made before it and that it reads."""
    found = flows(graph)
    source = np.array([flow.value[0] for flow in found], dtype=np.int64)
    size = np.array([flow.bytes for flow in found], dtype=np.float64)
    read = Uses(graph, [uses_of(graph, flow) for flow in found])

    def row(start: int) -> Matrix:
        sums = np.bincount(read.following, np.where(source < start, size, 0.0), len(graph) + 1)
        return np.asarray(sums, dtype=np.float64)

    return walked(graph, points, row, (read,))


def summed_matrix(points: Sequence[int], amounts: Sequence[float]) -> Matrix:
    """The sum of the nodes' amounts over each stage; infinite where a stage would be empty."""
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(amounts, dtype=np.float64))])[list(points)]
    matrix = sums[None, :] - sums[:, None]
    return np.where(np.tri(len(matrix), dtype=np.bool_), np.inf, matrix)


def uses_of(graph: Graph, flow: Flow) -> list[int]:
    """The nodes that a value must reach; what the model returns must reach the last."""
    return [*flow.readers, len(graph) - 1] if flow.returned else list(flow.readers)


class Uses:
    """For things that are used at some nodes: the first use at or after a node, while walking back over the nodes."""

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
