"""Partition: the best cuts of a model into stages, over all that its cut points allow.

Four objectives, each exact (dynamic programming over the cut points, not a heuristic):

    layers    equal numbers of modules that call no other, in the order in which they run: the naive split
    time      the slowest stage is as fast as can be
    memory    the stage that needs most memory needs as little as can be
    both      time, among the cuts under which no stage needs more than a limit

Among cuts that are equally good, those that send the fewest bytes between stages are taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np

from mural.errors import PlanError
from mural.graph.blocks import Level
from mural.graph.cuts import cut_name, cut_points
from mural.graph.nodes import Graph
from mural.graph.work import node_costs
from mural.pipeline.optimum import least_largest, least_sum, nearest
from mural.pipeline.stage_costs import (
    Matrix,
    activation_bytes,
    held_matrix,
    parameter_bytes,
    received_matrix,
    static_matrix,
    summed_matrix,
)

By = Literal["layers", "time", "memory", "both"]
OBJECTIVES: tuple[By, ...] = ("layers", "time", "memory", "both")
SLACK = 1 + 1e-12
"""Sums in another order differ by rounding."""


@dataclass(frozen=True)
class StageCost:
    """One stage: the nodes from `start` to `stop` - 1, how many leaf modules they call, its time and memory.

    `seconds` are operations where no seconds were given; `received` is what travels to it in one forward pass.
    """

    start: int
    stop: int
    layers: int
    seconds: float
    memory: int
    received: int


@dataclass(frozen=True)
class Partition:
    """Where the stages begin: `cuts` as nodes and `names` as a plan writes them, without the first stage."""

    cuts: tuple[int, ...]
    names: tuple[str, ...]
    stages: tuple[StageCost, ...]

    @property
    def seconds(self) -> float:
        """The time of the slowest stage."""
        return max(stage.seconds for stage in self.stages)

    @property
    def memory(self) -> int:
        """The bytes of the stage that needs most."""
        return max(stage.memory for stage in self.stages)


@dataclass(frozen=True)
class Bound:
    """How much longer the side of an image may be than under naive cuts, where memory grows with its square.

    `share` is the part of all memory that the naive cut's heaviest stage needs. Perfect balance would leave 1 / P, so
    the side grows by at most `bound` = √(P × share); `optimum` is what the best cuts of this graph reach.
    """

    share: float
    bound: float
    optimum: float


def partition(
    graph: Graph,
    stages: int,
    by: By = "memory",
    level: Level = "layer",
    limit: int | None = None,
    microbatches: int | Sequence[int] = 1,
    seconds: Sequence[float] | None = None,
    copies: int = 2,
) -> Partition:
    """The best cuts of a graph into this many stages, at the cut points of a level.

    The graph is that of one micro-batch. A stage's seconds are the sum of its nodes': `seconds` has one number for
    each node, forward and backward together, by default their operations. A stage's memory is

        copies × parameters + buffers + microbatches × (saved ∪ received ∪ made for others)

    `copies` of each parameter that it reads (2: itself and its gradient; Adam makes it 4) and one of each buffer, and,
    for each micro-batch that is under way at a time (one number for all stages or one for each), the memory that its
    backward keeps, that of the values it receives, and that of the values it made for later stages; memory that is
    several of these counts once. A `limit` in bytes holds for every stage under any objective.
    """
    _check(graph, stages, by, limit, seconds)
    trial = Trial(graph, stages, level, _under_way(microbatches, stages), seconds, copies)
    found = trial.partition(trial.even() if by == "layers" else trial.best(by, limit))
    if limit is not None and found.memory > limit:
        raise PlanError(_over(stages, limit, found.memory, f'cuts by "{by}"'))
    return found


def bound(
    graph: Graph, stages: int, level: Level = "layer", microbatches: int | Sequence[int] = 1, copies: int = 2
) -> Bound:
    """How much the best cuts gain over naive ones in side length, and how much any could."""
    _check(graph, stages, "memory", None, None)
    trial = Trial(graph, stages, level, _under_way(microbatches, stages), None, copies)
    naive = [stage.memory for stage in trial.partition(trial.even()).stages]
    optimum = trial.partition(trial.best("memory", None)).memory
    share = max(naive) / sum(naive)
    return Bound(share, math.sqrt(stages * share), math.sqrt(max(naive) / optimum))


class Trial:
    """One question: a graph, its cut points, and what is to be counted. Answers are the nodes of cuts."""

    def __init__(
        self,
        graph: Graph,
        stages: int,
        level: Level,
        under_way: Sequence[int],
        seconds: Sequence[float] | None,
        copies: int,
    ) -> None:
        self.graph, self.count, self.under_way = graph, stages, under_way
        self.points = [0, *cut_points(graph, level), len(graph)]
        if len(self.points) - 1 < stages:
            finer = "" if level == "layer" else " or for level='layer'"
            raise PlanError(
                f"{stages} stages need {stages - 1} cuts, but the model has {len(self.points) - 2} at the level of "
                f"{level}s: ask for {len(self.points) - 1} stages{finer}"
            )
        if seconds is None:
            seconds = [float(cost.result.work + cost.backward.work) for cost in node_costs(graph)]
        self.seconds = seconds
        self.layers = _leaf_calls(graph)
        self.parameters = parameter_bytes(graph, copies)
        self.activations = activation_bytes(graph)

    def memory(self, points: Sequence[int]) -> list[Matrix]:
        """For each stage, what it would need from any of the points to any other."""
        static = static_matrix(self.graph, points, self.parameters)
        held = held_matrix(self.graph, points, self.activations)
        found = {count: static + count * held for count in set(self.under_way)}
        return [found[count] for count in self.under_way]

    def best(self, by: By, limit: int | None) -> list[int]:
        """The cuts under which the most expensive stage is cheapest."""
        memory = self.memory(self.points) if by == "memory" or limit is not None else []
        costs = memory if by == "memory" else [summed_matrix(self.points, self.seconds)] * self.count
        ceiling = math.inf
        if limit is not None:
            costs = [np.where(need <= limit, cost, np.inf) for need, cost in zip(memory, costs, strict=True)]
        else:  # what naive cuts reach rules most of the stages out
            naive = self.partition(self.even())
            ceiling = naive.memory if by == "memory" else naive.seconds
        largest = least_largest(costs, ceiling * SLACK)
        if not math.isfinite(largest):
            least = least_largest(memory, math.inf)
            raise PlanError(_over(self.count, limit or 0, round(least), "the leanest cuts"))
        received = received_matrix(self.graph, self.points)
        return [self.points[b] for b in least_sum(costs, largest * SLACK, received)]

    def even(self) -> list[int]:
        """The cuts nearest to equal numbers of leaf modules; functions stay with the module before them."""
        counts = [0, *accumulate(self.layers)]
        last = {counts[point]: point for point in self.points[1:-1] if 0 < counts[point] < counts[-1]}
        inner = list(last.values()) if len(last) >= self.count - 1 else self.points[1:-1]
        points = [0, *inner, len(self.graph)]
        targets = [counts[-1] * k / self.count for k in range(1, self.count)]
        return [points[b] for b in nearest([counts[point] for point in points], targets)]

    def partition(self, cuts: Sequence[int]) -> Partition:
        """The stages between cuts, with their costs and names."""
        points = [0, *cuts, len(self.graph)]
        memory = self.memory(points)
        received = received_matrix(self.graph, points)
        found = tuple(
            StageCost(
                start=start,
                stop=stop,
                layers=sum(self.layers[start:stop]),
                seconds=math.fsum(self.seconds[start:stop]),
                memory=round(memory[k][k, k + 1]),
                received=round(received[k, k + 1]),
            )
            for k, (start, stop) in enumerate(pairwise(points))
        )
        return Partition(tuple(cuts), tuple(cut_name(self.graph, cut) for cut in cuts), found)


def _leaf_calls(graph: Graph) -> list[int]:
    """For each node, how many calls of modules that call no other begin at it; every node counts if there is none."""
    inner = {call.parent for call in graph.calls if call.stop > call.start}
    counts = [0] * len(graph)
    for i, call in enumerate(graph.calls):
        if i and i not in inner and call.stop > call.start:
            counts[call.start] += 1
    return counts if any(counts) else [1] * len(graph)


def _under_way(microbatches: int | Sequence[int], stages: int) -> list[int]:
    counts = [microbatches] * stages if isinstance(microbatches, int) else list(microbatches)
    if len(counts) != stages or min(counts) < 1:
        raise PlanError(
            f"microbatches={microbatches!r} does not say how many are under way in each of {stages} stages: "
            f"give one number of at least 1, or {stages} of them"
        )
    return counts


def _check(graph: Graph, stages: int, by: str, limit: int | None, seconds: Sequence[float] | None) -> None:
    if by not in OBJECTIVES:
        raise PlanError(f"cuts cannot be chosen by {by!r}, but by {', '.join(map(repr, OBJECTIVES))}: write 'memory'")
    if stages < 1:
        raise PlanError(f"a model has at least one stage, not {stages}: set stages=1")
    if by == "both" and limit is None:
        raise PlanError('cuts by "both" time and memory need to know the memory of a device: give limit in bytes')
    if seconds is not None and len(seconds) != len(graph):
        raise PlanError(f"{len(seconds)} seconds were given for {len(graph)} nodes: give one for each, in order")


def _over(stages: int, limit: int, needed: int, which: str) -> str:
    return (
        f"{which} into {stages} stages need {needed / 2**30:.3f} GiB on one of them, but the limit is "
        f"{limit / 2**30:.3f} GiB: raise stages, lower microbatches, or raise the limit"
    )
