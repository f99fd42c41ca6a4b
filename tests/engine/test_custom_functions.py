"""A model with custom autograd Functions under plans: steps and weights equal those of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

import mural
from law import difference, image
from ranks import DEVICE, run_on


class Rounds(Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (8 * x).round() / 8

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Scales(Function):
    """A scale per channel, with a positional weight whose gradient comes sharded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight, place)
        largest = x.amax((1, 2, 3), keepdim=True)
        ctx.mark_non_differentiable(largest)
        return x * weight * place, largest

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        x, weight, place = ctx.saved_tensors
        return grad * weight * place, (grad * x * place).sum((0, 2, 3), keepdim=True), grad * x * weight


class Net(nn.Module):
    """Two layers with Functions between them; their parameters have gradients through the Functions alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.weight = nn.Parameter(torch.randn(1, 4, 1, 1))
        self.place = nn.Parameter(torch.randn(1, 1, 16, 13))
        self.last = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1))
        self.to(DEVICE, torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y, largest = Scales.apply(self.first(x), self.weight, self.place)
        return self.last(Rounds.apply(y) + largest)


def trained(plan: mural.Plan) -> dict[str, float]:
    plain, pm = Net(), mural.parallelize(Net(), plan, loss=F.cross_entropy, image=(2, 16, 13))
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (pm, plain))
    found: dict[str, float] = {}
    for step in range(3):
        x = image(4, 2, 16, 13, seed=step).to(DEVICE)
        target = torch.randint(0, 3, (4, 16, 13), generator=torch.Generator().manual_seed(step)).to(DEVICE)
        expected = F.cross_entropy(plain(x), target)
        theirs.zero_grad()
        expected.backward()
        theirs.step()
        loss = pm.step(x, target)
        found[f"loss {step}"] = difference(loss, expected.detach())
        ours.step()
        pm.updated()
        pm.zero_grad()
    weights = dict(plain.named_parameters())
    return found | {name: difference(p, weights[name]) for name, p in pm.named_parameters()}


@pytest.mark.parametrize(
    "plan",
    [
        mural.Plan(data=2),
        mural.Plan(spatial=(2, 1)),
        mural.Plan(spatial=(2, 1), recompute="all"),
        mural.Plan(stage=2, cuts=("last",)),
        mural.Plan(data=2, spatial=(1, 2)),
    ],
    ids=str,
)
def test_training_equals_one_device(plan: mural.Plan) -> None:
    for found in run_on(plan.devices, trained, plan):
        assert max(found.values()) < 1e-10, found
