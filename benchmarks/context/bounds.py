"""What can be known from a window: the accuracy of an observer who sees all that a patch and a receptive field show.

Nobody beats it, whatever the model: outside the window nothing hints at the answer (see scene.py). A position sees
the tiles that cover it, cut to its receptive field; both are boxes, so sums over a window are differences of
cumulative sums. Where a choice had to be made, the observer sees more: he knows the outlines of lobules, counts
nuclei that a window merely touches, and has the largest receptive field of any position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from context.cases import Arm
from context.scene import DARK, PALE_DARK, SPACING, SPREAD, Question, Scene
from mural.models import UNet

EDGES = (32, 64, 128, 256)
"""Distances from the hilum that divide nuclei into near and far."""


@dataclass(frozen=True)
class Windows:
    """For each row (or column) the half-open interval of rows that it can know of."""

    low: Tensor
    high: Tensor

    def grown(self, margin: int, size: int) -> Windows:
        """Windows that reach further by so many pixels."""
        return Windows((self.low - margin).clamp_min(0), (self.high + margin).clamp_max(size))


@lru_cache
def reach(depth: int) -> int:
    """How far, in pixels, an input can lie from an output that depends on it, in the U-Net of that depth.

    Measured, along one dim: an impulse in a network of positive weights shows everywhere it can. (All dims are alike.)

    >>> reach(2)
    23
    """
    length = 64 * 2**depth
    model = UNet(1, 1, 1, width=1, depth=depth, norm=None).double()
    for name, parameter in model.named_parameters():
        torch.nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 0.5)
    middle = length // 2
    with torch.no_grad():
        impulses = torch.eye(length, dtype=torch.float64)[middle : middle + 2**depth, None]
        seen = model(impulses)[:, 0] > 0
    return max(int((row.nonzero() - middle - offset).abs().max()) for offset, row in enumerate(seen))


def starts(size: int, patch: int) -> list[int]:
    """Where tiles begin along one dim: they overlap by half.

    >>> starts(64, 32), starts(64, 64)
    ([0, 16, 32], [0])
    """
    return list(range(0, size - patch + 1, max(1, patch // 2)))


def windows(size: int, patch: int, distance: int) -> Windows:
    """What each position knows of: the tiles of that extent that cover it, within that distance.

    >>> seen = windows(64, 32, 20)
    >>> [(int(seen.low[i]), int(seen.high[i])) for i in (0, 20, 63)]
    [(0, 21), (0, 41), (43, 64)]
    """
    at = torch.arange(size)
    covers = [(s, s + patch) for s in starts(size, patch)]
    low = torch.tensor([min(a for a, b in covers if a <= i < b) for i in range(size)])
    high = torch.tensor([max(b for a, b in covers if a <= i < b) for i in range(size)])
    return Windows(torch.maximum(low, at - distance), torch.minimum(high, at + distance + 1))


def sums(values: Tensor, seen: Windows) -> Tensor:
    """The sum of the values (N, S, S) over the window of every position: (N, S, S).

    >>> sums(torch.ones(1, 4, 4), windows(4, 4, 1))[0, :2].tolist()
    [[4.0, 6.0, 6.0, 4.0], [6.0, 9.0, 9.0, 6.0]]
    """
    total = F.pad(values.double().cumsum(1).cumsum(2), (1, 0, 1, 0))
    rows = total[:, seen.high] - total[:, seen.low]
    return (rows[:, :, seen.high] - rows[:, :, seen.low]).to(values.dtype)


def evidence(density: Tensor) -> Tensor:
    """By how much each nucleus speaks for grade 2: the log of its likelihood there over that in grade 1."""
    pale, dark = (torch.exp(-(((density - mean) / SPREAD) ** 2) / 2) for mean in PALE_DARK)
    first, second = (share * dark + (1 - share) * pale for share in DARK)
    return torch.log(second / first)


def shown(scene: Scene, question: Question, seen: Windows) -> Tensor:
    """The chance of an observer to be right about each nucleus pixel of one image: 1, 0, or ½ where he must guess."""
    size = scene.image.shape[1]
    chance = torch.full(scene.lobule.shape, 0.5, device=scene.image.device)
    wide = seen.grown(SPACING // 3, size)
    answer = scene.answer(question)
    for number in scene.lobule.unique().tolist():
        here = scene.lobule == number
        if number < 0:
            continue
        if question == "hilum":
            visible = sums((scene.hilum == number).float(), seen) > 0.5
            chance = torch.where(here & visible, 1.0, chance)
        else:
            speaks = torch.where(scene.owner == number, evidence(scene.density), 0.0)
            image = torch.arange(len(answer), device=answer.device)[:, None, None]
            field = torch.zeros(chance.shape, dtype=torch.float64, device=chance.device)
            field[image, scene.centre[..., 0], scene.centre[..., 1]] = speaks.double()
            verdict = sums(field, wide)
            right = torch.where(verdict.abs() < 1e-9, 0.5, ((verdict > 0) == (answer == 2)).float().double())
            chance = torch.where(here, right.float(), chance)
    return chance


def distances(scene: Scene) -> Tensor:
    """For each nucleus pixel, how many of EDGES its window must exceed to show the hilum; −1 elsewhere: (N, S, S)."""
    size = scene.image.shape[1]
    missed = [shown(scene, "hilum", windows(size, size, edge)) < 1 for edge in EDGES]
    return torch.where(scene.lobule >= 0, torch.stack(missed).sum(0), -1)


def balanced(right: Tensor, answer: Tensor) -> float | None:
    """The mean of the two kinds' own means: one half for a constant guess, however many there are of each.

    >>> balanced(torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.tensor([1, 1, 1, 2]))
    0.5
    """
    kinds = [right[answer == kind] for kind in (1, 2)]
    return None if any(kind.numel() == 0 for kind in kinds) else float(sum(kind.mean() for kind in kinds) / 2)


def accuracies(right: Tensor, answer: Tensor, far: Tensor) -> dict[str, Any]:
    """The balanced accuracy on all pixels of nuclei, and by distance from the hilum, as `distances` gives it."""
    bins = [far == k for k in range(len(EDGES) + 1)]
    return {
        "accuracy": balanced(right, answer),
        "by_distance": [balanced(right[here], answer[here]) for here in bins],
    }


def best(scene: Scene, arm: Arm, far: Tensor) -> dict[str, Any]:
    """The observer's accuracies."""
    if arm.question == "own":
        # A single number decides: the density, against the middle of two equal normal distributions.
        sure = 0.5 * (1 + math.erf((PALE_DARK[1] - PALE_DARK[0]) / 2 / SPREAD / math.sqrt(2)))
        return {"accuracy": sure, "by_distance": [sure] * (len(EDGES) + 1)}
    seen = windows(scene.image.shape[1], arm.patch, reach(arm.depth))
    return accuracies(shown(scene, arm.question, seen), scene.answer(arm.question), far)
