"""Layers that are split by channels on GPUs: the same law, with ranks that share a device, and in bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mural
from law import difference, image
from mural.channel.share import share_of
from ranks import run_on

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none")
Plan = mural.Plan


def model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.ConvTranspose2d(8, 6, 2, 2),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(96, 21),
        nn.ReLU(),
        nn.Linear(21, 10),
    ).to("cuda", dtype)


def trained(plan: mural.Plan, dtype: torch.dtype) -> float:
    plain, pm = model(dtype), mural.parallelize(model(dtype), plan)
    theirs, ours = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, pm))
    worst = 0.0
    for step in range(3):
        x, target = image(5, 3, 18, 14, seed=step).to("cuda", dtype), torch.arange(5, device="cuda")
        theirs.zero_grad()
        ours.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=plan.precision == "bfloat16"):
            expected = F.cross_entropy(plain(x), target)
        expected.backward()
        loss = pm.step(x, target)
        worst = max(worst, difference(loss.double(), expected.detach().double()))
        theirs.step()
        ours.step()
    for p, q in zip(plain.parameters(), pm.parameters(), strict=True):
        share = share_of(q)
        worst = max(worst, difference(q.double(), (p if share is None else share.cut(p)).double()))
    whole = pm.state_dict()
    return max(worst, *(difference(whole[k].double(), v.double().cpu()) for k, v in plain.state_dict().items()))


@pytest.mark.parametrize(
    "plan",
    [
        Plan(channel=2),
        Plan(channel=2, channel_layers="all", channel_exchange="rank"),
        Plan(channel=2, spatial=(2, 1), channel_layers="all", channel_exchange="part"),
        Plan(channel=2, data=2, channel_layers=("0:output", "2:input", "5:input", "7:output")),
    ],
    ids=str,
)
def test_training_on_gpus_equals_one_device(plan: mural.Plan) -> None:
    assert max(run_on(plan.devices, trained, plan, torch.float64)) < 1e-9


def test_bfloat16_on_gpus() -> None:
    plan = Plan(channel=2, channel_layers="all", precision="bfloat16", channel_exchange="rank")
    assert max(run_on(2, trained, plan, torch.float32)) < 0.05
