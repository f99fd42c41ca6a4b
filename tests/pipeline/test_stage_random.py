"""The law of stages for models that hypothesis makes, with plans that it draws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_cases import TOLERANCE, Case, compared
from stage_random import RandomNet, Step, steps

import mural
from mural.graph import capture
from mural.graph.cut_points import cut_points
from mural.graph.liveness import refused
from ranks import run_on


@dataclass(frozen=True)
class Drawn:
    """A model and a plan, as they travel to the ranks; `cuts` are positions among the places that can be cut."""

    steps: tuple[Step, ...]
    tied: bool
    options: tuple[tuple[str, Any], ...]
    cuts: tuple[float, ...]
    images: int


def model_of(drawn: Drawn) -> RandomNet:
    torch.manual_seed(3)
    return RandomNet(drawn.steps, drawn.tied).double()


def named_cuts(drawn: Drawn) -> tuple[str, ...] | str:
    """The call-sites at which the drawn plan cuts; a balance where the model has too few places."""
    graph = capture(model_of(drawn), (2, 3, 12, 12))
    barred = refused(graph)
    free = [node.site for node in graph if node.id and node.id not in barred]
    chosen = sorted({int(at * len(free)) for at in drawn.cuts})
    if len(chosen) == len(drawn.cuts):
        return tuple(free[i] for i in chosen)
    return "layers" if len(cut_points(graph)) >= len(drawn.cuts) else "none"


def differences(drawn: Drawn, plan: mural.Plan) -> dict[str, float]:
    case = Case("random net", plan, drawn.images, ((12, 12),) * 3)
    plain = model_of(drawn)
    found = compared(case, plain, mural.parallelize(model_of(drawn), plan, image=(3, 12, 12)))
    return {name: value for name, value in found.items() if not value <= TOLERANCE}


PLACES = [
    {"stage": 2},
    {"stage": 3},
    {"stage": 4},
    {"stage": 2, "spatial": (2, 1)},
    {"stage": 2, "data": 2},
    {"stage": 2, "grids": ((1, 2), (1, 1))},
]
SCHEDULES = [
    {"schedule": "sequential", "microbatches": 1},
    {"schedule": "gpipe", "microbatches": 2},
    {"schedule": "1f1b", "microbatches": 3},
    {"schedule": "gems", "microbatches": 4},
    {"schedule": "gems", "microbatches": 2, "gems": "lean"},
    {"schedule": "interleaved", "microbatches": 2},
]


@st.composite
def drawn_cases(draw: st.DrawFn, places: int) -> Drawn:
    options = draw(st.sampled_from(PLACES[:places])) | draw(st.sampled_from(SCHEDULES))
    options |= {"recompute": draw(st.sampled_from([(), "stages"])), "batchnorm": "micro"}
    stages = mural.Plan(**options).stages
    cuts = draw(st.lists(st.floats(0, 0.999), min_size=stages - 1, max_size=stages - 1))
    images = options["microbatches"] * 2 - draw(st.integers(0, 1)) if options["microbatches"] < 3 else 4
    return Drawn(draw(steps()), draw(st.booleans()), tuple(options.items()), tuple(cuts), max(2, images))


def holds(drawn: Drawn) -> None:
    cuts = named_cuts(drawn)
    if cuts == "none":
        return
    plan = mural.Plan(**dict(drawn.options), cuts=cuts)
    for rank, wrong in enumerate(run_on(plan.devices, differences, drawn, plan)):
        assert not wrong, f"rank {rank}, {plan}: {wrong}"


@settings(max_examples=5)
@given(drawn_cases(places=1))
def test_random_models_in_two_stages(drawn: Drawn) -> None:
    holds(drawn)


@pytest.mark.slow
@settings(max_examples=60)
@given(drawn_cases(places=len(PLACES)))
def test_random_models_in_stages_on_grids(drawn: Drawn) -> None:
    holds(drawn)
