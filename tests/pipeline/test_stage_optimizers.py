"""Every rank of a plan with stages can build an optimizer, whatever its stages hold: training equals one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mural
from law import difference, image
from mural.engine import Parallel
from ranks import run_on

PIPED = {"schedule": "1f1b", "microbatches": 2}
PLANS = [
    mural.Plan(stage=3, cuts=("1", "3"), **PIPED),
    mural.Plan(stage=3, cuts=("1", "3"), schedule="gems", microbatches=2),
    mural.Plan(stage=2, cuts=("1", "3"), seats=(0, 1, 0)),
    mural.Plan(stage=2, cuts=("1",), grids=((1, 1), (2, 1))),
    pytest.param(mural.Plan(stage=2, data=2, cuts=("3",), **PIPED), marks=pytest.mark.slow),
]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


def bare_middle() -> nn.Module:
    """Layers 1 and 2 have nothing to train."""
    torch.manual_seed(3)
    layers = nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(4, 3, 1)
    return nn.Sequential(*layers).double()


def bare_ends() -> nn.Module:
    """Layer 0 and what comes after layer 1 have nothing to train; the buffers of layer 2 are nobody's to train."""
    torch.manual_seed(3)
    layers = nn.AvgPool2d(2), nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3, affine=False), nn.Tanh()
    return nn.Sequential(*layers).double()


def frozen_start() -> nn.Module:
    """Layer 0 is frozen."""
    model = bare_middle()
    model[0].requires_grad_(False)
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return image(4, 2, 8, 6, seed=step), torch.randint(0, 3, (4, 4, 3), generator=draw)


def trains(p: nn.Parameter) -> bool:
    return p.requires_grad


def gaps(pm: Parallel, plain: nn.Module) -> list[float]:
    known = dict(plain.named_parameters())
    state, theirs = pm.state_dict(), plain.state_dict()
    assert list(state) == list(theirs)
    return [
        *(difference(p, known[name]) for name, p in pm.named_parameters()),
        *(difference(state[name], value) for name, value in theirs.items() if value.is_floating_point()),
    ]


def trained(plan: mural.Plan, make: Callable[[], nn.Module], kind: str, named: bool) -> float:
    """Three steps, of which the second is added up from two."""
    plain, pm = make(), mural.parallelize(make(), plan, image=(2, 8, 6))
    if named:
        ours, theirs = OPTIMIZERS[kind](pm.named_parameters()), OPTIMIZERS[kind](plain.named_parameters())
    else:
        ours, theirs = OPTIMIZERS[kind](filter(trains, pm.parameters())), OPTIMIZERS[kind](plain.parameters())
    worst = 0.0
    for step in range(3):
        for part in range(2 if step == 1 else 1):
            x, target = batch(10 * step + part)
            expected = F.cross_entropy(plain(x), target)
            expected.backward()
            worst = max(worst, difference(pm.step(x, target), expected.detach()))
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        worst = max(worst, difference(pm.clip_grad_norm_(0.1), norm))
        ours.step()
        theirs.step()
        pm.updated(ours)
        pm.zero_grad()
        theirs.zero_grad()
    return max(worst, *gaps(pm, plain))


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_stage_without_parameters_has_an_optimizer(plan: mural.Plan, kind: str) -> None:
    """`torch.optim.SGD(pm.parameters())` raised on the rank of such a stage alone, and the others waited."""
    assert max(run_on(plan.devices, trained, plan, bare_middle, kind, False)) < 1e-10


@pytest.mark.parametrize("make", [bare_ends, frozen_start])
def test_so_has_one_that_begins_or_ends_the_model_or_is_frozen(make: Callable[[], nn.Module]) -> None:
    plan = mural.Plan(stage=2, cuts=("1",), batchnorm="micro")
    assert max(run_on(2, trained, plan, make, "sgd", make is bare_ends)) < 1e-10


def automatic(cuts: str) -> int:
    """The fewest parameters on a rank, of a model most of whose calls have none."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 3, 3, padding=1), *(layer() for _ in range(6) for layer in (nn.ReLU, nn.Tanh))]
    pm = mural.parallelize(nn.Sequential(*layers), mural.Plan(stage=4, cuts=cuts), image=(2, 16, 16))
    optimizer = torch.optim.Adam(pm.parameters())
    pm.step(torch.rand(1, 2, 16, 16), torch.zeros(1, 16, 16).long())
    optimizer.step()
    return len(list(pm.parameters()))


@pytest.mark.parametrize("cuts", ["layers", "memory", "time"])
def test_automatic_cuts_leave_no_rank_without_one(cuts: str) -> None:
    assert min(run_on(4, automatic, cuts)) >= 1
