"""The tables of document `004`: accuracy and time of training over batch sizes and ranks, for each way to divide."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from crops import Crops, cut
from harness.counting import over_ranks
from problems import QuickNet, plan_of, seeded

import mural

BATCHES = (10, 50, 100, 200, 400, 800)
LOOKS = 4
"""How often accuracy is measured, at equal distances; the last time at the end."""
NUDGE = 1e-7
SLOWER = 0.1
"""What the learning rate is multiplied by for the last of these stretches."""


@dataclass(frozen=True)
class Training:
    """A training run; `each` is the number of training crops of each class."""

    way: str
    ranks: int
    batch: int
    iterations: int
    width: int
    rate: float
    device: str = "cpu"
    each: int = 1000
    tests: int = 100
    dtype: str = "float32"
    nudge: float = 0.0
    """How much the first weights are changed, relatively: as rounding does that differs between ways."""
    transport: str = "gloo"
    """What carries messages."""

    @property
    def name(self) -> str:
        """The job in a few words."""
        about = f"{self.iterations} iterations, width {self.width}, rate {self.rate:g}"
        about += f", {self.dtype}" if self.dtype != "float32" else ""
        about += f", nudged by {self.nudge:g}" if self.nudge else ""
        about += f", over {self.transport}" if self.transport != "gloo" else ""
        return f"{self.way} on {self.ranks}, batch {self.batch}, {about}"

    def measure(self) -> dict[str, Any]:
        """Seconds of all iterations on the slowest rank, losses, and accuracy on the way and at the end."""
        kind: torch.dtype = getattr(torch, self.dtype)
        train = cut(self.each, test=False, seed=0).to(self.device, kind)
        test = cut(self.tests, test=True, seed=0).to(self.device, kind)
        model = seeded(lambda: QuickNet(self.width, int(train.labels.max()) + 1)).to(self.device, kind)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + self.nudge)
        pm = mural.parallelize(model, plan_of(self.way, self.ranks), loss=F.cross_entropy)
        optimizer = torch.optim.SGD(pm.parameters(), self.rate, momentum=0.9, weight_decay=0.004)
        draw = torch.Generator().manual_seed(1)
        pm.step(*train.batch(torch.arange(self.batch) % len(train.labels)))  # what happens at the first step alone
        seconds, accuracies, losses = 0.0, list[tuple[int, float]](), list[float]()
        looks = sorted({self.iterations * look // LOOKS for look in range(1, LOOKS + 1)} - {0})
        at = 0
        for until in looks:
            for group in optimizer.param_groups:
                group["lr"] = self.rate * (SLOWER if until == looks[-1] else 1.0)
            took, loss = self.iterate(pm, optimizer, train, draw, until - at)
            seconds, at = seconds + took, until
            accuracies.append((until, accuracy(pm, test)))
            losses.append(loss)
        held = over_ranks(sum(p.numel() for p in pm.parameters()))
        return {
            "seconds": seconds,
            "accuracy": accuracies[-1][1],
            "accuracies": accuracies,
            "losses": losses,
            "held": held,
            "classes": int(train.labels.max()) + 1,
        }

    def iterate(
        self, pm: Any, optimizer: torch.optim.Optimizer, train: Crops, draw: torch.Generator, count: int
    ) -> tuple[float, float]:
        """Seconds of so many iterations on the slowest rank, and the last loss."""
        gc.collect()
        together(self.device)
        begin, loss = time.perf_counter(), torch.zeros(())
        for _ in range(count):
            chosen = torch.randint(len(train.labels), (self.batch,), generator=draw).to(self.device)
            optimizer.zero_grad()
            loss = pm.step(*train.batch(chosen))
            optimizer.step()
        last = float(loss)
        return max(over_ranks(time.perf_counter() - begin)), last


def together(device: str) -> None:
    """Let all ranks begin at the same time."""
    if device == "cuda":
        torch.cuda.synchronize()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def accuracy(pm: Any, test: Crops) -> float:
    """The part of the test crops that the model names. Collective."""
    pm.eval()
    scores = pm(test.images())
    pm.train()
    scores = scores.full() if isinstance(scores, mural.ShardedTensor) else scores
    return float((scores.argmax(1) == test.labels).double().mean())


def jobs(*, quick: bool, device: str, iterations: int, width: int, rate: float) -> list[Training]:
    """Batches on two ranks, then one to four ranks at batch 200; every way, and two groups of two at the end."""
    ways = ("data", "model", "hybrid")
    more = {"each": 40, "tests": 10} if quick else {}

    def job(way: str, ranks: int, batch: int) -> Training:
        return Training(way, ranks, batch, iterations, width, rate, device, **more)

    if quick:
        toy = [job("one rank", 1, 10), *(job(way, 2, batch) for way in ways for batch in (10, 20))]
        return [*toy, *agreement(toy[0])[1:3]]
    found = [job("one rank", 1, 200), *(job(way, 2, batch) for batch in BATCHES for way in ways)]
    found += [job(way, ranks, 200) for ranks in (3, 4) for way in ways]
    return [*found, job("hybrid, in two groups", 4, 200), *agreement(found[0])]


def agreement(one: Training) -> list[Training]:
    """What shows whether ways differ by more than rounding, at the smallest batch, where steps differ most.

    One rank, with weights as they are and changed as rounding may; then every way in float64.
    """
    small = replace(one, batch=BATCHES[0])
    double = replace(small, dtype="float64")
    ways = ("data", "model", "hybrid")
    return [small, replace(small, nudge=NUDGE), double, *(replace(double, way=way, ranks=2) for way in ways)]
