"""Plain inputs of a step that require a gradient get the true one on every rank, whatever the plan.

It was doubled on the rank's own rows and zero elsewhere, missing on the ranks of later stages, and lost under `stream`
where the input was computed from something else.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mural
from law import image, raises
from mural.errors import PlanError
from ranks import run_on


class Skipping(nn.Module):
    """Reads its image in the first and in the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.last = nn.Conv2d(6, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.middle(torch.relu(self.first(x))))
        return self.last(torch.cat([x, y], 1))


def inputs(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Image, target, and the leaf whose gradient is asked for."""
    x, soft = image(4, 2, 16, 12), image(4, 3, 16, 12, seed=2).softmax(1)
    hard = soft.argmax(1)
    if kind == "leaf":
        return x.requires_grad_(), hard, x
    if kind == "computed":
        scale = torch.full((1, 2, 1, 1), 1.5, dtype=torch.float64, requires_grad=True)
        return x * scale, hard, scale
    return x, soft.requires_grad_(), soft


def step(plan: dict[str, Any], kind: str) -> list[float]:
    """How far loss, input's gradient and weights' gradients are from those of plain torch."""
    torch.manual_seed(0)
    net = Skipping().double()
    plain = deepcopy(net)
    x, target, leaf = inputs(kind)
    pm = mural.parallelize(net, mural.Plan(**plan), loss=F.cross_entropy)
    loss = pm.step(x, target)
    a, b, wanted = inputs(kind)
    expected = F.cross_entropy(plain(a), b)
    expected.backward()
    assert leaf.grad is not None
    assert wanted.grad is not None
    weights = dict(plain.named_parameters())
    found = [float((p.grad - weights[n].grad).abs().max()) for n, p in pm.named_parameters()]  # type: ignore[operator]
    return [float((loss - expected).abs()), float((leaf.grad - wanted.grad).abs().max()), *found]


PLANS = [
    (2, {"spatial": (2, 1)}),
    (2, {"data": 2}),
    (2, {"spatial": (2, 1), "recompute": "all"}),
    (1, {"microbatches": 2}),
    (2, {"stage": 2, "microbatches": 2}),
    (2, {"data": 2, "microbatches": 4}),  # a micro-batch is whole on one rank, which gathered nothing: the other waited
    (1, {"stream": (8, 8)}),
]
MORE = [
    (4, {"data": 2, "spatial": (2, 1)}),
    (4, {"stage": 2, "data": 2, "microbatches": 2}),
    (4, {"stage": 2, "spatial": (2, 1), "microbatches": 2, "schedule": "1f1b"}),
    (2, {"stage": 2, "schedule": "gems", "microbatches": 2}),
    (2, {"spatial": (2, 1), "stream": (4, 4)}),
    (2, {"spatial": (2, 1), "microbatches": 2, "recompute": "all"}),
]


@pytest.mark.parametrize("kind", ["leaf", "computed", "target"])
@pytest.mark.parametrize(
    ("ranks", "plan"), [*PLANS, *(pytest.param(*p, marks=pytest.mark.slow) for p in MORE)], ids=str
)
def test_true_on_every_rank(ranks: int, plan: dict[str, Any], kind: str) -> None:
    for found in run_on(ranks, step, plan, kind):
        assert max(found) < 1e-12, found


def test_data_ranks_with_losses_of_their_own() -> None:
    raises("average = 2", PlanError, step, {"data": 2, "average": 2}, "leaf")


def sharded_by_hand(batch: str) -> float:
    mesh = mural.init(spatial=(2,), data=2)
    x = image(4, 2, 16).requires_grad_()
    part = mesh.coordinates["data"]
    y = mural.shard(x, mesh) if batch == "whole" else mural.shard(x[2 * part : 2 * part + 2], mesh, batch="own")
    (y * y.mean(2, keepdim=True)).square().sum().backward()
    z = image(4, 2, 16).requires_grad_()
    (z * z.mean(2, keepdim=True)).square().sum().backward()
    assert x.grad is not None
    assert z.grad is not None
    rows = slice(None) if batch == "whole" else slice(2 * part, 2 * part + 2)
    return float((x.grad[rows] - z.grad[rows]).abs().max())


@pytest.mark.parametrize("batch", ["whole", "own"])
def test_tensors_sharded_by_hand(batch: str) -> None:
    assert max(run_on(4, sharded_by_hand, batch)) < 1e-12
