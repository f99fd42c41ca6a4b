"""What is trained: a model, each rank's share of the batch, and its targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from harness.vision import narrowed, torchvision
from torch import Tensor, nn

from mural.models import LeNet5, UNet

CLASSES = 10


@dataclass(frozen=True)
class Problem:
    """A model and what each rank feeds it."""

    model: Callable[[], nn.Module]
    batch: int
    """Images of each rank."""
    channels: int
    extents: tuple[int, int]
    per_pixel: bool
    """Whether each position has a label, or each image."""
    words: str

    def build(self, device: str) -> nn.Module:
        """The model, the same on every rank."""
        torch.manual_seed(0)
        return self.model().to(device)

    def piece(self, rank: int, device: str) -> tuple[Tensor, Tensor]:
        """The images of a rank, and their labels."""
        generator = torch.Generator().manual_seed(1000 + rank)
        image = torch.randn(self.batch, self.channels, *self.extents, generator=generator)
        shape = (self.batch, *(self.extents if self.per_pixel else ()))
        labels = torch.randint(2 if self.per_pixel else CLASSES, shape, generator=generator)
        return image.to(device), labels.to(device)


PROBLEMS = {
    "resnet18": Problem(
        lambda: torchvision.models.resnet18(num_classes=CLASSES),
        8,
        3,
        (128, 128),
        False,
        "ResNet-18, 11.2 M parameters, 8 × 128² a rank",
    ),
    "unet": Problem(
        lambda: UNet(width=24, depth=4), 2, 3, (160, 160), True, "U-Net of width 24, 4.4 M parameters, 2 × 160² a rank"
    ),
    "vgg16": Problem(
        lambda: narrowed("vgg16", 4, classes=CLASSES, dropout=0.0),
        4,
        3,
        (64, 64),
        False,
        "VGG-16 of width 16, 8.4 M parameters, 4 × 64² a rank",
    ),
    "lenet": Problem(lambda: LeNet5(3, CLASSES), 200, 3, (32, 32), False, "LeNet-5, 63 k parameters, 200 × 32² a rank"),
}
QUICK = {
    "resnet18": Problem(lambda: narrowed("resnet18", 16, classes=CLASSES), 2, 3, (32, 32), False, "toy ResNet-18"),
    "unet": Problem(lambda: UNet(width=4, depth=2), 1, 3, (32, 32), True, "toy U-Net"),
    "vgg16": Problem(lambda: narrowed("vgg16", 32, classes=CLASSES, dropout=0.0), 1, 3, (32, 32), False, "toy VGG-16"),
    "lenet": Problem(lambda: LeNet5(3, CLASSES), 4, 3, (32, 32), False, "toy LeNet-5"),
}


def problem(name: str, quick: bool) -> Problem:
    """The problem of that name, or its toy."""
    return (QUICK if quick else PROBLEMS)[name]
