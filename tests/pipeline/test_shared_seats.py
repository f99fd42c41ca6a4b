"""Several parts of a model on one rank, as a plan says: the same result, and plans that make no sense are refused."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import mural
from mural.errors import PlanError
from mural.models import UNet
from mural.pipeline.schedule import sequential
from mural.plans import Plan
from ranks import run_on

LEVELS = ("down.0", "down.1", "up.0", "up.1")


def levels_on_ranks() -> tuple[float, int]:
    """The largest difference from one device, and how many parameters this rank holds."""
    torch.manual_seed(0)
    model = UNet(width=4, depth=2).double()
    plain = copy.deepcopy(model)
    image = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    target = torch.randint(2, (2, 16, 16))
    loss = F.cross_entropy(plain(image), target)
    loss.backward()
    pm = mural.parallelize(model, Plan(stage=3, seats=(0, 1, 2, 1, 0), cuts=LEVELS), loss=F.cross_entropy)
    found = [abs(float(pm.step(image, target)) - float(loss.detach()))]
    wanted = dict(plain.named_parameters())
    found += [float((p.grad - wanted[name].grad).abs().max()) for name, p in pm.named_parameters()]
    pm.eval()
    plain.eval()
    with torch.no_grad():
        found.append(float((pm(image).full() - plain(image)).abs().max()))
    return max(found), len(dict(pm.named_parameters()))


@pytest.mark.slow
def test_the_levels_of_a_unet_share_ranks() -> None:
    answers = run_on(3, levels_on_ranks)
    assert max(difference for difference, _ in answers) < 1e-10
    assert sum(count for _, count in answers) == len(dict(UNet(width=4, depth=2).named_parameters()))


def test_seats_that_leave_one_out_are_refused() -> None:
    with pytest.raises(PlanError, match="use every place"):
        Plan(stage=3, seats=(0, 1, 1, 0))
    with pytest.raises(PlanError, match='"sequential"'):
        Plan(stage=2, seats=(0, 1, 0), schedule="gpipe", microbatches=2)
    with pytest.raises(PlanError, match="give each stage a seat"):
        sequential(3, 1, seats=(0, 2, 0))
