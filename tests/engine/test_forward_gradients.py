"""`torch.autograd.grad` in a forward, on ranks: the gradient of a parameter is that of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad as differentiate
from torch.nn import functional as F

import mural
from ranks import run_on


class Gated(nn.Module):
    """A function of its first layer's result, and of itself."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]):
        super().__init__()
        self.one, self.two = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)
        self.scale, self.function = nn.Parameter(torch.linspace(0.5, 2, 4).view(4, 1, 1)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.function(self, self.one(x)))


def of_parameter(model: Any, x: Tensor) -> Tensor:
    penalty = (x * model.scale).square().mean()
    (grad,) = torch.autograd.grad(penalty, model.scale, retain_graph=True)
    return x * (1 + grad)


def of_both(model: Any, x: Tensor) -> Tensor:
    y = x.detach().requires_grad_()
    penalty = F.max_pool2d(model.two(y * model.scale), 3, 1, 1).square().mean()
    grads = differentiate(penalty, [y, model.scale, model.two.weight, model.one.weight], allow_unused=True)
    assert grads[3] is None
    return x * (1 + grads[1]) + grads[0] + 10 * grads[2].mean()


def of_weights(model: Any, x: Tensor) -> Tensor:
    (grad,) = differentiate(model.two.weight.pow(4).sum(), model.two.weight, create_graph=True)
    return x * (1 + grad.square().sum())


def of_gate(model: Any, x: Tensor) -> Tensor:
    gate = x.mean((0, 2, 3)).detach().requires_grad_()
    (grad,) = torch.autograd.grad((x.detach() * gate.view(4, 1, 1)).pow(2).mean(), gate)
    return x * (1 + grad.view(4, 1, 1))


def twice(model: Any, x: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad((x * model.scale).square().mean(), model.scale, create_graph=True)
    return x * (1 + grad)


def gradients(function: Callable[[Any, Tensor], Tensor], plan: dict[str, Any] | None) -> list[Tensor] | str:
    torch.manual_seed(0)
    model, image = Gated(function).double(), torch.randn(2, 2, 12, 10, dtype=torch.float64)
    target = torch.randint(0, 3, (2, 12, 10))
    if plan is None:
        F.cross_entropy(model(image), target).backward()
    else:
        try:
            mural.parallelize(model, mural.Plan(**plan), loss=F.cross_entropy).step(image, target)
        except mural.UnsupportedOp as error:
            return str(error)
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("plan", [{"spatial": (2, 1)}, {"data": 2}], ids=str)
def test_gradients_in_a_forward(plan: dict[str, Any]) -> None:
    """They were this rank's part alone."""
    for function in (of_parameter, of_both, of_weights, of_gate):
        expected = gradients(function, None)
        for found in run_on(2, gradients, function, plan):
            assert not isinstance(found, str), found
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_second_derivatives_are_refused() -> None:
    for found in run_on(2, gradients, twice, {"spatial": (2, 1)}):
        assert "second derivatives" in found
