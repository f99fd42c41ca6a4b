"""Partition: the best cuts of a model into stages, over all that its cut points allow.

Four objectives, each exact (dynamic programming over the cut points, not a heuristic; where memory counts and there are
more than 1,200 points, over some of them first, and then over all that are near the best):

    layers    equal numbers of modules that call no other, in the order in which they run: the naive split
    time      the slowest stage is as fast as can be
    memory    the stage that needs most memory needs as little as can be, by the walk of `mural.cost`
    both      time, among the cuts under which no stage needs more than a limit

Among cuts that are equally good, those that send the fewest bytes between stages are taken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np

from mural.cost.estimate import estimate
from mural.cost.stage_memory import Matrix, StageMemory
from mural.errors import PlanError
from mural.graph.blocks import Level
from mural.graph.cut_points import cut_name, cut_points
from mural.graph.liveness import alive_bytes
from mural.graph.nodes import Graph
from mural.graph.work_and_depth import node_costs
from mural.pipeline.cut_search import least_largest, least_sum, nearest
from mural.pipeline.stage_traffic import received_matrix, summed_matrix

By = Literal["layers", "time", "memory", "both"]
OBJECTIVES: tuple[By, ...] = ("layers", "time", "memory", "both")
SLACK = 1 + 1e-12
"""Sums in another order differ by rounding."""
MANY, SOME = 1200, 200
"""Beyond that many cut points, memory is searched over some of them first: each start takes a walk over its stages."""
NEARBY = 1
"""How many points of the coarser search away from its cuts the finer one looks, to each side."""
NEAR = range(-2, 3)
"""The distance, in points, within which stages are walked together."""


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
    _trial: CutQuestion = field(repr=False, compare=False)

    @cached_property
    def stages(self) -> tuple[StageCost, ...]:
        """What each stage costs."""
        return self._trial.stages(self.cuts)

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
    optimizer: float = 0.0,
    hardware: str = "cpu",
) -> Partition:
    """The best cuts of a graph into this many stages, at the cut points of a level.

    The graph is that of one micro-batch. A stage's seconds are the sum of its nodes': `seconds` has one number for
    each node, forward and backward together, by default their operations. A stage's memory is

        peak + (microbatches - 1) × kept

    the peak of its step by `mural.cost`'s walk on some hardware (parameters, their gradients and `optimizer` numbers
    for each of them, what it receives, makes and keeps, and what kernels take), and, for each further micro-batch that
    is under way at a time (one number for all stages or one for each), what forward leaves for backward. A `limit` in
    bytes holds for every stage under any objective.
    """
    _check(graph, stages, by, limit, seconds)
    trial = CutQuestion(graph, stages, level, _under_way(microbatches, stages), seconds, optimizer, hardware)
    found = trial.partition(trial.even() if by == "layers" else trial.found(by, limit))
    if limit is not None and found.memory > limit:
        raise PlanError(_over(stages, limit, found.memory, f'cuts by "{by}"'))
    return found


def bound(
    graph: Graph,
    stages: int,
    level: Level = "layer",
    microbatches: int | Sequence[int] = 1,
    optimizer: float = 0.0,
    hardware: str = "cpu",
) -> Bound:
    """How much the best cuts gain over naive ones in side length, and how much any could."""
    _check(graph, stages, "memory", None, None)
    trial = CutQuestion(graph, stages, level, _under_way(microbatches, stages), None, optimizer, hardware)
    naive = [stage.memory for stage in trial.partition(trial.even()).stages]
    optimum = trial.partition(trial.found("memory", None)).memory
    share = max(naive) / sum(naive)
    return Bound(share, math.sqrt(stages * share), math.sqrt(max(naive) / optimum))


class CutQuestion:
    """One question: a graph, its cut points, and what is to be counted. Answers are the nodes of cuts."""

    def __init__(
        self,
        graph: Graph,
        stages: int,
        level: Level,
        under_way: Sequence[int],
        seconds: Sequence[float] | None,
        optimizer: float,
        hardware: str,
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
        self.memory = StageMemory(estimate(graph, hardware), self.points, optimizer)

    def found(self, by: By, limit: int | None) -> list[int]:
        """The best cuts; where memory counts and there are many points, the best near those of a coarser search.

        Of the points that follow each other, the coarser search has the one where the fewest bytes are alive.
        """
        every = self.points
        if (by != "memory" and limit is None) or len(every) <= MANY:
            return self.best(by, limit)
        step, alive = math.ceil(len(every) / SOME), alive_bytes(self.graph)
        thin = [min(every[at : at + step], key=lambda cut: alive[cut]) for at in range(1, len(every) - 1, step)]
        cuts: list[int] = []
        while cuts != (cuts := self._best_of([0, *(cut for cut in thin if cut < every[-1]), every[-1]], by, limit)):
            at = {every.index(cut) for cut in cuts}
            thin = [every[i] for i in range(1, len(every) - 1) if any(abs(i - j) <= NEARBY * step for j in at)]
        return cuts

    def _best_of(self, points: list[int], by: By, limit: int | None) -> list[int]:
        self.points = points
        self.memory = replace(self.memory, points=points, most=math.inf)
        return self.best(by, limit)

    def best(self, by: By, limit: int | None) -> list[int]:
        """The cuts under which the most expensive stage is cheapest.

        Stages are first taken for as lean as their bounds. Those of the best cuts found so are walked, which makes some
        of them more expensive, until the best cuts consist of stages that were walked: no others can be better.
        """
        if by == "memory" or limit is not None:
            if by == "memory":  # no stage of the best cuts needs more than some cuts do
                most = max(stage.memory for stage in self.stages(self.even()))
                self.memory = replace(self.memory, most=most)
            needs = {count: self.memory.least(count) for count in set(self.under_way)}
        else:
            needs = dict[int, Matrix]()
        seconds = summed_matrix(self.points, self.seconds)
        received = received_matrix(self.graph, self.points)
        while True:
            costs = self._costs(by, limit, needs, seconds)
            largest = least_largest(costs, math.inf)
            if not math.isfinite(largest):
                least = self.partition(self.best("memory", None)).memory
                raise PlanError(_over(self.count, limit or 0, least, "the leanest cuts"))
            inner = least_sum(costs, largest * SLACK, received)
            if not needs or not self._walk([0, *inner, len(self.points) - 1], needs):
                return [self.points[b] for b in inner]

    def _costs(self, by: By, limit: int | None, needs: Mapping[int, Matrix], seconds: Matrix) -> list[Matrix]:
        """For each stage, what it costs from any point to any other; infinite beyond the limit."""
        found = needs if by == "memory" else dict.fromkeys(self.under_way, seconds)
        if limit is not None:
            found = {count: np.where(needs[count] <= limit, found[count], np.inf) for count in needs}
        return [found[count] for count in self.under_way]

    def _walk(self, bounds: Sequence[int], needs: Mapping[int, Matrix]) -> bool:
        """Replace bounds by what the walk finds, for the stages between these points; whether any was new.

        The stages next to a new one are walked with it: they are what the best cuts would try next.
        """
        fresh = [(a, b) for a, b in pairwise(bounds) if not self.memory.walked(a, b)]
        last = len(self.points) - 1
        near = {(a + i, b + j) for a, b in fresh for i in NEAR for j in NEAR if 0 <= a + i < b + j <= last}
        for a, b in near:
            for count, need in needs.items():
                need[a, b] = self.memory.bytes(a, b, count)
        return bool(fresh)

    def even(self) -> list[int]:
        """The cuts nearest to equal numbers of leaf modules; functions stay with the module before them."""
        counts = [0, *accumulate(self.layers)]
        last = {counts[point]: point for point in self.points[1:-1] if 0 < counts[point] < counts[-1]}
        inner = list(last.values()) if len(last) >= self.count - 1 else self.points[1:-1]
        points = [0, *inner, len(self.graph)]
        targets = [counts[-1] * k / self.count for k in range(1, self.count)]
        return [points[b] for b in nearest([counts[point] for point in points], targets)]

    def partition(self, cuts: Sequence[int]) -> Partition:
        """The stages between cuts, with their names."""
        return Partition(tuple(cuts), tuple(cut_name(self.graph, cut) for cut in cuts), self)

    def stages(self, cuts: Sequence[int]) -> tuple[StageCost, ...]:
        """What the stages between cuts cost."""
        bounds = [0, *cuts, len(self.graph)]
        received = received_matrix(self.graph, bounds)
        return tuple(
            StageCost(
                start=start,
                stop=stop,
                layers=sum(self.layers[start:stop]),
                seconds=math.fsum(self.seconds[start:stop]),
                memory=self.memory.bytes(self.points.index(start), self.points.index(stop), self.under_way[k]),
                received=round(received[k, k + 1]),
            )
            for k, (start, stop) in enumerate(pairwise(bounds))
        )


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


def _sized(count: int) -> str:
    return f"{count / 2**30:.3f} GiB" if count >= 2**23 else f"{count:,} B"


def _over(stages: int, limit: int, needed: int, which: str) -> str:
    return (
        f"{which} into {stages} stages need {_sized(needed)} on one of them, but the limit is {_sized(limit)}: raise "
        f"stages, lower microbatches, or raise the limit"
    )
