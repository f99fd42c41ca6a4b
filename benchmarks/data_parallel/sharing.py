"""What a step costs on ranks that share one GPU, against one process: the same batch on 1, 2, 4 and 8 ranks.

One process alone runs the whole batch, and then a half, a quarter and an eighth of it, in plain torch and by mural on a
mesh of one rank: how long its kernels take, how long the host needs to queue them, how long a step is. Then that many
processes run their parts at the same time: plain torch without messages («apart»), and mural with them. A step of
mural on n ranks is the sum of what each of these adds to the one before, see `Parts`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from harness.clock import timed
from harness.counting import counting, over_ranks
from harness.meters import METERS
from problems import Problem, problem
from shares import Trace, shares, tracing
from turns import Job, taken
from variants import Ready, by_mural, plain

import mural
from mural.ranks import Mesh

RANKS, QUICK_RANKS = (1, 2, 4, 8), (1, 2)
APART, MURAL = "apart", "mural"
FEW = 3
"""Steps of what does not need many: queueing, sums of gradients, and waits."""
STARTING = 5.0
"""Seconds until ranks are there."""


def divided(name: str, parts: int, quick: bool) -> Problem:
    """A part of the batch of a problem; on most ranks, each has as many images as in the other parts of this benchmark.

    >>> [divided("resnet18", parts, quick=False).batch for parts in RANKS]
    [64, 32, 16, 8]
    """
    given, most = problem(name, quick), max(QUICK_RANKS if quick else RANKS)
    return replace(given, batch=given.batch * most // parts)


def ways(given: Problem, mesh: Mesh, device: str) -> dict[str, Ready]:
    """Plain torch, and mural with batch norms of each rank's own images."""
    return {APART: plain(given, mesh, device), MURAL: by_mural(given, mesh, device, scope="rank")}


@dataclass(frozen=True)
class Sharing(Job):
    """Steps of a model whose batch is cut over some ranks of one device; on one rank, of every part of it."""

    part, kind = "sharing", "sharing"
    device: str = "cpu"

    def measure(self) -> dict[str, Any]:
        """Seconds of steps, and of what they consist of. Collective."""
        if self.device == "cuda":
            torch.cuda.set_device(0)
        mesh = mural.init(data=self.ranks)
        if self.ranks > 1:
            given = divided(self.model, self.ranks, self.quick)
            return {"images": given.batch, **self.together(ways(given, mesh, self.device), mesh)}
        parts = QUICK_RANKS if self.quick else RANKS
        return {"parts": {str(n): self.alone(divided(self.model, n, self.quick), mesh) for n in parts}}

    def alone(self, given: Problem, mesh: Mesh) -> dict[str, Any]:
        """A part of the batch in the only process: seconds of steps, until they are queued, and of their kernels."""
        ready = ways(given, mesh, self.device)
        found = self.steps(ready)
        kernels = {name: METERS[self.device]().computing(way.step) for name, way in ready.items()}
        return {"images": given.batch, **found, "kernels": kernels}

    def together(self, ready: dict[str, Ready], mesh: Mesh) -> dict[str, Any]:
        """All ranks at the same time: seconds of their steps; and what mural's ranks send, and wait for."""
        found = self.steps(ready)
        model, step = ready[MURAL].model, ready[MURAL].step
        with counting() as sent:
            step()
        size = sum(sent.sizes) + sum(size for size, _ in sent.added)
        counts = {"messages": sent.messages, "sums": len(sent.added), "bytes": size}
        return {**found, **counts, "summing": self.summing(model, mesh), "waits": self.waits(step, mesh)}

    def steps(self, ready: dict[str, Ready]) -> dict[str, Any]:
        """Seconds of each way's steps, and until they are queued: after that, the host has nothing to do."""
        seconds = taken({name: way.step for name, way in ready.items()}, self.rounds, self.device)
        queued = {n: [timed(w.step, self.device, wait=False) for _ in range(FEW)] for n, w in ready.items()}
        return {"seconds": seconds, "queued": queued}

    def summing(self, model: torch.nn.Module, mesh: Mesh) -> list[float]:
        """Seconds in which gradients are averaged while nothing is computed."""
        found: list[float] = []
        for _ in range(1 + FEW):
            for parameter in model.parameters():
                parameter.grad = parameter.detach().clone()
            found.append(timed(lambda: mural.reduce_gradients(model, mesh), self.device))
        return found[1:]

    def waits(self, step: Any, mesh: Mesh) -> list[dict[str, float]]:
        """For each rank, what its time was spent on, by the clock of the part `shares`."""
        traces: list[Trace] = []
        for _ in range(FEW):
            trace = Trace()
            dist.barrier()
            with tracing(mesh.transport, trace):
                step()
                METERS[self.device]().wait()
            traces.append(trace)
        return shares(over_ranks([asdict(trace) for trace in traces]))

    @property
    def expected(self) -> float:
        """Seconds that it takes, roughly; the models on as many ranks share processes."""
        return STARTING / 2 + (9.0 if self.ranks == 1 else 3.0 + 0.7 * self.ranks)


def jobs(rounds: int, quick: bool, device: str) -> list[Sharing]:
    """Every model on every number of ranks, few first."""
    models, ranks = (("unet",), QUICK_RANKS) if quick else (("resnet18", "unet"), RANKS)
    return [Sharing(model, n, rounds, quick, device) for n in ranks for model in models]
