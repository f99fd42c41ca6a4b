"""One net that draws in several ways, under many plans on ranks: losses and gradients are those of one rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import mural
from drawing_models import Steps, StochasticDepth, drawing_loss, largest_gap, residual_net, trained
from ranks import run_on

PLANS = {
    "tiles of pieces": mural.Plan(spatial=(2, 1), stream=(7, 10)),
    "tiles of images": mural.Plan(data=2, stream=(12, 10)),
    "pieces": mural.Plan(spatial=(1, 2)),
    "stages": mural.Plan(stage=2),
    "stages and micro-batches": mural.Plan(stage=2, microbatches=2, schedule="1f1b"),
    "stages that are computed again": mural.Plan(stage=2, microbatches=2, schedule="gpipe", recompute="stages"),
}


def steps(plan: mural.Plan, loss: Callable[..., Tensor] = F.cross_entropy) -> Steps:
    """Two steps of the net under a plan."""
    draws = StochasticDepth("row"), StochasticDepth("batch", like=True), StochasticDepth("row", like=True)
    return trained(residual_net(*draws, whole_batch=False), plan, loss)


FEW = ("tiles of pieces", "stages and micro-batches")


@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in PLANS])
def test_every_plan_draws_alike(name: str) -> None:
    expected = steps(mural.Plan())
    for found in run_on(2, steps, PLANS[name]):
        assert largest_gap(found, expected) < 1e-10


@pytest.mark.parametrize("name", ["stages", pytest.param("tiles of pieces", marks=pytest.mark.slow)])
def test_a_loss_that_draws(name: str) -> None:
    """After stages, it drew from whatever state torch's generator was in."""
    torch.manual_seed(8)
    expected = steps(mural.Plan(), drawing_loss)
    for found in run_on(2, steps, PLANS[name], drawing_loss):
        assert largest_gap(found, expected) < 1e-10
