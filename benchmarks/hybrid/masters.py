"""A master and its workers beside an all-reduce: seconds, messages, and where every rank's time goes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from counting import counting, over_ranks
from problems import seeded
from torch import nn

import mural
from mural.comm import Mesh
from mural.comm.algorithms import all_reduction
from mural.comm.trace import Trace
from mural.models import alexnet
from mural.profile.account import Notes, Profile, Step
from mural.replicate import Reducer
from mural.replicate.master import Master

WARMUP = 2
CHUNKS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Updating:
    """Steps of a small AlexNet, by a master that sends the weights in so many chunks; 0: by an all-reduce."""

    chunks: int
    ranks: int
    images: int
    """For each rank."""
    width: int
    rounds: int
    device: str = "cpu"

    @property
    def name(self) -> str:
        """The job in a few words."""
        way = f"master, K = {self.chunks}" if self.chunks else "all-reduce"
        return f"{way}, {self.ranks} ranks, {self.images} images each, width {self.width}"

    def measure(self) -> dict[str, Any]:
        """Seconds of each step on the slowest rank, messages of a step, and shares of every rank."""
        mesh = mural.init(data=self.ranks)
        model = seeded(lambda: alexnet(classes=16, width=self.width, dropout=0.0)).to(self.device)
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        way: Way = Mastered(model, optimizer, mesh, self.chunks) if self.chunks else Reduced(model, optimizer, mesh)
        image = torch.rand(self.images * self.ranks, 3, 64, 64, device=self.device)
        target = (torch.arange(len(image)) % 10).to(self.device)

        def compute() -> None:
            optimizer.zero_grad()
            with way.watching():
                F.cross_entropy(model(mural.shard(image, mesh)), mural.shard(target, mesh, dims=())).backward()

        def step() -> None:
            compute()
            way.update()

        for _ in range(WARMUP):
            step()
        compute()
        sent = way.sent()
        steps, trace = traced(step, way, mesh, self.rounds, self.device)
        way.wait()
        notes = tuple(over_ranks(Notes(mesh.rank, steps, trace)))
        way.close()
        return {
            "parameters": sum(p.numel() for p in model.parameters()),
            "seconds": [max(note.steps[i].seconds for note in notes) for i in range(self.rounds)],
            "wall": (max(n.steps[-1].end for n in notes) - min(n.steps[0].begin for n in notes)) / self.rounds,
            "sent": sent,
            "planned": way.planned(),
            "shares": [shares(each) for each in Profile(self.name, notes).by_rank],
        }


class Reduced:
    """Gradients averaged by the backend's all-reduce while backward runs; every rank updates."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh):
        self.model, self.optimizer, self.mesh = model, optimizer, mesh
        self.reducer = Reducer(model, mesh)

    def watching(self) -> AbstractContextManager[None]:
        """Around backward."""
        return self.reducer.watching()

    def update(self) -> None:
        """After it."""
        self.optimizer.step()

    def wait(self) -> None:
        """Nothing is under way."""

    def noted(self, trace: Trace) -> Trace:
        """As it is."""
        return trace

    def sent(self) -> list[tuple[int, int]]:
        """Messages and bytes of each rank if mural's ring averages: the backend does not tell what it sends."""
        flat = torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])
        with counting() as sent:
            mural.comm.all_reduce(flat, "ring")
        return over_ranks((sent.messages, sent.bytes))

    def planned(self) -> dict[str, Any]:
        """What the rounds of a ring say that it sends."""
        collective = all_reduction("ring", [[rank] for rank in range(self.mesh.world)])
        messages = sum(len(sends) for sends in collective.rounds)
        return {"chunks": 0, "messages": messages}

    def close(self) -> None:
        """Nothing to close."""


class Mastered:
    """Gradients added up on rank 0, which updates and sends the weights in chunks.

    Up to the end of the master's update, a worker that waits for weights is idle; then they are under way. The
    master notes when it had updated, and each wait of a worker which update it is for.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh, chunks: int):
        self.master, self.mesh = Master(model, optimizer, mesh, chunks=chunks), mesh
        self.updated: list[float] = []
        self.done: list[float] = []

    def watching(self) -> AbstractContextManager[None]:
        """Backward runs alone."""
        return nullcontext()

    def update(self) -> None:
        """After it; on the master, the end of its update is about when this returns."""
        self.master.step()
        self.updated.append(time.perf_counter())

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

    def sent(self) -> list[tuple[int, int]]:
        """Messages and bytes of each rank for an update."""
        self.wait()
        with counting() as sent:
            self.update()
            self.wait()
        return over_ranks((sent.messages, sent.bytes))

    def planned(self) -> dict[str, Any]:
        """What the rounds say that a step sends."""
        traffic = self.master.traffic()
        return {"chunks": len(self.master.chunks), "messages": traffic.messages, "bytes": traffic.bytes}

    def close(self) -> None:
        """Take the hooks off the model."""
        self.master.close()


Way = Reduced | Mastered


def traced(step: Callable[[], None], way: Way, mesh: Mesh, rounds: int, device: str) -> tuple[tuple[Step, ...], Trace]:
    """Steps in a row, which all ranks begin together, and what this rank noted in them."""
    found: list[Step] = []
    gc.collect()
    dist.barrier()
    with mesh.transport.trace() as trace:
        for number in range(rounds):
            begin = time.perf_counter()
            step()
            if device == "cuda":
                torch.cuda.synchronize()
            found.append(Step(number, begin, time.perf_counter(), 0.0))
    return tuple(found), way.noted(trace)


def shares(each: Any) -> dict[str, Any]:
    """Seconds of the mean step of a rank."""
    return {**asdict(each), "compute": each.compute, "communicating": each.communicating}


def jobs(*, quick: bool, device: str, rounds: int) -> list[Updating]:
    """Every number of chunks, and an all-reduce, on two to four ranks."""
    counts, ranks, width = ((1, 4), (2,), 2) if quick else (CHUNKS, (2, 3, 4), 16)
    return [Updating(k, n, 2 if quick else 8, width, rounds, device) for n in ranks for k in (*counts, 0)]
