"""A loss that reads what another stage holds is refused by name: «Cannot copy out of meta tensor» came out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mural
from ranks import run_on

READS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "copied to the host": ("first.weight", lambda model: model.first.weight.cpu().norm()),
    "as a list": ("first.bias", lambda model: sum(model.first.bias.tolist())),
    "a buffer": ("norm.running_mean", lambda model: model.norm.running_mean.sum()),
    "a buffer's number": ("norm.running_mean", lambda model: model.norm.running_mean.sum().item()),
    "all parameters": ("first.weight", lambda model: 1e-3 * sum(p.square().sum() for p in model.parameters())),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.last = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu())


def refusals() -> list[str]:
    """What each loss ends with on this rank."""
    found: list[str] = []
    for _, term in READS.values():
        model = Net()
        pm = mural.parallelize(
            model,
            mural.Plan(stage=2, cuts=("last",)),
            loss=lambda output, target, model=model, term=term: F.cross_entropy(output, target) + term(model),
        )
        with pytest.raises(mural.MuralError) as raised:
            pm.step(torch.rand(2, 3, 8, 8), torch.randint(2, (2, 8, 8)))
        found.append(str(raised.value))
    return found


def test_a_loss_that_reads_what_another_stage_holds_is_refused() -> None:
    _, last = run_on(2, refusals)
    for (name, _), text in zip(READS.values(), last, strict=True):
        assert f"the loss reads {name}, which another stage holds" in text
