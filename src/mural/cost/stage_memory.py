"""What each possible stage of a graph needs to train: a bound for all of them at once, and the exact walk for some.

A stage that begins at a node and ends at any later one has the same forward pass up to there. So one pass from each
start gives, for all ends, what is alive when forward is done: with room for the gradients that come then, and for
the first call of backward, a bound from below. Only a walk through the whole of backward says how much more it takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mural.cost.estimate import Estimate
from mural.cost.memory_walk import Peak, StepWalk
from mural.graph.nodes import Node, Place, needed_by

Matrix = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class StageMemory:
    """The memory of stages between points: the first node, those at which a stage may begin, the number of nodes.

    The gradients of parameters are there from an earlier micro-batch; `optimizer` is how many numbers the optimizer
    keeps for each parameter. `micro_batches` under way hold what forward left for backward, all but one.
    """

    estimate: Estimate
    points: Sequence[int]
    optimizer: float = 0.0
    most: float = math.inf
    """What some cuts are known to need: stages that need more have no bound but infinity."""

    def bytes(self, a: int, b: int, micro_batches: int = 1) -> int:
        """The peak of the stage from the a-th to the b-th point, by the walk."""
        found = self._peaks.get((a, b))
        if found is None:
            walk = self.estimate.walk(self.points[a], self.points[b])
            found = self._peaks[a, b] = walk.peak(optimizer=self.optimizer, accumulates=True)
        return found.bytes + (micro_batches - 1) * found.kept

    def walked(self, a: int, b: int) -> bool:
        """Whether the stage was walked before."""
        return (a, b) in self._peaks

    def least(self, micro_batches: int = 1) -> Matrix:
        """For each stage at least what it needs, infinite where it would be empty."""
        peaks, kept = self._bounds
        return peaks + (micro_batches - 1) * kept

    @cached_property
    def _peaks(self) -> dict[tuple[int, int], Peak]:
        return {}

    @cached_property
    def _bounds(self) -> tuple[Matrix, Matrix]:
        count = len(self.points)
        peaks, kept = np.full((count, count), np.inf), np.zeros((count, count))
        ends = np.asarray(self.points) - 1
        for a, start in enumerate(self.points[:-1]):
            step = StepWalk(self.estimate.walk(start), accumulates=True)
            rows = np.array(list(growing(step, self.optimizer, self.most))).reshape(-1, 2)
            inside = ends[a + 1 :][ends[a + 1 :] - start < len(rows)]
            peaks[a, a + 1 : a + 1 + len(inside)], kept[a, a + 1 : a + 1 + len(inside)] = rows[inside - start].T
        return peaks, kept


def growing(step: StepWalk, optimizer: float, most: float) -> Iterator[tuple[int, int]]:
    """For stages that begin where the step does and end after each of its nodes: a bound of the peak, and what is kept.

    What comes from outside is not in the ledger: it stays for the whole step, and counts from its first reader on.
    Ends with the last stage whose forward pass needs no more than `most`: a longer one has the same pass up to there.
    """
    walk, graph, ledger = step.walk, step.walk.graph, step.ledger
    step.memory = dict.fromkeys(step.outside)
    used = needed_by({value.source for value in graph.outputs if isinstance(value.source, int)}, graph.nodes)
    entered: set[Place] = set()
    state = inputs = gradients = 0
    for node in walk.nodes:
        for at in step.outside.intersection(node.reads) - entered:
            entered.add(at)
            fixed = step.state_at(at, optimizer)
            state, inputs = state + fixed, inputs + (0 if fixed else step.bytes_at(at))
        state += step.counters_at(node)
        step.forward_node(node)
        if node.id not in used:
            for memory in step.kept.pop(node.id):
                ledger.drop(memory)
        wanted = [at for at in node.makes if at in walk.wanted and graph.last_reads.get(at, -1) > node.id]
        gradients += sum(map(step.bytes_at, wanted))
        for at in {*node.reads, *node.makes} - step.outside:
            if graph.last_reads.get(at, -1) <= node.id:
                ledger.drop(step.memory[at])
                gradients -= step.bytes_at(at) * (at in walk.wanted and at[0] != node.id)
        if state + inputs + ledger.peak > most:
            return
        first = first_backward(step, node) if wanted else 0
        yield state + inputs + max(ledger.peak, ledger.live + gradients + first), inputs + ledger.live


def first_backward(step: StepWalk, node: Node) -> int:
    """The bytes that the backward of a stage's last call takes while it runs."""
    effect = step.walk.effects[node.id].backward
    return 0 if effect is None else effect.peak + step.walk.workspace(node, "backward")
