"""The optimum over all ways to put cuts between points, by dynamic programming over the stages.

Both functions extend the best prefixes by one stage at a time: what the first k stages cost up to a point, at best,
follows from what the first k - 1 cost up to each point before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mural.cost.stage_memory import Matrix


def least_largest(costs: Sequence[Matrix], ceiling: float) -> float:
    """The least possible cost of the most expensive stage; `costs[k][a, b]` is the k-th stage from point a to b.

    Stages that cost more than the ceiling are ignored.
    """
    best = costs[0][0]
    for cost, first in with_starts(costs[1:], ceiling):
        ends = ((np.maximum(best[a:b], cost[a:b, b])) for b, a in enumerate(first))
        best = np.array([options.min(initial=np.inf) for options in ends])
    return float(best[-1])


def least_sum(costs: Sequence[Matrix], ceiling: float, amounts: Matrix) -> list[int]:
    """The points between the stages at which the stages' amounts have the least sum, none costing over the ceiling."""
    best = np.where(costs[0][0] <= ceiling, amounts[0], np.inf)
    came: list[list[int]] = []
    for cost, first in with_starts(costs[1:], ceiling):
        totals = [best[a:b] + np.where(cost[a:b, b] <= ceiling, amounts[a:b, b], np.inf) for b, a in enumerate(first)]
        came.append([a + int(total.argmin()) if len(total) else 0 for a, total in zip(first, totals, strict=True)])
        best = np.array([total.min(initial=np.inf) for total in totals])
    chosen = [len(best) - 1]
    for step in reversed(came):
        chosen.append(step[chosen[-1]])
    return chosen[:0:-1]


def with_starts(costs: Sequence[Matrix], ceiling: float) -> Iterator[tuple[Matrix, list[int]]]:
    """Each matrix with its first starts, which are looked for once where one matrix serves several stages."""
    known: dict[int, list[int]] = {}
    for cost in costs:
        if id(cost) not in known:
            known[id(cost)] = first_starts(cost, ceiling)
        yield cost, known[id(cost)]


def first_starts(cost: Matrix, ceiling: float) -> list[int]:
    """For each end, the first start whose stage costs at most the ceiling; the end itself if there is none."""
    within = cost <= ceiling
    found = np.where(within.any(axis=0), within.argmax(axis=0), np.arange(len(cost)))
    return [int(start) for start in found]


def nearest(so_far: Sequence[int], targets: Sequence[float]) -> list[int]:
    """Rising inner points, one for each target, whose amounts so far are nearest to the targets in sum."""
    inner = len(so_far) - 1
    best, came = np.zeros(len(so_far)), list[Matrix]()
    for k, target in enumerate(targets):
        off = np.abs(np.asarray(so_far, dtype=np.float64) - target)
        # Points must be left for the targets before and after.
        off[: k + 1] = np.inf
        off[inner - (len(targets) - 1 - k) :] = np.inf
        best = off + (best if k == 0 else np.concatenate([[np.inf], np.minimum.accumulate(best)[:-1]]))
        came.append(best)
    chosen: list[int] = []
    for total in reversed(came):
        chosen.append(int(total[: chosen[-1] if chosen else None].argmin()))
    return chosen[::-1]
