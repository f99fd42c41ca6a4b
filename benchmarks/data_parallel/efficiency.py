"""Training efficiency over ranks: gradients by a parameter server, by a ring, and by the backend.

Document 000 shows (figure 2, of Horovod's paper) how much of n times one device's images a second is left on n devices,
with a parameter server and with a ring. Here every rank has a core and its own images, as many on any number of ranks:
efficiency is the time of one rank's step over that of n ranks. Ranks «apart» exchange nothing, so that they show
what cores lose that share caches and a memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from problems import PROBLEMS, problem
from turns import Job, taken
from variants import by_mural, plain

import mural

ALGORITHMS = ("parameter-server", "tree", "ring", "backend")
APART = "apart"
RANKS = (1, 2, 4, 8, 16)
SECONDS = {"resnet18": 0.4, "vgg16": 0.1, "lenet": 0.04}
"""Of a step on one core, roughly."""
STARTING, SERVING = 4.0, 0.05
"""Seconds until ranks are there, and that a server takes for each rank."""


@dataclass(frozen=True)
class Efficiency(Job):
    """Steps of a model on some ranks, with gradients exchanged in several ways that take turns."""

    part, kind = "servers", "efficiency"

    def measure(self) -> dict[str, Any]:
        """Seconds of each way's steps. Collective."""
        mesh, given = mural.init(data=self.ranks), problem(self.model, self.quick)
        ready = {APART: plain(given, mesh, "cpu")}
        for name in ALGORITHMS if self.ranks > 1 else ():
            ready[name] = by_mural(given, mesh, "cpu", scope="rank", algorithm=name)
        parameters = sum(p.numel() for p in ready[APART].model.parameters())
        seconds = taken({name: way.step for name, way in ready.items()}, self.rounds)
        return {"seconds": seconds, "parameters": parameters, "images": given.batch}

    @property
    def expected(self) -> float:
        """Seconds that it takes, roughly."""
        ways = len(ALGORITHMS) + 1 if self.ranks > 1 else 1
        each = SECONDS[self.model] * (1.5 if self.ranks > 4 else 1.1) + SERVING * self.ranks / 4
        return STARTING + (self.rounds + 2) * ways * each


@dataclass(frozen=True)
class Processes:
    """Document 004's third table: one more process with 200 images of its own, the same number of iterations."""

    ranks: int
    rounds: int
    quick: bool = False

    @property
    def name(self) -> str:
        """The job in a few words."""
        return f"processes/{self.ranks}"

    @property
    def about(self) -> dict[str, Any]:
        """What a record of it begins with."""
        return {"kind": "processes", "name": self.name, "ranks": self.ranks}

    def measure(self) -> dict[str, Any]:
        """Seconds of iterations. Collective."""
        mesh = mural.init(data=dist.get_world_size())
        ready = by_mural(problem("lenet", self.quick), mesh, "cpu", scope="rank")
        return {"seconds": taken({"mural": ready.step}, self.rounds)["mural"]}

    @property
    def expected(self) -> float:
        """Seconds that it takes, roughly."""
        return STARTING + 1.5 * SECONDS["lenet"] * self.rounds


def server_jobs(rounds: int, quick: bool) -> list[Efficiency]:
    """Every model on every number of ranks, few first."""
    models, ranks = (("vgg16",), (1, 2)) if quick else (("resnet18", "vgg16"), RANKS)
    return [Efficiency(model, n, rounds, quick) for n in ranks for model in models]


def process_jobs(rounds: int, quick: bool) -> list[Processes]:
    """One to four processes; an iteration is short, so that there are many."""
    return [Processes(n, 10 * rounds, quick) for n in ((1, 2) if quick else (1, 2, 3, 4))]


def words(model: str) -> str:
    """What the page calls a model."""
    return PROBLEMS[model].words
