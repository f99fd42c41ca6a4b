"""Where the time of a node goes, and when bytes leave it, under data, model and hybrid parallelism.

Document `004` draws computing, communication and idle time of its nodes, and expects of model parallelism a «uniform
distribution of the congestion»: a message for every layer instead of the whole model at once. Here every send of a
rank is noted with its bytes and its time; a step is divided into equal parts, and the part in which all ranks
together send most is compared with the mean. Gradients are averaged by mural's ring, whose messages are counted.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from harness.counting import counting, over_ranks
from harness.vision import narrowed, torchvision
from masters import shares
from problems import plan_of, seeded
from torch import nn
from training import together

import mural
from mural.models import LeNet5
from mural.profile.account import Notes, Profile, StepAccount

PARTS = 50
"""Of a step, in each of which bytes are added up."""
WARMUP = 3
Net = tuple[Callable[[], nn.Module], tuple[int, int, int], int]
"""How to build it, its image, and the images of each rank."""
NETS: dict[str, Net] = {
    "lenet5": (LeNet5, (1, 32, 32), 16),
    "alexnet": (lambda: torchvision.models.alexnet(num_classes=10, dropout=0.0), (3, 224, 224), 4),
}
TOYS: dict[str, Net] = {
    "lenet5": (LeNet5, (1, 32, 32), 2),
    "alexnet": (lambda: narrowed("alexnet", 16, classes=10, dropout=0.0), (3, 64, 64), 2),
}
STEP = {"lenet5": 0.05, "alexnet": 1.5}
"""Seconds, roughly, of a step on one thread a rank."""


@dataclass(frozen=True)
class Profiling:
    """Some steps of a network on some ranks, each with its own images."""

    net: str
    way: str
    ranks: int
    steps: int
    device: str = "cpu"
    quick: bool = False

    @property
    def name(self) -> str:
        """The job in a few words."""
        return f"profile of {self.net}, {self.way} on {self.ranks}"

    def measure(self) -> dict[str, Any]:
        """Shares of every rank's mean step, bytes of a step, and the bytes of all ranks in each part of a step."""
        build, image, each = (TOYS if self.quick else NETS)[self.net]
        plan = replace(plan_of(self.way, self.ranks), all_reduce="ring")
        pm = mural.parallelize(seeded(build).to(self.device), plan, loss=F.cross_entropy, image=image)
        optimizer = torch.optim.SGD(pm.parameters(), 0.01, momentum=0.9)
        images = torch.rand(each * self.ranks, *image, generator=torch.Generator().manual_seed(1)).to(self.device)
        target = (torch.arange(len(images)) % 10).to(self.device)

        def step() -> None:
            pm.zero_grad()
            pm.step(images, target)
            optimizer.step()
            if self.device == "cuda":
                torch.cuda.synchronize()

        for _ in range(WARMUP):
            step()
        accounts: list[StepAccount] = []
        gc.collect()
        with counting() as sent, pm.world_mesh.transport.trace() as trace:
            for number in range(self.steps):
                together(self.device)
                begin = time.perf_counter()
                step()
                accounts.append(StepAccount(number, begin, time.perf_counter(), 0.0))
        notes = Notes(pm.world_mesh.rank, tuple(accounts), trace)
        told: list[Any] = over_ranks((notes, list(zip(sent.times, sent.sizes, strict=True))))
        profile = Profile(self.name, tuple(notes for notes, _ in told))
        sends = [send for _, mine in told for send in mine]
        return {
            "shares": [shares(mean) for mean in profile.by_rank],
            "bytes": [sum(size for _, size in mine) / self.steps for _, mine in told],
            "messages": [len(mine) / self.steps for _, mine in told],
            "parts": [spread(sends, *window(profile, number)) for number in range(self.steps)],
            "images": len(images),
        }


def window(profile: Profile, number: int) -> tuple[float, float]:
    """When a step began on the first rank and ended on the last."""
    mine = [notes.steps[number] for notes in profile.notes]
    return min(step.begin for step in mine), max(step.end for step in mine)


def spread(sends: Sequence[tuple[float, int]], begin: float, end: float, parts: int = PARTS) -> list[int]:
    """The bytes that left in each of so many equal parts of a stretch of time.

    >>> spread([(0.0, 1), (0.9, 2), (1.0, 4), (2.0, 8)], 0.0, 1.0, parts=2)
    [1, 6]
    """
    found = [0] * parts
    for when, size in sends:
        if begin <= when <= end:
            found[min(parts - 1, int(parts * (when - begin) / (end - begin)))] += size
    return found


def jobs(*, quick: bool, device: str, rounds: int) -> list[Profiling]:
    """Every way on two and four ranks; the document's figure is two groups of two."""
    ways = [(way, ranks) for ranks in ((2,) if quick else (2, 4)) for way in ("data", "model", "hybrid")]
    ways += [] if quick else [("hybrid, in two groups", 4)]
    return [Profiling(net, way, ranks, max(1, rounds // 2), device, quick) for way, ranks in ways for net in NETS]
