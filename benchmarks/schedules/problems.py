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


@dataclass(frozen=True)
class Problem:
    """A model, and one batch for all ranks together."""

    model: Callable[[], nn.Module]
    extents: tuple[int, int]
    per_pixel: bool
    normalized: bool
    """Whether it has batch norms, which see each micro-batch alone where there are several."""
    words: str

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


PROBLEMS = {
    "unet": Problem(
        lambda: UNet(width=24, depth=4, norm="group"), (128, 128), True, False, "U-Net of width 24, group norms, 128²"
    ),
    "resnet110": Problem(lambda: ResNetV2(110, classes=CLASSES), (32, 32), False, True, "ResNet-110-v2, 32²"),
    "resnet1001": Problem(lambda: ResNetV2(1001, classes=CLASSES), (32, 32), False, True, "ResNet-1001-v2, 32²"),
}
QUICK = {
    "unet": Problem(lambda: UNet(width=8, depth=2, norm="group"), (32, 32), True, False, "toy U-Net"),
    "resnet110": Problem(lambda: ResNetV2(20, classes=CLASSES, width=4), (16, 16), False, True, "toy ResNet-20-v2"),
    "resnet1001": Problem(lambda: ResNetV2(29, classes=CLASSES, width=4), (16, 16), False, True, "toy ResNet-29-v2"),
}


def problem(name: str, quick: bool) -> Problem:
    """The problem of that name, or its toy."""
    return (QUICK if quick else PROBLEMS)[name]


@dataclass(frozen=True)
class Division:
    """How ranks share the work: data ranks × stages, under a schedule."""

    data: int
    stage: int
    schedule: str = "1f1b"

    @property
    def ranks(self) -> int:
        """How many ranks it takes."""
        return self.data * self.stage

    @property
    def words(self) -> str:
        """What the page calls it."""
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

    @property
    def name(self) -> str:
        """What it is, in words."""
        return f"{self.model}, {self.division.words}, {self.batch} images"

    @property
    def about(self) -> dict[str, Any]:
        """What a record of it begins with."""
        division = self.division
        about = {"name": self.name, "model": self.model, "division": division.words, "ranks": division.ranks}
        return about | {"data": division.data, "batch": self.batch}


def divisions(ranks: int, stages: int) -> list[Division]:
    """One rank, data alone, stages alone, and both together, with 1F1B and with GEMS.

    >>> [division.words for division in divisions(16, 4)]
    ['one rank', 'data 4', 'data 16', 'stage 4', 'GEMS 4', 'data 4 × stage 4', 'data 4 × GEMS 4']
    """
    data = max(1, ranks // stages)
    found = [Division(1, 1), Division(data, 1), Division(data * stages, 1)]
    if stages > 1:
        found += [Division(d, stages, schedule) for d in (1, data) for schedule in ("1f1b", "gems")]
    return list(dict.fromkeys(found))
