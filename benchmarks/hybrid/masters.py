"""A master and its workers beside an all-reduce: seconds, messages, and where every rank's time goes."""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness.counting import counting, over_ranks
from master_worker import Master
from problems import seeded
from torch import Tensor, nn

import mural
from mural.collectives.algorithms import all_reduction
from mural.comm.trace import Trace
from mural.gradients import Reducer
from mural.profile.account import Notes, Profile, Shares, StepAccount, mean
from mural.ranks import Mesh

WARMUP = 2
STEPS = 4
"""Of each turn."""
CHUNKS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Updating:
    """Steps by a master that sends the weights in so many chunks, and by an all-reduce (0), in the same processes.

    The ways take turns, some steps at a time, so that what else the machine does meets all of them.
    """

    counts: tuple[int, ...]
    ranks: int
    images: int
    """For each rank."""
    width: int
    rounds: int
    """Turns of each way, of some steps."""
    device: str = "cpu"

    @property
    def name(self) -> str:
        """The job in a few words."""
        return f"master and all-reduce, {self.ranks} ranks, {self.images} images each, width {self.width}"

    def measure(self) -> dict[str, Any]:
        """For every way: seconds of each turn's mean step, messages of an update, and shares of every rank."""
        mesh = mural.init(data=self.ranks)
        image = torch.rand(self.images * self.ranks, 3, 32, 32, device=self.device)
        target = (torch.arange(len(image)) % 10).to(self.device)
        ways = {count: way_of(count, self.width, mesh, self.device) for count in self.counts}
        sent = {count: way.counted(image, target) for count, way in ways.items()}
        notes: dict[int, list[tuple[Notes, ...]]] = {count: [] for count in ways}
        for turn in range(self.rounds):
            for count in self.counts if turn % 2 else reversed(self.counts):
                notes[count].append(tuple(over_ranks(ways[count].traced(image, target, self.device))))
        found: list[dict[str, Any]] = []
        for count, way in ways.items():
            profiles = [Profile(self.name, turn) for turn in notes[count]]
            every = [s for profile in profiles for s in profile.shares]
            found.append(
                {
                    "chunks": count,
                    "seconds": [wall(turn) for turn in notes[count]],
                    "sent": sent[count],
                    "planned": way.planned(),
                    "shares": [shares(mean([s for s in every if s.rank == rank])) for rank in range(self.ranks)],
                }
            )
            way.close()
        parameters = sum(p.numel() for p in ways[self.counts[0]].model.parameters())
        return {"ways": found, "parameters": parameters, "steps": STEPS}


def wall(turn: Sequence[Notes]) -> float:
    """Seconds of a step, from the first begin to the last end."""
    return (max(n.steps[-1].end for n in turn) - min(n.steps[0].begin for n in turn)) / STEPS


class EvenNet(nn.Module):
    """Eight equal convolutions between a small first and a small last layer, so that chunks of weights can be equal."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 4, stride=4)
        self.middle = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(8))
        self.last = nn.Linear(width, 10)

    def forward(self, image: Tensor) -> Tensor:
        """Scores of shape (batch, 10)."""
        x = self.first(image)
        for layer in self.middle:
            x = layer(F.relu(x))
        return self.last(x.mean((2, 3)))


def way_of(count: int, width: int, mesh: Mesh, device: str) -> Way:
    """A model of its own, with a master that sends so many chunks; 0: with an all-reduce."""
    model = seeded(lambda: EvenNet(width)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    return Mastered(model, optimizer, mesh, count) if count else Reduced(model, optimizer, mesh)


class Way(ABC):
    """Steps of a model on some ranks; what differs is what happens around and after backward."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh):
        self.model, self.optimizer, self.mesh = model, optimizer, mesh

    def compute(self, image: Tensor, target: Tensor) -> None:
        """Forward and backward on this rank's images."""
        self.optimizer.zero_grad()
        scores = self.model(mural.shard(image, self.mesh))
        with self.watching():
            F.cross_entropy(scores, mural.shard(target, self.mesh, dims=())).backward()

    def counted(self, image: Tensor, target: Tensor) -> list[tuple[int, int]]:
        """Messages and bytes of an update, after some steps that are not measured."""
        for _ in range(WARMUP):
            self.compute(image, target)
            self.update()
        self.compute(image, target)
        found = self.sent()
        self.wait()
        return found

    def traced(self, image: Tensor, target: Tensor, device: str) -> Notes:
        """Steps in a row, which all ranks begin together, and what this rank noted in them."""
        found: list[StepAccount] = []
        gc.collect()
        dist.barrier()
        with self.mesh.transport.trace() as trace:
            for number in range(STEPS):
                begin = time.perf_counter()
                self.compute(image, target)
                self.update()
                if device == "cuda":
                    torch.cuda.synchronize()
                found.append(StepAccount(number, begin, time.perf_counter(), 0.0))
        self.wait()
        return Notes(self.mesh.rank, tuple(found), self.noted(trace))

    def watching(self) -> AbstractContextManager[None]:
        """Around backward."""
        return nullcontext()

    def update(self) -> None:
        """After it."""
        self.optimizer.step()

    @abstractmethod
    def sent(self) -> list[tuple[int, int]]:
        """Messages and bytes of each rank for an update."""

    @abstractmethod
    def planned(self) -> dict[str, Any]:
        """What the rounds say that an update sends."""

    @abstractmethod
    def wait(self) -> None:
        """Return when nothing is under way."""

    def noted(self, trace: Trace) -> Trace:
        """The trace, with what the rank alone knows."""
        return trace

    @abstractmethod
    def close(self) -> None:
        """Take all hooks off the model."""


