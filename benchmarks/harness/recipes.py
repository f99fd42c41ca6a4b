"""The models that benchmarks run, each with its defaults, and the step in which sizes are tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from mural import models


@dataclass(frozen=True)
class Recipe:
    """How to build a model, and what it answers."""

    build: Callable[..., nn.Module]
    """Gives the model with its defaults, but for the options."""
    dims: int
    per_position: bool
    """Whether it scores every position; else every image."""
    align: int
    """Pieces begin at multiples of this: the total stride, or half of it where halves of a volume shall be equal."""
    channels: int = 3


def densenet121() -> nn.Module:
    """DenseNet-121."""
    from harness.vision import torchvision  # noqa: PLC0415

    return torchvision.models.densenet121()


RECIPES = {
    "CNN1D": Recipe(models.CNN1D, dims=1, per_position=False, align=4),
    "CNN2D": Recipe(models.CNN2D, dims=2, per_position=False, align=4),
    "CNN3D": Recipe(models.CNN3D, dims=3, per_position=False, align=4),
    "FCN2D": Recipe(models.FCN2D, dims=2, per_position=True, align=32),
    "UNet2D": Recipe(models.UNet2D, dims=2, per_position=True, align=16),
    "UNet3D": Recipe(models.UNet3D, dims=3, per_position=True, align=8),
    "DenseNet-121": Recipe(densenet121, dims=2, per_position=False, align=32),
}
