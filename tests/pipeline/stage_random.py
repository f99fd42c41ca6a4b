"""Random models: directed graphs of convolutions, sums, concatenations, norms, pools and upsampling with long skips.

A plan of a model is a tuple of steps; each names an operation and the earlier values that it takes, counted from the
end. Values have an extent: 0 is the image's, 1 half of it, 2 a quarter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

CHANNELS = 4
ONE = ("conv", "norm", "group", "relu", "relu_", "pool", "up", "twice", "shift", "identity", "gate")
TWO = ("add", "cat", "iadd", "mul")


@dataclass(frozen=True)
class Step:
    """One operation on one or two earlier values."""

    kind: str
    first: int
    second: int = 0


class RandomNet(nn.Module):
    """The model of some steps; its result has the image's extents and three channels."""

    def __init__(self, steps: tuple[Step, ...], tied: bool) -> None:
        super().__init__()
        self.steps = steps
        self.inward, self.head = nn.Conv2d(3, CHANNELS, 3, padding=1), nn.Conv2d(CHANNELS, 3, 1)
        self.shared = nn.Conv2d(CHANNELS, CHANNELS, 1)
        self.layers = nn.ModuleList(self.layer(step) for step in steps)
        if tied:
            convs = [layer for layer in self.layers if isinstance(layer, nn.Conv2d) and layer.in_channels == CHANNELS]
            for layer in convs[1:]:
                layer.weight = convs[0].weight

    def layer(self, step: Step) -> nn.Module:
        if step.kind in ("conv", "gate"):
            return nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        if step.kind == "cat":
            return nn.Conv2d(2 * CHANNELS, CHANNELS, 1)
        if step.kind == "norm":
            return nn.BatchNorm2d(CHANNELS)
        return nn.GroupNorm(2, CHANNELS) if step.kind == "group" else nn.Identity()

    def forward(self, image: Tensor) -> Tensor:
        values = [self.inward(image)]
        for step, layer in zip(self.steps, self.layers, strict=True):
            x, y = (values[-1 - at % len(values)] for at in (step.first, step.second))
            values.append(self.applied(step.kind, layer, x, y))
        return self.head(fitted(values[-1], image))

    def applied(self, kind: str, layer: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if kind in TWO:
            y = fitted(y, x)
        if kind == "cat":
            return layer(torch.cat([x, y], 1))
        if kind == "iadd":
            x = x * 0.5
            x += y
            return x
        if kind == "relu_":
            return F.relu_(x + 0.1)
        if kind == "gate":
            mask = layer(x).argmax(1, keepdim=True) > 0
            return x * mask + layer(x).detach()
        plain = {
            "add": lambda: (x + y) * 0.7,
            "mul": lambda: x * y.sigmoid(),
            "relu": lambda: x.relu(),
            "pool": lambda: F.max_pool2d(x, 2) if min(x.shape[2:]) > 6 else x.tanh(),
            "up": lambda: F.interpolate(x, scale_factor=2) if max(x.shape[2:]) < 12 else x.tanh(),
            "twice": lambda: self.shared(self.shared(x).tanh()),
            "shift": lambda: x.roll(1, 3)[:, [1, 0, 3, 2]],
        }
        return plain[kind]() if kind in plain else layer(x)


def fitted(x: Tensor, like: Tensor) -> Tensor:
    """A value at the extents of another."""
    return x if x.shape[2:] == like.shape[2:] else F.interpolate(x, size=tuple(like.shape[2:]), mode="nearest")


def steps() -> st.SearchStrategy[tuple[Step, ...]]:
    """Plans of models; the skips reach back to any earlier value."""
    step = st.builds(Step, st.sampled_from([*ONE, *TWO, "conv", "add", "cat"]), st.integers(0, 2), st.integers(0, 9))
    return st.lists(step, min_size=5, max_size=10).map(tuple)
