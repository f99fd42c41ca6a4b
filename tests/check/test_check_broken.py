"""Plans that are wrong on purpose are found, in float32 and float64, and every rank says the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from broken_plans import BROKEN, TOLD, Net, gradient, loss_of, other_draws, scaled_dropout
from torch import Tensor, nn

import mural
from law import image
from mural import Plan
from mural.check import Comparison
from ranks import run_on

TYPES = {"float32": torch.float32, "float64": torch.float64}
SPATIAL = Plan(spatial=(2, 1))


def batch(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    target = torch.randint(0, 3, (2, 20, 18), generator=torch.Generator().manual_seed(0))
    return image(2, 2, 20, 18).to(dtype), target


def net(dtype: torch.dtype, told: Callable[[Any], Any] | None = None, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(3)
    return Net(told, dropout).to(dtype)


def checked(name: str, dtype: str, plan: Plan) -> Comparison:
    with BROKEN[name]():
        return mural.check(net(TYPES[dtype]), plan, *batch(TYPES[dtype]), loss_of)


def differs(found: list[Comparison]) -> Comparison:
    """The comparison, which has to be the same on every rank, and to differ."""
    assert all(str(other) == str(found[0]) for other in found)
    assert not found[0].exact
    assert found[0].verdict.startswith("differs: ")
    return found[0]


@pytest.mark.parametrize("dtype", TYPES)
def test_a_plan_that_is_not_broken_is_exact(dtype: str) -> None:
    for found in run_on(2, whole, dtype, 0.0):
        assert found.exact, str(found)
        assert found.verdict.startswith("exact: ")


def whole(dtype: str, dropout: float) -> Comparison:
    return mural.check(net(TYPES[dtype], None, dropout), SPATIAL, *batch(TYPES[dtype]), loss_of)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plan_is_found(name: str, dtype: str) -> None:
    differs(run_on(2, checked, name, dtype, SPATIAL))


def told(change: Callable[[Any], Any], dtype: str) -> Comparison:
    return mural.check(net(TYPES[dtype], change), SPATIAL, *batch(TYPES[dtype]), loss_of)


@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("change", TOLD)
def test_a_wrong_entry_of_a_result_is_found(change: Callable[[Any], Any], dtype: str) -> None:
    found = differs(run_on(2, told, change, dtype))
    assert any(row.excess > 1.0 for row in found.rows if row.kind == "output")
    assert found["output"] > 0.1


def random(name: str) -> Comparison:
    with {"rule": scaled_dropout, "draws": other_draws}[name]():
        return whole("float32", 0.3)


@pytest.mark.parametrize("name", ["rule", "draws"])
def test_broken_random_layers_are_found(name: str) -> None:
    """A mesh of one rank has the rules of the plan, so the model is compared without its random layers, too."""
    found = differs(run_on(2, random, name))
    assert "dropout drew random numbers: " in str(found)
    assert "compared without random layers, too" in str(found)
    assert ("without random layers" in found.verdict) == (name == "rule")


PLANS = [
    Plan(data=2),
    Plan(stage=2, microbatches=2, batchnorm="micro", schedule="1f1b"),
    Plan(stage=2, microbatches=2, batchnorm="micro", schedule="gems"),
    Plan(channel=2, channel_layers=("third",)),
    Plan(spatial=(1, 2), precision="bfloat16"),
]


def under(plan: Plan, broken: bool) -> Comparison:
    with gradient("third.weight", lambda g: g * 1.05)() if broken else nullcontext():
        return mural.check(net(torch.float32), plan, *batch(torch.float32), loss_of)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_wrong_gradient_is_found_under_every_kind_of_plan(plan: Plan) -> None:
    right = run_on(2, under, plan, False)
    assert all(found.exact for found in right), str(right[0])
    found = differs(run_on(2, under, plan, True))
    assert found.worst is not None
    assert found.worst.name == "third.weight"


def test_the_verdict_names_the_worst_and_what_rounding_explains() -> None:
    found = differs(run_on(2, checked, "a faint gradient twice too large", "float64", SPATIAL))
    assert re.match(
        r"differs: gradient of faint.weight by 1.0e\+00 where rounding explains \de-1\d \(step 1\)", str(found)
    )
    lines = str(found).splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["output", "loss", "gradients", "updates", "buffers"]
    found = differs(run_on(2, checked, "a buffer that is not a number", "float64", SPATIAL))
    assert "buffer norm.running_var is not a number at 1 of 4 places (step 1)" in found.verdict
    assert found["buffers"] == float("inf")
