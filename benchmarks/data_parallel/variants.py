"""The variants: one step of training, by DistributedDataParallel or by mural, from a rank's images to new weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from problems import Problem
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mural
from mural.gradients import Reducer
from mural.shard import batchnorm_scope

Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Ready:
    """A variant set up: its model, and the step."""

    model: nn.Module
    step: Step


def by_torch(model: nn.Module, forward: nn.Module, problem: Problem, mesh: mural.Mesh, device: str) -> Ready:
    """Steps of a model in plain torch, called as `forward`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    image, labels = problem.piece(mesh.rank, device)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(forward(image), labels)
        loss.backward()
        optimizer.step()
        return loss

    return Ready(model, step)


def ddp(problem: Problem, mesh: mural.Mesh, device: str, *, views: bool = False, sync: bool = False) -> Ready:
    """DistributedDataParallel; with `views`, gradients are views of its buckets; with `sync`, batch norm is global."""
    model = problem.build(device)
    if sync:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return by_torch(model, DistributedDataParallel(model, gradient_as_bucket_view=views), problem, mesh, device)


def plain(problem: Problem, mesh: mural.Mesh, device: str) -> Ready:
    """A rank that trains by itself and exchanges nothing."""
    model = problem.build(device)
    return by_torch(model, model, problem, mesh, device)


def sharded(piece: Tensor, mesh: mural.Mesh) -> mural.ShardedTensor:
    """A rank's images, or labels, as its part of the global batch."""
    count, first = len(piece), mesh.rank * len(piece)
    box = ((first, first + count), *((0, extent) for extent in piece.shape[1:]))
    return mural.shard(piece, mesh, dims=None if piece.ndim == 4 else (), box=box)


def by_mural(
    problem: Problem, mesh: mural.Mesh, device: str, *, scope: str, algorithm: str = "backend", rate: float = 0.01
) -> Ready:
    """The data axis of mural: the batch is one sharded tensor, gradients travel in buckets while backward runs."""
    model = problem.build(device)
    reducer = Reducer(model, mesh, algorithm=algorithm)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    image, labels = (sharded(piece, mesh) for piece in problem.piece(mesh.rank, device))

    def step() -> Tensor:
        optimizer.zero_grad()
        with batchnorm_scope(scope):
            loss = F.cross_entropy(model(image), labels)
        with reducer.watching():
            loss.backward()
        optimizer.step()
        return loss

    return Ready(model, step)


MAKERS: dict[str, Callable[[Problem, mural.Mesh, str], Ready]] = {
    "ddp": lambda *given: ddp(*given),
    "ddp views": lambda *given: ddp(*given, views=True),
    "ddp sync": lambda *given: ddp(*given, sync=True),
    "mural": lambda *given: by_mural(*given, scope="rank"),
    "mural exact": lambda *given: by_mural(*given, scope="global"),
}


def names_for(device: str) -> list[str]:
    """The variants that run on a device: torch's SyncBatchNorm takes no CPU tensors."""
    return [name for name in MAKERS if name != "ddp sync" or device == "cuda"]


def gradients(model: nn.Module) -> list[Any]:
    """The gradients, where there are some."""
    return [p.grad for p in model.parameters() if p.grad is not None]
