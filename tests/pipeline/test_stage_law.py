"""The law of stages, over every pair of choices: models, stages and grids, cuts, schedules, recompute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations, product
from typing import Any

import pytest
from stage_cases import Case, holds
from stage_models import made

import mural
from mural.engine.alignment import without_hooks
from mural.graph import capture
from mural.graph.cut_points import cut_name, cut_points
from mural.graph.liveness import refused

MODELS: Mapping[str, dict[str, Any]] = {
    "unet": {"sizes": ((16, 16),) * 3},
    "unet-instance": {"sizes": ((16, 12), (20, 16), (16, 12))},
    "resnet-v2": {"sizes": ((12, 12),) * 3, "labels": "class"},
    "densenet": {"sizes": ((32, 32),) * 3, "labels": "class"},
    "tied": {"sizes": ((9, 8),) * 3},
    "fan": {"sizes": ((9, 8),) * 3, "images": 5},
}
OTHERS: Mapping[str, dict[str, Any]] = {
    "amoebanet": {"sizes": ((80, 80),) * 2, "labels": "class", "rate": 1e-4},
    "bottleneck": {"sizes": ((96, 96),) * 2, "labels": "class", "rate": 1e-4},
    "resnet": {"sizes": ((80, 80),) * 2, "labels": "class"},
    "unet-residual": {"sizes": ((16, 12),) * 3},
    "unet3d": {"sizes": ((6, 8, 8),) * 3},
}
PLACES: Mapping[str, dict[str, Any]] = {
    "2": {"stage": 2},
    "3": {"stage": 3},
    "4": {"stage": 4},
    "2 on rows": {"stage": 2, "spatial": (2, 1)},
    "2 on columns": {"stage": 2, "spatial": (1, 2)},
    "2 by data": {"stage": 2, "data": 2},
    "2 and 1 ranks": {"stage": 2, "grids": ((2, 1), (1, 1))},
    "1 and 2 ranks": {"stage": 3, "grids": ((1, 1), (2, 1), (1, 1))},
}
SCHEDULES: Mapping[str, dict[str, Any]] = {
    "sequential": {"schedule": "sequential", "microbatches": 1},
    "sequential parts": {"schedule": "sequential", "microbatches": 2},
    "gpipe": {"schedule": "gpipe", "microbatches": 3},
    "1f1b": {"schedule": "1f1b", "microbatches": 4},
    "interleaved": {"schedule": "interleaved", "microbatches": 2},
    "lean": {"schedule": "gems", "gems": "lean", "microbatches": 2},
    "pipelined": {"schedule": "gems", "gems": "pipelined", "microbatches": 4},
    "woven": {"schedule": "gems", "gems": "interleaved", "microbatches": 3},
    "replications": {"schedule": "gems", "microbatches": 4, "replications": 2},
}
CUTS = ("module", "block", "layer", "site", "layers", "time", "memory")
RECOMPUTE = ((), "stages", "all")
FACTORS: tuple[tuple[Any, ...], ...] = (tuple(SCHEDULES), tuple(PLACES), CUTS, tuple(MODELS), RECOMPUTE)


def pairs_of(choice: Sequence[Any]) -> set[Any]:
    """The pairs of choices that a case covers."""
    return set(combinations(enumerate(choice), 2))


def covering(factors: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    """Few cases that cover each pair of choices at least once, greedily."""
    left = {pair for choice in product(*factors) for pair in pairs_of(choice)}
    every = list(product(*factors))
    while left:
        best = max(every, key=lambda choice: len(pairs_of(choice) & left))
        left -= pairs_of(best)
        yield best


@cache
def graph_of(model: str) -> Any:
    plain = made(model)
    with without_hooks(plain):
        return capture(plain, (2, 3, *((8, 8, 8) if model == "unet3d" else (32, 32))))


def names_of(model: str, level: str, stages: int) -> tuple[str, ...]:
    """The names of cuts at a level, spread over the model; at "site", call-sites between those of layers."""
    graph = graph_of(model)
    if level == "site":
        barred = {*cut_points(graph, "layer"), *refused(graph)}
        points = [node.id for node in graph if node.id and node.id not in barred] or cut_points(graph, "layer")
        points = points if len(points) >= stages - 1 else [n.id for n in graph if n.id and n.id not in refused(graph)]
        names = [graph.nodes[point].site for point in points]
    else:
        points = cut_points(graph, level)  # type: ignore[arg-type]
        points = points if len(points) >= stages - 1 else cut_points(graph, "layer")
        names = [cut_name(graph, point) for point in points]
    step = len(names) / stages
    return tuple(names[int(step * (i + 1) - 1e-9)] for i in range(stages - 1))


def case_of(choice: tuple[Any, ...]) -> Case:
    schedule, place, cuts, model, recompute = choice
    plan = mural.Plan(**PLACES[place], **SCHEDULES[schedule], recompute=recompute, batchnorm="micro")
    named = names_of(model, cuts, plan.stages) if cuts in ("module", "block", "layer", "site") else cuts
    settings = {"images": 4} | (MODELS | OTHERS)[model]  # type: ignore[operator]
    plan = mural.Plan(**PLACES[place], **SCHEDULES[schedule], cuts=named, recompute=recompute, batchnorm="micro")
    return Case(model, plan, **settings)


SMALL = (
    ("sequential", "gpipe", "1f1b", "interleaved", "woven", "lean"),
    ("2", "3", "2 on rows", "2 and 1 ranks"),
    ("block", "site", "memory", "layers"),
    ("tied", "fan"),
    RECOMPUTE,
)
"""Choices for the tests that are not slow: small models on few ranks."""
WHOLE = [
    ("1f1b", "2", "block", "unet", "stages"),
    ("pipelined", "2 by data", "module", "unet-instance", ()),
    ("gpipe", "2", "time", "resnet-v2", "all"),
    ("woven", "3", "layer", "densenet", ()),
    ("1f1b", "2", "module", "amoebanet", ()),
]


PAIRS = list(covering(SMALL))
LATER = [pytest.param(choice, marks=pytest.mark.slow) for choice in (*PAIRS[10:], *WHOLE[2:])]


@pytest.mark.parametrize("choice", [*PAIRS[:10], *WHOLE[:2], *LATER], ids=str)
def test_training_in_stages_equals_one_device(choice: tuple[Any, ...]) -> None:
    holds(case_of(choice))


@pytest.mark.slow
@pytest.mark.parametrize("choice", list(covering(FACTORS)), ids=str)
def test_every_pair_of_choices(choice: tuple[Any, ...]) -> None:
    holds(case_of(choice))


LARGE = [
    (model, *choice)
    for model in ("amoebanet", "bottleneck", "resnet", "unet-residual", "unet3d")
    for choice in [("3", "1f1b", "block", ()), ("4", "woven", "layers", "stages"), ("2 on rows", "gpipe", "site", ())]
]


@pytest.mark.slow
@pytest.mark.parametrize("choice", LARGE, ids=str)
def test_larger_models(choice: tuple[Any, ...]) -> None:
    model, place, schedule, cuts, recompute = choice
    holds(case_of((schedule, place, cuts, model, recompute)))
