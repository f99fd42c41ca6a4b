"""Checkpoints of layers that are split by channels: written under one plan, resumed under any, Adam's state too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mural
from law import difference, image
from mural.channel.share import share_of
from mural.checkpoint import Checkpoints, restore, state_of
from mural.checkpoint.optimizer_state import placed_state
from mural.errors import CheckpointError
from ranks import run_on

Plan = mural.Plan
TOLERANCE = 1e-10


def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 5),
    ).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    return image(3, 1, 12, 10, seed=step), torch.tensor([step % 5, 1, 4])


def alone(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    plain = model()
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    for step in range(steps):
        x, target = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(plain(x), target).backward()
        optimizer.step()
    return plain, optimizer


def steps(plan: mural.Plan, first: int, last: int, folder: str) -> float:
    """Steps under a plan from what the folder holds, saved at the end; how far the state then is from one device's."""
    pm = mural.parallelize(model(), plan)
    optimizer = torch.optim.Adam(pm.parameters(), lr=0.01)
    checkpoints = Checkpoints(folder, pm.world_mesh)
    if first:
        restore(checkpoints.read(), pm.module, optimizer)
    for step in range(first, last):
        optimizer.zero_grad()
        pm.step(*batch(step))
        optimizer.step()
    state = state_of(pm.module, optimizer)
    checkpoints.save(last, state.tensors, state.values)
    checkpoints.wait()
    checkpoints.close()
    plain, theirs = alone(last)
    whole = pm.state_dict()
    worst = max(difference(whole[key], value) for key, value in plain.state_dict().items())
    for p, q in zip(plain.parameters(), pm.parameters(), strict=True):
        share = share_of(q)
        for key, value in theirs.state[p].items():
            cut = value if share is None or not value.ndim else share.cut(value)
            worst = max(worst, difference(optimizer.state[q][key], cut))
    return worst


@pytest.mark.slow
@pytest.mark.parametrize(
    "plans",
    [
        (Plan(channel=2), Plan(), Plan(channel=4)),
        (Plan(channel=4, channel_layers=("0:output", "5:input")), Plan(spatial=(2, 1)), Plan(channel=2, data=2)),
    ],
    ids=["linear", "by name"],
)
def test_a_plan_may_change_between_checkpoints(plans: tuple[mural.Plan, ...], tmp_path: Path) -> None:
    for i, plan in enumerate(plans):
        assert max(run_on(plan.devices, steps, plan, 2 * i, 2 * i + 2, str(tmp_path))) < TOLERANCE


def loaded(plan: mural.Plan, rank0: bool) -> float:
    """A whole state, given on every rank or on the first alone, as each rank's shares; and what it says of misfits."""
    pm = mural.parallelize(model(), plan)
    plain, _ = alone(1)
    given = plain.state_dict() if not rank0 or pm.world_mesh.rank == 0 else {}
    pm.load_state_dict(given, rank0=rank0)
    whole = pm.state_dict()
    if pm.state_dict(rank0=True).keys() != (whole.keys() if pm.world_mesh.rank == 0 else {}.keys()):
        raise AssertionError("rank0")
    for wrong in ({**plain.state_dict(), "5.weight": torch.zeros(5, 23)}, {"1.bias": torch.zeros(6)}):
        try:
            pm.load_state_dict(wrong)
        except RuntimeError as error:
            if "5.weight" not in str(error) and "Missing" not in str(error):
                raise
        else:
            raise AssertionError("a state that does not fit was taken")
    return max(difference(whole[key], value) for key, value in plain.state_dict().items())


@pytest.mark.parametrize("rank0", [False, True])
def test_a_state_dict_is_that_of_the_whole_model(rank0: bool) -> None:
    assert max(run_on(2, loaded, Plan(channel=2), rank0)) == 0.0


def factored(_: Any = None) -> str:
    pm = mural.parallelize(nn.Linear(4, 4), Plan(channel=2))
    try:
        placed_state("optimizer.state.weight.row", torch.zeros(2), next(iter(pm.parameters())))
    except CheckpointError as error:
        return str(error)
    return ""


def test_state_that_is_not_kept_value_by_value_is_refused() -> None:
    assert all("weight" in text and "value by value" in text for text in run_on(2, factored))
