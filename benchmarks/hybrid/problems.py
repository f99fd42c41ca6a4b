"""The networks, and the ways to divide them over ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from harness.vision import narrowed, torchvision
from torch import Tensor, nn

from mural.models import LeNet5
from mural.plans import Plan

CLASSES = 10


class QuickNet(nn.Module):
    """Three convolutions and two linear layers for colour images of 32 × 32, like Caffe's `cifar10_quick`.

    Width 32 gives its 145,578 parameters. Pools are of 2 × 2, and all are of the largest.

    >>> sum(p.numel() for p in QuickNet().parameters())
    145578
    """

    def __init__(self, width: int = 32, classes: int = CLASSES) -> None:
        super().__init__()
        channels = (3, width, width, 2 * width)
        blocks = [
            nn.Sequential(nn.Conv2d(before, after, 5, padding=2), nn.MaxPool2d(2), nn.ReLU())
            for before, after in pairwise(channels)
        ]
        self.features = nn.Sequential(*blocks)
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(2 * width * 16, 2 * width), nn.ReLU(), nn.Linear(2 * width, classes)
        )

    def forward(self, image: Tensor) -> Tensor:
        """Scores of shape (batch, classes)."""
        return self.classifier(self.features(image))


@dataclass(frozen=True)
class Net:
    """A network at its published size, and one of the same layers that small machines run."""

    words: str
    image: tuple[int, int, int]
    build: Callable[[], nn.Module]
    small_words: str
    small_image: tuple[int, int, int]
    small: Callable[[], nn.Module]


NETS = {
    "lenet5": Net(
        "LeNet-5, 32²",
        (1, 32, 32),
        LeNet5,
        "LeNet-5, 32²",
        (1, 32, 32),
        LeNet5,
    ),
    "alexnet": Net(
        "AlexNet, 224²",
        (3, 224, 224),
        torchvision.models.alexnet,
        "AlexNet of width 8, 64²",
        (3, 64, 64),
        lambda: narrowed("alexnet", 8, classes=16),
    ),
    "vgg19": Net(
        "VGG-19, 224²",
        (3, 224, 224),
        torchvision.models.vgg19,
        "VGG-19 of width 4, 32²",
        (3, 32, 32),
        lambda: narrowed("vgg19", 16, classes=16),
    ),
}


WAYS: dict[str, Callable[[int], Plan]] = {
    "data": lambda ranks: Plan(data=ranks),
    "model": lambda ranks: Plan(channel=ranks, channel_layers="all"),
    "hybrid": lambda ranks: Plan(channel=ranks, channel_layers="linear"),
    "hybrid, in two groups": lambda ranks: Plan(data=2, channel=ranks // 2, channel_layers="linear"),
}
"""Images divided; every layer's channels divided; linear layers' channels and the convolutions' images divided."""


def plan_of(way: str, ranks: int) -> Plan:
    """The plan of a way on that many ranks; one rank is all ways."""
    return WAYS[way](ranks) if ranks > 1 else Plan()


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A model with the same weights on every rank."""
    torch.manual_seed(seed)
    return build()
