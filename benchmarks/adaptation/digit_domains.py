"""Digits in several domains: scikit-learn's, and the same inverted, noisy, blurred, and on textured backgrounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional as F

EACH = 700
"""Images of each domain to train on; source and targets show different digits, and the rest is for the test."""
Labelled = tuple[Tensor, Tensor]


def inverted(images: Tensor, draws: torch.Generator) -> Tensor:
    """Dark strokes on a bright background."""
    return 1 - images


def noisy(images: Tensor, draws: torch.Generator) -> Tensor:
    """Uniform noise from 0 to 0.9 on every pixel."""
    return (images + 0.9 * torch.rand(images.shape, generator=draws)).clamp(0, 1)


def blurred(images: Tensor, draws: torch.Generator) -> Tensor:
    """Smoothed twice by (1, 2, 1) / 4 along both dims."""
    line = torch.tensor([0.25, 0.5, 0.25])
    for _ in range(2):
        images = F.conv2d(images, (line[:, None] * line)[None, None], padding=1)
    return images


def textured(images: Tensor, draws: torch.Generator) -> Tensor:
    """On stripes from 0 to 0.8, shifted at random."""
    rows, columns = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    shift = 2 * torch.pi * torch.rand(len(images), 1, 1, 1, generator=draws)
    return torch.maximum(images, 0.4 + 0.4 * torch.sin(2.2 * columns + 1.1 * rows + shift))


MADE: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "inverted": inverted,
    "noisy": noisy,
    "blurred": blurred,
    "textured": textured,
}
SOURCE, TARGETS = "clean", tuple(MADE)


@dataclass(frozen=True)
class Digits:
    """What a run trains and is tested on: labelled images of the source, images of each target, and tests of all."""

    source: Labelled
    targets: dict[str, Labelled]
    """With labels, which only the best case may look at."""
    tests: dict[str, Labelled]


def digits(seed: int) -> Digits:
    """The digits in an order that the seed gives."""
    draws = torch.Generator().manual_seed(seed)
    pixels, classes = load_digits(return_X_y=True)
    order = torch.randperm(len(classes), generator=draws)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8)[order] / 16
    labels = torch.tensor(classes)[order]
    second, rest = slice(EACH, 2 * EACH), slice(2 * EACH, None)
    targets = {name: (make(images[second], draws), labels[second]) for name, make in MADE.items()}
    tests = {name: (make(images[rest], draws), labels[rest]) for name, make in MADE.items()}
    return Digits((images[:EACH], labels[:EACH]), targets, {SOURCE: (images[rest], labels[rest]), **tests})
