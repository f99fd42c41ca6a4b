"""Gradients added up by rounds of ours: the same steps, whatever the algorithm, under every kind of plan."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F

import mural
from law import difference
from mural.collectives.algorithms import ALGORITHMS
from mural.models import UNet
from mural.plans import AllReduce
from ranks import DEVICE, run_on


def trained(options: dict[str, Any]) -> float:
    """The largest difference of weights from one device after two steps."""
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(4, 3, 16, 16, dtype=torch.float64, generator=generator).to(DEVICE)
    target = torch.randint(2, (4, 16, 16), generator=generator).to(DEVICE)
    models: list[Any] = []
    for plan in (None, mural.Plan(**options)):
        torch.manual_seed(0)
        model: Any = UNet(in_channels=3, classes=2, width=4, depth=2).double().to(DEVICE)
        model = model if plan is None else mural.parallelize(model, plan, loss=F.cross_entropy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            if plan is None:
                F.cross_entropy(model(image), target).backward()
            else:
                model.step(image, target)
            optimizer.step()
            model.zero_grad()
        models.append(model.state_dict())
    return max(difference(models[1][k], v) for k, v in models[0].items())


SLOW = [pytest.param({"data": 2, "all_reduce": name}, marks=pytest.mark.slow) for name in ALGORITHMS]
CASES = [{"data": 2, "spatial": (2, 1), "all_reduce": "auto"}, {"data": 2, "stage": 2, "all_reduce": "ring"}]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"data": 3, "all_reduce": "halving-doubling"}, *CASES, *SLOW], ids=str)
def test_steps_are_those_of_one_device(options: dict[str, Any]) -> None:
    assert max(run_on(mural.Plan(**options).devices, trained, options)) < 1e-10


def test_a_plan_knows_every_algorithm() -> None:
    assert set(get_args(AllReduce)) == {"backend", "auto", *ALGORITHMS}
