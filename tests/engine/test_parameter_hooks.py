"""Hooks on parameters' gradients under plans: linear ones are exact, others are refused by the parameter's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mural
from mural.errors import PlanError
from ranks import run_on


def clipped(grad: Tensor) -> Tensor:
    return grad.clamp(-1e-3, 1e-3)


def masked(grad: Tensor) -> Tensor:
    return grad * torch.linspace(0, 1, grad.numel(), dtype=grad.dtype).view_as(grad)


def watched(grad: Tensor) -> None:
    pass


def step(hook: Callable[[Tensor], Any], options: dict[str, Any]) -> Tensor | str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 1)).double()
    model[0].weight.register_hook(hook)
    pm = mural.parallelize(model, mural.Plan(**options))
    image = torch.rand(4, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    try:
        pm.step(image, torch.zeros(4, 8, 8, dtype=torch.int64))
    except PlanError as error:
        return str(error)
    return next(p.grad for p in model.parameters()).clone()


@pytest.mark.parametrize("options", [{"data": 2}, {"microbatches": 2, "schedule": "gpipe"}], ids=str)
@pytest.mark.parametrize("hook", [masked, watched])
def test_linear_hooks_are_exact(hook: Callable[[Tensor], Any], options: dict[str, Any]) -> None:
    right = step(hook, {})
    for found in run_on(mural.Plan(**options).devices, step, hook, options):
        assert torch.allclose(found, right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", [{"data": 2}, {"microbatches": 2, "schedule": "gpipe"}], ids=str)
def test_other_hooks_are_refused_by_name(options: dict[str, Any]) -> None:
    for found in run_on(mural.Plan(**options).devices, step, clipped, options):
        assert "0.weight" in found
    assert isinstance(step(clipped, {}), Tensor)
