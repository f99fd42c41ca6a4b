"""The models that benchmarks run, each with its defaults from `mural.models`, and the step in which sizes are tried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from mural import models


@dataclass(frozen=True)
class Recipe:
    """How to build a model, and what it answers."""

    name: str
    """In `mural.models`."""
    dims: int
    per_position: bool
    """Whether it scores every position; else every image."""
    align: int
    """Pieces begin at multiples of this: the total stride, or half of it where halves of a volume shall be equal."""
    channels: int = 3

    def build(self, **options: Any) -> nn.Module:
        """The model with its defaults, but for these options."""
        found = getattr(models, self.name, None)
        if found is None:
            raise LookupError(f"mural.models has no {self.name}")
        return found(**options)


RECIPES = {
    "CNN1D": Recipe("CNN1D", dims=1, per_position=False, align=4),
    "CNN2D": Recipe("CNN2D", dims=2, per_position=False, align=4),
    "CNN3D": Recipe("CNN3D", dims=3, per_position=False, align=4),
    "FCN2D": Recipe("FCN2D", dims=2, per_position=True, align=32),
    "UNet2D": Recipe("UNet2D", dims=2, per_position=True, align=16),
    "UNet3D": Recipe("UNet3D", dims=3, per_position=True, align=8),
    "DenseNet-121": Recipe("densenet121", dims=2, per_position=False, align=32),
}
