"""How long the digits train: seconds by algorithm, width and number of processes, up to many more than there are cores.

Fourie (2019), figures 9 to 15: seconds of the training against the width of the second hidden layer, for the all-reduce
of Open MPI (a tree or a butterfly) and for two rings, on 10 machines of 8 cores. Weights are averaged once an epoch, as
there. All algorithms train in the same processes, one after the other; a time is that of the slowest rank.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import digits
import torch.distributed as dist
from digits import ALONE, trained
from harness.counting import over_ranks
from torch import Tensor

from mural.collectives import all_reduce
from mural.collectives.choose import BACKEND
from mural.collectives.team import team_of

NAMES = ("tree", "butterfly", "ring", "ring-blocking", BACKEND)
WIDTHS = (32, 512, 4096)
RANKS = (1, 2, 4, 8, 16, 32, 48, 64, 80)
STEP = {32: 3e-4, 512: 4e-4, 4096: 1e-3}
"""Seconds of a step on one core, roughly, by width."""


@dataclass(frozen=True)
class Elapsed:
    """Trainings of one width on some ranks, by every algorithm."""

    ranks: int
    width: int
    epochs: int = digits.EPOCHS
    transport: str = "gloo"

    @property
    def name(self) -> str:
        """The job in a few words."""
        return f"{self.transport}/{self.ranks}/{self.width}"

    @property
    def about(self) -> dict[str, Any]:
        """What a record of it begins with."""
        about = {"kind": "elapsed", "name": self.name, "transport": self.transport, "ranks": self.ranks}
        return about | {"width": self.width, "epochs": self.epochs}

    def measure(self) -> dict[str, Any]:
        """Seconds of a training, those spent in averages (the mean of the ranks), and the accuracy, by algorithm."""
        found: dict[str, dict[str, float]] = {}
        size = 0
        for name in NAMES if self.ranks > 1 else (ALONE,):
            average = Timed(name)
            found[name], size = self.once(average)
        return {"found": found, "bytes": size}

    def once(self, average: Timed) -> tuple[dict[str, float], int]:
        """One training, which all ranks begin together. Collective."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        digits.images("cpu")
        if self.ranks > 1:
            average(digits.network(self.width, 0)[0].weight.detach().reshape(-1))  # connections are made once
            dist.barrier()
        average.seconds, begin = 0.0, time.perf_counter()
        good, size = trained(self.width, 0, "weights", average, rank, self.ranks, self.epochs)
        took = over_ranks((time.perf_counter() - begin, average.seconds))
        told = {"seconds": max(t for t, _ in took), "averaging": sum(s for _, s in took) / len(took), "accuracy": good}
        return told, size

    @property
    def expected(self) -> float:
        """Seconds that it takes on 16 cores, roughly; a third of the start of its ranks, which widths share."""
        turns = max(1.0, self.ranks / 16)
        steps = self.epochs * 360 / self.ranks * STEP[self.width] * turns
        averages = self.epochs * self.ranks * 4e-4 * turns
        start = (3 + self.ranks / 3) / len(WIDTHS)
        return start + (len(NAMES) if self.ranks > 1 else 1) * (steps + averages)


class Timed:
    """An average over ranks by an algorithm, and the seconds that it took so far."""

    def __init__(self, name: str) -> None:
        self.name, self.seconds = name, 0.0
        self.group = None if name == ALONE else team_of(None).group

    def __call__(self, row: Tensor) -> Tensor:
        begin = time.perf_counter()
        # In a group: without one, ranks ask each time whether all are there.
        found = row if self.name == ALONE else all_reduce(row, self.name, self.group, average=True)
        self.seconds += time.perf_counter() - begin
        return found


def jobs(quick: bool) -> list[Elapsed]:
    """All numbers of ranks, few first."""
    if quick:
        return [Elapsed(n, 32, epochs=2) for n in (1, 3)]
    return [Elapsed(n, width) for n in RANKS for width in WIDTHS]
