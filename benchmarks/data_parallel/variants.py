"""The variants: one step of training, by DistributedDataParallel or by mural, from a rank's images to new weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
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
    """A variant set up: its model, the step, and the forward pass of a step, loss included."""

    model: nn.Module
    step: Step
    forward: Step


def by_torch(
    model: nn.Module, called: nn.Module, problem: Problem, mesh: mural.Mesh, device: str, *, shared_loss: bool = False
) -> Ready:
    """Steps of a model in plain torch, called as `called`; with `shared_loss`, ranks learn the whole batch's loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    image, labels = problem.piece(mesh.rank, device)

    def forward() -> Tensor:
        return F.cross_entropy(called(image), labels)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = forward()
        loss.backward()
        if shared_loss:
            dist.all_reduce(loss.detach_())
        optimizer.step()
        return loss

    return Ready(model, step, forward)


def ddp(
    problem: Problem, mesh: mural.Mesh, device: str, *, views: bool = False, sync: bool = False, loss: bool = False
) -> Ready:
    """DistributedDataParallel; with `views`, gradients are views of its buckets; with `sync`, batch norm is global.

    With `loss`, an all-reduce after backward tells every rank the loss of the whole batch, as mural does.
    """
    model = problem.build(device)
    if sync:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    called = DistributedDataParallel(model, gradient_as_bucket_view=views)
    return by_torch(model, called, problem, mesh, device, shared_loss=loss)


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
    problem: Problem, mesh: mural.Mesh, device: str, *, scope: str, algorithm: str = "backend", rate: float = 0.01,
    own_loss: bool = False,
) -> Ready:  # fmt: skip
    """The data axis of mural: the batch is one sharded tensor, gradients travel in buckets while backward runs.

    With `own_loss`, a rank's loss is that of its own images, as DDP's: no message stands between forward and backward.
    """
    model = problem.build(device)
    reducer = Reducer(model, mesh, algorithm=algorithm)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    image, labels = (sharded(piece, mesh) for piece in problem.piece(mesh.rank, device))

    def forward() -> Tensor:
        with batchnorm_scope(scope):
            scores = model(image)
            return F.cross_entropy(scores.local, labels.local) if own_loss else F.cross_entropy(scores, labels)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = forward()
        with reducer.watching():
            loss.backward()
        optimizer.step()
        return loss

    return Ready(model, step, forward)


MAKERS: dict[str, Callable[[Problem, mural.Mesh, str], Ready]] = {
    "ddp": lambda *given: ddp(*given),
    "ddp views": lambda *given: ddp(*given, views=True),
    "ddp loss": lambda *given: ddp(*given, loss=True),
    "ddp sync": lambda *given: ddp(*given, sync=True),
    "mural": lambda *given: by_mural(*given, scope="rank"),
    "mural own loss": lambda *given: by_mural(*given, scope="rank", own_loss=True),
    "mural exact": lambda *given: by_mural(*given, scope="global"),
}


def names_for(device: str) -> list[str]:
    """The variants that run on a device: torch's SyncBatchNorm takes no CPU tensors."""
    return [name for name in MAKERS if name != "ddp sync" or device == "cuda"]


def gradients(model: nn.Module) -> list[Any]:
    """The gradients, where there are some."""
    return [p.grad for p in model.parameters() if p.grad is not None]
