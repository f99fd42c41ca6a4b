"""Losses of micro-batches: weights that depend on the results themselves are refused, and were silently wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mural
from law import image
from mural.errors import PlanError


class Chosen(nn.Conv2d):
    """Logits, and the class of each position."""

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = super().forward(input)
        return y, y.argmax(1), y[:, 0] > 0


def each(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output[0], target, reduction="none")


def step(loss: Callable[[Any, Tensor], Tensor]) -> tuple[float, float]:
    """The loss under micro-batches, and on one device."""
    torch.manual_seed(0)
    model = Chosen(2, 3, 3, padding=1).double()
    x, target = image(4, 2, 7, 6), torch.randint(3, (4, 7, 6), generator=torch.Generator().manual_seed(1))
    expected = float(loss(model(x), target).detach())
    pm = mural.parallelize(model, mural.Plan(microbatches=2), lambda output, t: loss(output, t))
    return float(pm.step(x, target)), expected


WEIGHED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "chosen classes": lambda o, t: (each(o, t) * o[1]).sum() / (o[1].sum() + 1),
    "a mask": lambda o, t: (each(o, t) * o[2]).sum() / (o[2].sum() + 1),
    "detached logits": lambda o, t: (each(o, t) * o[0].detach()[:, 0].exp()).sum() / o[0].detach()[:, 0].exp().sum(),
    "two means": lambda o, t: F.cross_entropy(o[0], t, o[0].new_tensor([0.1, 1.0, 5.0])) + o[1].double().mean(),
}
PLAIN: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "classes": lambda o, t: each(o, t).mean() + 0.1 * o[1].double().mean(),
    "a mask": lambda o, t: (each(o, t) * o[2]).mean(),
}


@pytest.mark.parametrize("loss", WEIGHED.values(), ids=list(WEIGHED))
def test_a_mean_over_what_the_model_selects_is_refused(loss: Callable[[Any, Tensor], Tensor]) -> None:
    """The weights of micro-batches were those of one trial, whose whole numbers were the same in all of them."""
    with pytest.raises(PlanError, match="not a weighted sum of the losses of its micro-batches"):
        step(loss)


@pytest.mark.parametrize("loss", PLAIN.values(), ids=list(PLAIN))
def test_sums_over_what_the_model_selects_are_exact(loss: Callable[[Any, Tensor], Tensor]) -> None:
    found, expected = step(loss)
    assert found == pytest.approx(expected, rel=1e-12)
