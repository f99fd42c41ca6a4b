"""Residual nets that draw random numbers in many ways, and losses and gradients of steps with a plan."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mural
from law import image

Steps = list[tuple[Tensor, dict[str, Tensor]]]
"""The loss of each step, and all gradients and buffers after it by name."""


class StochasticDepth(nn.Module):
    """Drops whole images ("row") or the whole batch, as torchvision and (with `like`) timm write it."""

    def __init__(self, mode: str, like: bool = False):
        super().__init__()
        self.mode, self.like = mode, like

    def forward(self, x: Tensor) -> Tensor:
        size = [x.shape[0] if self.mode == "row" else 1] + [1] * (x.ndim - 1)
        noise = x.new_empty(size) if self.like else torch.empty(size, dtype=x.dtype, device=x.device)
        return x * noise.bernoulli_(0.6).div_(0.6)


class Drawn(nn.Module):
    """A function that draws, as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class BufferNoise(nn.Module):
    """Leaves noise in buffers, and multiplies by numbers that it draws with probabilities from another one."""

    last: Tensor
    chance: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(3))
        self.register_buffer("chance", torch.full((4, 1, 1), 0.6))

    def forward(self, x: Tensor) -> Tensor:
        self.last[1:].normal_()
        return x * torch.bernoulli(self.chance)


class Residual(nn.Module):
    """A residual block with dropout; what it adds goes through a module that draws."""

    def __init__(self, draws: nn.Module, norm: nn.Module):
        super().__init__()
        self.conv, self.norm, self.draws = nn.Conv2d(4, 4, 3, padding=1), norm, draws

    def forward(self, x: Tensor) -> Tensor:
        return x + self.draws(F.dropout(F.gelu(self.norm(self.conv(x))), 0.3))


def residual_net(*draws: nn.Module, whole_batch: bool = True) -> nn.Module:
    """A block for each module that draws, between two convolutions; its norms look at the whole batch, or not."""
    torch.manual_seed(1)
    blocks = [Residual(deepcopy(each), nn.BatchNorm2d(4) if whole_batch else nn.GroupNorm(2, 4)) for each in draws]
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), *blocks, nn.Conv2d(4, 3, 1)).double()


def drawing_loss(output: Tensor, target: Tensor) -> Tensor:
    """A loss that draws by position, and a number for all."""
    return F.cross_entropy(F.dropout(output, 0.2), target) * (1 + torch.rand((), dtype=output.dtype))


def trained(
    model: nn.Module, plan: mural.Plan, loss: Callable[..., Tensor] = F.cross_entropy, keep: str | None = None
) -> Steps:
    """Two steps of a copy of the model under a plan, with an update after each."""
    pm: Any = mural.parallelize(deepcopy(model), plan, loss=loss)
    if keep is not None:
        pm.way.keep = keep
    device = next(model.parameters()).device
    optimizer = torch.optim.SGD(pm.parameters(), 0.05)
    found: Steps = []
    for seed in range(2):
        target = torch.randint(3, (2, 26, 30), generator=torch.Generator().manual_seed(seed))
        value = pm.step(image(2, 2, 26, 30, seed=seed).to(device), target.to(device)).clone()
        values = {name: p.grad.clone() for name, p in pm.named_parameters() if p.grad is not None}
        found.append((value, values | {name: buffer.clone() for name, buffer in pm.named_buffers()}))
        optimizer.step()
        optimizer.zero_grad()
    return found


def largest_gap(found: Steps, expected: Steps) -> float:
    """How far losses, gradients and buffers are apart; of those that a rank has."""
    gaps = [float((a - b).abs()) for (a, _), (b, _) in zip(found, expected, strict=True)]
    for (_, mine), (_, theirs) in zip(found, expected, strict=True):
        gaps += [float((value - theirs[name]).abs().max()) for name, value in mine.items()]
    return max(gaps)
