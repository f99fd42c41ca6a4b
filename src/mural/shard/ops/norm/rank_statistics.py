"""Batch norm of each rank's piece by itself, on request: with the statistics of the piece, and without messages.

The equivalent on one device is ghost batch norm: the batch is cut as the ranks cut it, each piece is normalized with
its own statistics, and running buffers are updated with the mean over the pieces. Each rank updates its own buffers
with its own statistics; `average_buffers` averages them, once for many steps if need be, since the update is linear.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from mural.comm import mark, stack
from mural.errors import PlanError
from mural.shard.layout import Layout
from mural.shard.tensor import ShardedTensor

SCOPES = ("global", "rank", "micro", "micro-rank")
_scopes = ["global"]
"""One for all threads: a checkpoint may recompute its region in a thread of the autograd engine."""


@contextmanager
def batchnorm_scope(scope: str) -> Generator[None]:
    """Batch norm in training takes the statistics of the whole batch ("global"), or of each rank's piece ("rank").

    With "micro" and "micro-rank" each micro-batch is normalized as a separate batch; otherwise several micro-batches
    are refused. If checkpoints recompute batch norms, the block must include the backward.
    """
    if scope not in SCOPES:
        raise PlanError(f"batchnorm_scope({scope!r}): choose one of {', '.join(map(repr, SCOPES))}")
    _scopes.append(scope)
    try:
        yield
    finally:
        _scopes.pop()


_undone = [False]
"""One for all threads, as the scopes are."""


@contextmanager
def buffers_put_back() -> Generator[None]:
    """A block after which buffers are what they were before it: whether it updates them does not matter."""
    _undone.append(True)
    try:
        yield
    finally:
        _undone.pop()


def updates_again() -> bool:
    """Whether a checkpoint in backward computes a layer again, and with it the updates of its buffers."""
    return torch._C._current_graph_task_id() >= 0 and not _undone[-1]


def by_rank() -> bool:
    """Whether each rank normalizes its own piece."""
    return _scopes[-1] in ("rank", "micro-rank")


def by_microbatch() -> bool:
    """Whether micro-batches are normalized separately."""
    return _scopes[-1] in ("micro", "micro-rank")


def batch_norm_by_rank(
    x: ShardedTensor, running: Sequence[Tensor | None], affine: Sequence[Tensor | None], momentum: float, eps: float
) -> ShardedTensor:
    """Batch norm in training with the statistics of the rank's piece; a piece without values does not take part."""
    peers, counts = values_of(x.placement)
    if 1 in counts:
        raise PlanError(
            f"Expected more than 1 value per channel when training: of an input of size {tuple(x.shape)}, rank "
            f"{peers[counts.index(1)]} has one value per channel, and each rank normalizes its own piece; use larger "
            f'batches, or batchnorm="global"'
        )
    if x.local.numel():
        local = F.batch_norm(x.local, running[0], running[1], affine[0], affine[1], True, momentum, eps)
    else:
        anchor = sum((p.sum() for p in affine if p is not None), torch.zeros((), device=x.device))
        local = x.local + (0 * anchor).to(x.dtype)
    if 0 in counts and running[0] is not None:
        fill_in(x, running, momentum, peers, counts)
        mark()
    return ShardedTensor(local, x.placement)


@lru_cache(maxsize=4096)
def values_of(layout: Layout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ranks that hold different pieces, and how many values of a channel each has."""
    peers = layout.mesh.peers(layout.axes_of(d for d in range(layout.ndim) if d != 1))
    boxes = (layout.box_at(layout.mesh.coordinates_of(rank)) for rank in peers)
    return peers, tuple(prod(i.size for d, i in enumerate(box) if d != 1) for box in boxes)


@torch.no_grad()
def fill_in(
    x: ShardedTensor, running: Sequence[Tensor | None], momentum: float, peers: tuple[int, ...], counts: Sequence[int]
) -> None:
    """Update the buffers of ranks without values with the mean of the others' statistics.

    So the mean over all ranks' buffers is updated with the mean over the pieces that have values.
    """
    piece = x.local.double() if x.dtype == torch.float64 else x.local.float()
    statistics = torch.zeros(2, x.shape[1], dtype=piece.dtype, device=x.device)
    if piece.numel():
        variance, mean = torch.var_mean(piece, [d for d in range(x.ndim) if d != 1], correction=1)
        statistics = torch.stack([mean, variance])
    every = stack(statistics, peers, x.mesh.rank, x.mesh.transport, "running statistics")
    if not piece.numel():
        total = every.sum(0) / sum(n > 0 for n in counts)
        for buffer, value in zip(running, total, strict=True):
            if buffer is not None:
                buffer.mul_(1 - momentum).add_(value.to(buffer.dtype), alpha=momentum)
