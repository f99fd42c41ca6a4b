"""A loss with a parameter and a buffer of its own, for runs of tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Tempered(nn.Module):
    """Cross-entropy at a learned temperature, next to the mean of all its values so far."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(0.3))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = F.cross_entropy(output / self.log_scale.exp(), target) + 0.1 * self.log_scale.square()
        self.seen += loss.detach().float()
        return loss


def loss(output: Tensor, target: Tensor) -> Tensor:
    """The loss of the process, which has one."""
    return tempered(output, target)


tempered = Tempered()