class Reduced(Way):
    """Gradients averaged by the backend's all-reduce while backward runs; every rank updates."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh):
        super().__init__(model, optimizer, mesh)
        self.reducer = Reducer(model, mesh)

    def watching(self) -> AbstractContextManager[None]:
        """Around backward."""
        return self.reducer.watching()

    def sent(self) -> list[tuple[int, int]]:
        """Messages and bytes of each rank if mural's ring averages: the backend does not tell what it sends."""
        flat = torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])
        with counting() as sent:  # in a group of its own, ranks need not ask first whether all are there
            mural.comm.all_reduce(flat, "ring", self.mesh.transport.group)
        return over_ranks((sent.messages, sent.bytes))

    def planned(self) -> dict[str, Any]:
        """What the rounds of a ring say that it sends."""
        collective = all_reduction("ring", [[rank] for rank in range(self.mesh.world)])
        return {"chunks": 0, "messages": sum(len(sends) for sends in collective.rounds)}

    def wait(self) -> None:
        """Nothing is under way behind backward."""

    def close(self) -> None:
        """The reducer takes its hooks off after every backward."""


class Mastered(Way):
    """Gradients added up on rank 0, which updates and sends the weights in chunks.

    Up to the end of the master's update, a worker that waits for weights is idle; then they are under way. The
    master notes when it had updated, and each wait of a worker which update it is for.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh, chunks: int):
        super().__init__(model, optimizer, mesh)
        self.master = Master(model, optimizer, mesh, chunks=chunks)
        self.updated: list[float] = []

    def update(self) -> None:
        """After backward; on the master, the end of its update is about when this returns."""
        self.master.step()
        self.updated.append(time.perf_counter())

    def sent(self) -> list[tuple[int, int]]:
        """Messages and bytes of each rank for an update."""
        self.wait()
        with counting() as sent:
            self.update()
            self.wait()
        return over_ranks((sent.messages, sent.bytes))

    def planned(self) -> dict[str, Any]:
        """What the rounds say that an update sends."""
        traffic = self.master.traffic()
        return {"chunks": len(self.master.chunks), "messages": traffic.messages}

    def wait(self) -> None:
        """Until all weights have arrived."""
        self.master.wait()

    def noted(self, trace: Trace) -> Trace:
        """The trace with the posts of the updates, and with what the waits for weights need of the master."""
        if self.master.is_master:
            for number, when in enumerate(self.updated):
                trace.posts["update", number] = when
            return trace
        for place, wait in enumerate(trace.waits):
            number = sum(when <= wait.begin for when in self.updated) - 1
            if wait.kind == "weights" and not wait.needs and number >= 0:
                trace.waits[place] = replace(wait, needs=((self.master.root, ("update", number)),))
        return trace

    def close(self) -> None:
        """Take the hooks off the model."""
        self.master.close()


def shares(each: Shares) -> dict[str, Any]:
    """Seconds of the mean step of a rank."""
    return {**asdict(each), "compute": each.compute, "communicating": each.communicating}


def jobs(*, quick: bool, device: str, rounds: int) -> list[Updating]:
    """Every number of chunks, and an all-reduce, on two to four ranks."""
    counts, ranks, width = ((1, 4, 0), (2,), 16) if quick else ((*CHUNKS, 0), (2, 3, 4), 128)
    return [Updating(counts, n, 2 if quick else 8, width, rounds, device) for n in ranks]
