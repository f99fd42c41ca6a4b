"""Micro-batches, and a checkpoint in which a buffer changes: it changed once for each micro-batch, without a word."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mural


class Counted(nn.Module):
    """A layer with a buffer that each of its forwards moves."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.layer, self.again = nn.Conv2d(3, 2, 3, padding=1), again
        self.register_buffer("factor", torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False) if self.again else self.block(x)

    def block(self, x: Tensor) -> Tensor:
        self.factor = self.factor * 0.9
        return self.layer(x).tanh()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_buffer_that_a_checkpoint_changes_again_is_refused(schedule: str) -> None:
    plan = mural.Plan(microbatches=2, schedule=schedule)
    image, target = torch.rand(2, 3, 8, 8, dtype=torch.float64), torch.randint(2, (2, 8, 8))
    pm = mural.parallelize(Counted(again=True).double(), plan, loss=F.cross_entropy)
    with pytest.raises(mural.PlanError, match="factor changes again where a checkpoint computes forward again"):
        pm.step(image, target)
    model = Counted(again=False).double()
    mural.parallelize(model, plan, loss=F.cross_entropy).step(image, target)
    assert model.factor == 0.9
