"""Random numbers that a model draws: the same in every tile, in every pass, and in forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mural
from streamed_law import apart, images


def stochastic_depth(x: Tensor) -> Tensor:
    return x * torch.empty([x.shape[0], 1, 1, 1], dtype=x.dtype).bernoulli_(0.6).div_(0.6)


def shuffled(x: Tensor) -> Tensor:
    return x[:, torch.randperm(4)] * torch.rand(x.shape[2:], dtype=x.dtype)


def attended(x: Tensor) -> Tensor:
    low = F.avg_pool2d(x, 4)
    tokens = low.flatten(2).transpose(1, 2)
    found = F.scaled_dot_product_attention(tokens, tokens, tokens, dropout_p=0.4).transpose(1, 2).reshape(low.shape)
    return x + 10 * F.interpolate(found, x.shape[2:])


class Drawing(nn.Module):
    """A function between two convolutions, with a norm."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 3, padding=1)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.function(self.norm(self.one(x))))


def step(model: nn.Module, tile: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The loss, and the gradient of the first weight."""
    pm = mural.parallelize(deepcopy(model), mural.Plan(stream=tile), loss=F.cross_entropy)
    torch.manual_seed(7)
    loss = pm.step(images(2, (26, 30), 1)[0], torch.zeros(2, 26, 30).long())
    gradient = next(pm.parameters()).grad
    assert gradient is not None
    return loss, gradient


@pytest.mark.parametrize("function", [stochastic_depth, shuffled, attended])
def test_tiles_draw_alike(function: Callable[[Tensor], Tensor]) -> None:
    """Each tile drew numbers of its own, and the backward of what runs on whole tensors others than its forward."""
    torch.manual_seed(3)
    model = Drawing(function).double()
    loss, gradient = step(model, (12, 10))
    for found, expected in zip(step(model, (26, 30)), (loss, gradient), strict=True):
        assert apart(found, expected) < 1e-10
    way = torch.randn_like(gradient)
    sides: list[Tensor] = []
    for distance in (1e-5, -1e-5):
        moved = deepcopy(model)
        moved.one.weight.data += distance * way
        sides.append(step(moved, (12, 10))[0])
    torch.testing.assert_close((sides[0] - sides[1]) / 2e-5, (gradient * way).sum(), rtol=1e-5, atol=1e-7)
