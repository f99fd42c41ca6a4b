"""Parameters of a loss train as on one device, under every plan without stages, and have names in the model's state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mural
from law import difference, image
from mural.engine.leaves import leaves_of
from mural.engine.loss_terms import LossTerms
from mural.errors import MuralError, PlanError
from ranks import DEVICE, run_on

PLANS = [
    mural.Plan(data=2),
    mural.Plan(spatial=(2, 1)),
    mural.Plan(channel=2),
    mural.Plan(data=2, spatial=(2, 1)),
    mural.Plan(channel=2, spatial=(2, 1)),
    mural.Plan(data=2, average=2),
]
TOLERANCE = 1e-10


def parameter(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values if len(values) > 1 else values[0], dtype=torch.float64, device=DEVICE))


class Model(nn.Module):
    """Two results with heads of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.mask, self.label = nn.Conv2d(4, 3, 1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.body(x)
        return self.mask(found), self.label(found.mean((2, 3)))


class Temperature(nn.Module):
    """A learned temperature, class weights that do not train, and a count of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = parameter(0.3)
        self.register_buffer("weight", torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64, device=DEVICE))
        self.register_buffer("calls", torch.zeros((), device=DEVICE))

    def forward(self, output: Any, target: Tensor) -> Tensor:
        self.calls += 1
        mask, label = output
        return F.cross_entropy(mask / self.log_scale.exp(), target, self.weight) + 0.01 * label.square().mean()

    def late(self, output: Any, target: Tensor) -> Tensor:
        return self(output, target) + self.log_scale.square()


class Uncertainty(nn.Module):
    """Weights of two terms by their learned uncertainty, and a layer on top of the results."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variances = parameter(0.1, -0.2)
        self.mix = nn.Conv2d(3, 3, 1).to(DEVICE, torch.float64)

    def forward(self, output: Any, target: Tensor) -> Tensor:
        mask, label = output
        terms = F.cross_entropy(self.mix(mask), target), label.square().mean()
        return sum(term * (-s).exp() + s for term, s in zip(terms, self.log_variances, strict=True))  # type: ignore


def scaled(output: Any, target: Tensor, scale: Tensor, extra: list[Tensor] | tuple[()] = ()) -> Tensor:
    return F.cross_entropy(output[0] * scale, target) + sum((e.square().sum() for e in extra), scale.sum() * 0)


def temperature(_: nn.Module) -> tuple[Any, list[Tensor]]:
    loss = Temperature()
    return loss, [loss.log_scale]


def uncertainty(_: nn.Module) -> tuple[Any, list[Tensor]]:
    loss = Uncertainty()
    return loss, list(loss.parameters())


def closure(_: nn.Module) -> tuple[Any, list[Tensor]]:
    net, leaf, listed = Uncertainty(), parameter(1.5).detach().requires_grad_(), [parameter(0.7)]

    def loss(output: Any, target: Tensor) -> Tensor:
        return net(output, target) * leaf + scaled(output, target, listed[0])

    return loss, [*net.parameters(), leaf, *listed]


def given(_: nn.Module) -> tuple[Any, list[Tensor]]:
    scale, extra = parameter(1.2), [parameter(0.7), parameter(-0.1, 0.2)]
    return partial(scaled, scale=scale, extra=extra), [scale, *extra]


def method(_: nn.Module) -> tuple[Any, list[Tensor]]:
    loss = Temperature()
    return loss.late, [loss.log_scale]


def penalty(model: nn.Module) -> tuple[Any, list[Tensor]]:
    """On parameters of the model, which are not the loss's."""
    scale = parameter(0.5)

    def loss(output: Any, target: Tensor) -> Tensor:
        found: Any = model
        return scaled(output, target, scale) + 0.1 * found.body[0].weight.square().sum() + found.mask.bias.abs().sum()

    return loss, [scale]


LOSSES: list[Callable[[nn.Module], tuple[Any, list[Tensor]]]] = [
    temperature,
    uncertainty,
    closure,
    given,
    method,
    penalty,
]


def segmenter() -> nn.Module:
    torch.manual_seed(3)
    return Model().to(DEVICE, torch.float64)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    target = torch.randint(0, 3, (4, 12, 9), generator=generator)
    return image(4, 2, 12, 9, seed=step).to(DEVICE), target.to(DEVICE)


class Replica:
    """A model and its loss on one device."""

    def __init__(self, make: Callable[[nn.Module], tuple[Any, list[Tensor]]]):
        self.model = segmenter()
        self.loss, self.terms = make(self.model)
        self.trained = [*self.model.parameters(), *self.terms]
        self.optimizer = torch.optim.SGD(self.trained, lr=0.1, momentum=0.9)

    def step(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        self.optimizer.zero_grad()
        loss = self.loss(self.model(x), target)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.trained, 0.5)
        self.optimizer.step()
        return loss.detach(), norm


@torch.no_grad()
def meet(replicas: list[Replica]) -> None:
    """Give replicas the mean of their weights, buffers and momenta."""
    momenta = [[r.optimizer.state[p]["momentum_buffer"] for p in r.trained] for r in replicas]
    buffers = [[b for b in r.model.buffers() if b.is_floating_point()] for r in replicas]
    for held in zip(*([*r.trained, *m, *b] for r, m, b in zip(replicas, momenta, buffers, strict=True)), strict=True):
        mean = torch.stack(list(held)).mean(0)
        for tensor in held:
            tensor.copy_(mean)


def trained(plan: mural.Plan, make: Callable[[nn.Module], tuple[Any, list[Tensor]]]) -> float:
    """How far four steps under a plan are from those of one device, or of one for each data rank that trains alone."""
    replicas = [Replica(make) for _ in range(plan.data if plan.average else 1)]
    model = segmenter()
    loss, terms = make(model)
    rank = torch.distributed.get_rank()
    with torch.no_grad():
        for term in terms:
            term.add_(rank)  # those of rank 0 count
    pm = mural.parallelize(model, plan, loss)
    mine = replicas[pm.world_mesh.coordinates["data"] if plan.average else 0]
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1, momentum=0.9)
    worst = 0.0
    for step in range(4):
        x, target = batch(step)
        found = [r.step(*part) for r, part in zip(replicas, parts(x, target, len(replicas)), strict=True)]
        expected = torch.stack([value for value, _ in found]).mean()
        worst = max(worst, difference(pm.step(x, target), expected))
        norm = pm.clip_grad_norm_(0.5)
        worst = max(worst, difference(norm, found[replicas.index(mine)][1]))
        optimizer.step()
        pm.updated(optimizer)
        pm.zero_grad()
        if plan.average and step % plan.average == plan.average - 1:
            meet(replicas)
        if any(p.grad is not None for p in pm.parameters()):
            return float("inf")
    own = dict(pm.named_parameters())
    if [name for name in own if name.startswith("loss.")] != [n for n, _ in pm.loss_terms.named_parameters()]:
        return float("inf")
    state = pm.state_dict()
    plain = dict(mine.model.named_parameters()) | dict(LossTerms.of(mine.loss, mine.model).named_parameters())
    ours = {name: state[name].to(DEVICE) for name in own}
    return max(worst, *(difference(ours[name], p.detach()) for name, p in plain.items()))


def parts(x: Tensor, target: Tensor, count: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.chunk(count), target.chunk(count), strict=True))


CASES = [(plan, make) for make in LOSSES for plan in (PLANS if make is uncertainty else PLANS[:4])]


@pytest.mark.parametrize(("plan", "make"), CASES, ids=lambda v: v.__name__ if callable(v) else str(v))
def test_training_equals_one_device(plan: mural.Plan, make: Any) -> None:
    assert max(run_on(plan.devices, trained, plan, make)) < TOLERANCE
