"""Losses with parameters of their own, and a model with two results for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from law import image
from ranks import DEVICE


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
        weighed = [term * (-s).exp() + s for term, s in zip(terms, self.log_variances, strict=True)]
        return weighed[0] + weighed[1]


def scaled(output: Any, target: Tensor, scale: Tensor, extra: list[Tensor] | tuple[()] = ()) -> Tensor:
    return F.cross_entropy(output[0] * scale, target) + sum((e.square().sum() for e in extra), scale.sum() * 0)


Made = tuple[Any, list[Tensor]]
"""A loss, and its parameters."""


def temperature(_: nn.Module) -> Made:
    loss = Temperature()
    return loss, [loss.log_scale]


def uncertainty(_: nn.Module) -> Made:
    loss = Uncertainty()
    return loss, list(loss.parameters())


def closure(_: nn.Module) -> Made:
    net, leaf, listed = Uncertainty(), parameter(1.5).detach().requires_grad_(), [parameter(0.7)]

    def loss(output: Any, target: Tensor) -> Tensor:
        return net(output, target) * leaf + scaled(output, target, listed[0])

    return loss, [*net.parameters(), leaf, *listed]


def given(_: nn.Module) -> Made:
    scale, extra = parameter(1.2), [parameter(0.7), parameter(-0.1, 0.2)]
    return partial(scaled, scale=scale, extra=extra), [scale, *extra]


def method(_: nn.Module) -> Made:
    loss = Temperature()
    return loss.late, [loss.log_scale]


def penalty(model: nn.Module) -> Made:
    """On parameters of the model, which are not the loss's."""
    scale = parameter(0.5)

    def loss(output: Any, target: Tensor) -> Tensor:
        found: Any = model
        return scaled(output, target, scale) + 0.1 * found.body[0].weight.square().sum() + found.mask.bias.abs().sum()

    return loss, [scale]


LOSSES: list[Callable[[nn.Module], Made]] = [
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
