"""A plan is proved on a small case before its first step: what is proved, what is not, and that no trace is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mural
from mural import Plan
from mural.engine.proof import Proof
from ranks import run_on

SIDE = 70


class Small(nn.Module):
    """Two convolutions and a norm."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.dropout(torch.relu(self.norm(self.first(x)))))


def batch(images: int = 2, side: int = SIDE) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(1)
    return torch.rand(images, 2, side, side, generator=draws), torch.randint(3, (images, side, side), generator=draws)


def proof_of(plan: Plan, folder: Path, model: nn.Module, loss: Any = F.cross_entropy, given: Any = None) -> Proof:
    pm = mural.parallelize(model, plan, loss, prove=folder)
    found = pm.prove(*(batch() if given is None else given))
    assert found is not None
    return found


PLANS = [
    Plan(stream=(16, 16)), Plan(recompute="all"), Plan(offload=("activations",)),
    Plan(microbatches=2, batchnorm="micro"),
]  # fmt: skip


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_plan_is_proved_before_its_first_step(plan: Plan, tmp_path: Path) -> None:
    torch.manual_seed(3)
    pm = mural.parallelize(Small(), plan, prove=tmp_path)
    assert pm.proof is None
    pm.step(*batch())
    assert pm.proof is not None
    assert len(pm.proof.proved) == 1
    assert "float64" in pm.proof.proved[0]
    assert pm.proof.difference < 1e-10
    assert not [text for text in pm.proof.unproved if "leave for the host" not in text]


@pytest.mark.parametrize(
    "plan",
    [
        Plan(spatial=(2, 1)),
        Plan(data=2),
        Plan(stage=2),
        Plan(channel=2, channel_layers="all"),
        Plan(spatial=(1, 2), stream=(16, 16)),
    ],
    ids=str,
)
def test_ranks_prove_together_and_agree(plan: Plan, tmp_path: Path) -> None:
    found = run_on(2, proof_of, plan, tmp_path, Small(0.2 if plan.stage > 1 else 0.0))
    assert len(found[0].proved) == 1, str(found[0])
    assert found[0].unproved == ()
    assert all(other.proved == found[0].proved for other in found)


class Named(Small):
    """A model that returns one tensor in a dict."""

    def forward(self, x: Tensor) -> Any:
        return {"out": super().forward(x)}


def test_a_streamed_model_that_returns_a_dict_raises_no_alarm(tmp_path: Path) -> None:
    """`check` took its tiles for a result that one device does not have."""
    found = proof_of(Plan(stream=(16, 16)), tmp_path, Named(), lambda o, t: F.cross_entropy(o["out"], t))
    assert found.proved
    assert not found.unproved
