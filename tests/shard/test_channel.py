"""The law for layers that are split by channels: steps under a plan equal those on one device, in float64 to 1e-10."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mural
from law import difference, image
from mural.channel.share import share_of
from mural.models import LeNet5, UNet
from ranks import DEVICE, run_on

TOLERANCE = 1e-10
Plan = mural.Plan


def lenet() -> nn.Module:
    return LeNet5(extents=(28, 24))


def small_alexnet() -> nn.Module:
    """Convolutions, a pool of windows of its own sizes, dropout, and linear layers with uneven widths."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 7, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(3),
        nn.Flatten(),
        nn.Linear(63, 13),
        nn.ReLU(),
        nn.Linear(13, 10, bias=False),
    )


def unet() -> nn.Module:
    return UNet(in_channels=1, classes=3, width=4, depth=2, norm="batch")


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "lenet": (lenet, "label"),
    "alexnet": (small_alexnet, "label"),
    "unet": (unet, "mask"),
}


def built(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name][0]().double().to(DEVICE)


def batch(kind: str, images: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (images, 28, 24) if kind == "mask" else (images,)
    return image(images, 1, 28, 24, seed=seed).to(DEVICE), torch.randint(0, 3, shape, generator=generator).to(DEVICE)


def held(whole: Tensor, parameter: Tensor) -> Tensor:
    share = share_of(parameter)
    return whole if share is None else share.cut(whole)


def trained(plan: mural.Plan, name: str, images: int) -> float:
    """The largest difference of losses, norms, gradients, weights and buffers in three steps."""
    plain, pm = built(name), mural.parallelize(built(name), plan)
    ours = torch.optim.SGD(pm.parameters(), lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    worst = 0.0
    for step in range(3):
        x, target = batch(MODELS[name][1], images, step)
        expected = F.cross_entropy(plain(x), target)
        theirs.zero_grad()
        expected.backward()
        loss = pm.step(x, target)
        pairs = list(zip(plain.named_parameters(), pm.named_parameters(), strict=True))
        if [a for (a, _), _ in pairs] != [b for _, (b, _) in pairs]:
            raise AssertionError("names differ")
        worst = max(worst, *(difference(q.grad, held(p.grad, q)) for (_, p), (_, q) in pairs))
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        worst = max(worst, difference(loss, expected.detach()), difference(pm.clip_grad_norm_(0.5), norm))
        theirs.step()
        ours.step()
        pm.updated()
        pm.zero_grad()
    whole = pm.state_dict()
    if list(whole) != list(plain.state_dict()) or pm.found_inf():
        raise AssertionError("the state's names differ")
    return max(worst, *(difference(whole[k], v) for k, v in plain.state_dict().items()))


PLANS: list[tuple[str, mural.Plan, int]] = [
    ("lenet", Plan(channel=2), 5),
    ("lenet", Plan(channel=3, channel_layers="all"), 1),
    ("alexnet", Plan(channel=4, channel_exchange="rank"), 7),
    ("alexnet", Plan(channel=2, spatial=(2, 1), channel_exchange="part", channel_layers="all"), 3),
    ("lenet", Plan(channel=2, data=2, channel_layers=("features:input", "classifier.1:input", "classifier.3")), 3),
    ("unet", Plan(channel=2, spatial=(1, 2), channel_layers="all"), 2),
    ("unet", Plan(channel=2, data=2, channel_layers="all", channel_exchange="part"), 1),
]


@pytest.mark.parametrize(("name", "plan", "images"), PLANS, ids=str)
def test_training_equals_one_device(name: str, plan: mural.Plan, images: int) -> None:
    assert max(run_on(plan.devices, trained, plan, name, images)) < TOLERANCE
