"""What is trained, under which plans: the models that HyPar-Flow and GEMS measured, and a U-Net."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mural.models import ResNetV2, UNet
from mural.plans import Plan

CLASSES = 10
MICROBATCHES = 8
"""Of plans with stages, unless others are asked for."""


@dataclass(frozen=True)
class Problem:
    """A model, and one batch for all ranks together."""

    model: Callable[[], nn.Module]
    extents: tuple[int, int]
    per_pixel: bool
    normalized: bool
    """Whether it has batch norms, which see each micro-batch alone where there are several."""
    words: str
    seconds: float = 0.01
    """Of a step with one image on one core, roughly: for the list of what a run takes."""

    def build(self) -> nn.Module:
        """The model, the same on every rank."""
        torch.manual_seed(0)
        return self.model()

    def batch(self, images: int) -> tuple[Tensor, Tensor]:
        """Images and their labels, the same on every rank."""
        generator = torch.Generator().manual_seed(1)
        labels = torch.randint(
            2 if self.per_pixel else CLASSES, (images, *(self.extents if self.per_pixel else ())), generator=generator
        )
        return torch.randn(images, 3, *self.extents, generator=generator), labels


def resnet(layers: int, side: int, seconds: float) -> Problem:
    """ResNet-v2 of so many layers on images of that side."""
    words = f"ResNet-{layers}-v2, {side}²"
    return Problem(lambda: ResNetV2(layers, classes=CLASSES), (side, side), False, True, words, seconds)


PROBLEMS = {
    "unet": Problem(
        lambda: UNet(width=24, depth=4, norm="group"), (128, 128), True, False, "U-Net of width 24, group norms, 128²",
        0.12,
    ),
    "resnet110": resnet(110, 32, 0.03),
    "resnet110-64": resnet(110, 64, 0.11),
    "resnet110-128": resnet(110, 128, 0.45),
    "resnet1001": resnet(1001, 32, 0.3),
    "resnet1001-48": resnet(1001, 48, 0.7),
}  # fmt: skip
"""48² is as much as 16 ranks with 8 images each of ResNet-1001 can keep in 128 GiB."""
QUICK = {
    "unet": Problem(lambda: UNet(width=8, depth=2, norm="group"), (32, 32), True, False, "toy U-Net"),
    "resnet110": Problem(lambda: ResNetV2(20, classes=CLASSES, width=4), (16, 16), False, True, "toy ResNet-20-v2"),
    "resnet1001": Problem(lambda: ResNetV2(29, classes=CLASSES, width=4), (16, 16), False, True, "toy ResNet-29-v2"),
}
SETUP = 4.0
"""Seconds until a model is divided and has taken its first step, beyond that step."""
CROWDED = 1.7
"""How much longer a step takes where all cores work."""


def problem(name: str, quick: bool) -> Problem:
    """The problem of that name, or its toy, which has one size."""
    return QUICK[name.partition("-")[0]] if quick else PROBLEMS[name]


@dataclass(frozen=True)
class Division:
    """How ranks share the work: data ranks × stages, under a schedule; or `apart`, with nothing to share."""

    data: int
    stage: int
    schedule: str = "1f1b"
    apart: bool = False
    """Every rank trains a model of its own on its own images: what cores that share a memory cost, without messages."""

    @property
    def ranks(self) -> int:
        """How many ranks it takes."""
        return self.data * self.stage

    @property
    def words(self) -> str:
        """What the page calls it."""
        if self.apart:
            return f"{self.data} apart"
        line = "GEMS" if self.schedule == "gems" else "stage"
        parts = [f"data {self.data}"] * (self.data > 1) + [f"{line} {self.stage}"] * (self.stage > 1)
        return " × ".join(parts) or "one rank"

    def plan(self, microbatches: int, normalized: bool) -> Plan:
        """The plan. Without stages there is one micro-batch; batch norm sees each rank's images of one alone."""
        if self.stage == 1:
            return Plan(data=self.data, batchnorm="rank" if normalized else "global")
        norm = "micro-rank" if normalized and microbatches > 1 else "global"
        return Plan(
            data=self.data,
            stage=self.stage,
            schedule=self.schedule,  # pyright: ignore[reportArgumentType]
            microbatches=microbatches,
            cuts="time",
            batchnorm=norm,
        )


@dataclass(frozen=True)
class Job:
    """A model to be trained under a division, with that many images a step, all ranks together."""

    model: str
    division: Division
    batch: int
    microbatches: int = MICROBATCHES

    @property
    def ranks(self) -> int:
        """How many ranks it takes."""
        return self.division.ranks

    @property
    def words(self) -> str:
        """The division, with the number of micro-batches where it is another one than usual."""
        many = self.division.stage > 1 and self.microbatches != MICROBATCHES
        return self.division.words + f", {self.microbatches} micro-batches" * many

    @property
    def name(self) -> str:
        """What it is, in words."""
        return f"{self.model}, {self.words}, {self.batch} images"

    @property
    def about(self) -> dict[str, Any]:
        """What a record of it begins with."""
        about = {"kind": "step", "name": self.name, "model": self.model, "division": self.words, "ranks": self.ranks}
        return about | {"data": self.division.data, "batch": self.batch}

    def expected(self, rounds: int, seconds: float) -> float:
        """Seconds that it takes on a machine with a core for each rank, roughly."""
        ranks, stage = self.division.ranks, self.division.stage
        bubble = 1 + (stage - 1) / self.microbatches
        step = PROBLEMS[self.model].seconds * self.batch / ranks * bubble * (CROWDED if ranks > 4 else 1)
        return SETUP + step * (1 + max(1, min(rounds, seconds / step)))


def divisions(ranks: int, stages: int) -> list[Division]:
    """One rank, data alone, stages alone, both together with 1F1B and with GEMS, and ranks with nothing in common.

    >>> [division.words for division in divisions(16, 4)]
    ['one rank', 'data 4', 'data 16', 'stage 4', 'GEMS 4', 'data 4 × stage 4', 'data 4 × GEMS 4', '16 apart']
    """
    data = max(1, ranks // stages)
    found = [Division(1, 1), Division(data, 1), Division(data * stages, 1)]
    if stages > 1:
        found += [Division(d, stages, schedule) for d in (1, data) for schedule in ("1f1b", "gems")]
    apart = [Division(data * stages, 1, apart=True)] if data * stages > 1 else []
    return list(dict.fromkeys(found + apart))
