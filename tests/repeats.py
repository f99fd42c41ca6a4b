"""Several steps of one model, plain and sharded: what a run learns shows in the next."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

import mural
from law import TOLERANCE, Grid, difference, full, image, loss_of, tensors_of
from mural.shard.halo.fuse import fusing
from ranks import run_on


def step(plain: nn.Module, sharded: nn.Module, x: Tensor, grid: Grid, needs_grad: bool) -> dict[str, Any]:
    """Differences of everything after one step of both, and the messages that this rank sent forward and backward."""
    plain.zero_grad()
    sharded.zero_grad()
    a = x.clone().requires_grad_(needs_grad)
    b = grid.shard(x)
    if needs_grad:
        b.requires_grad_()
    expected = plain(a)
    with b.mesh.transport.record() as forward:
        got = sharded(b)
    found: dict[str, Any] = {
        f"output {i}": difference(full(g), e)
        for i, (e, g) in enumerate(zip(tensors_of(expected), tensors_of(got), strict=True))
    }
    loss_of(expected).backward()
    loss = loss_of(got)
    with b.mesh.transport.record() as backward:
        loss.backward()
    mural.reduce_gradients(sharded, grid.mesh())
    if needs_grad:
        found["input gradient"] = difference(b.grad.full(), a.grad)
    for (name, p), q in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        found[f"gradient of {name}"] = difference(q.grad, p.grad)
    for (name, p), q in zip(plain.named_buffers(), sharded.buffers(), strict=True):
        found[f"buffer {name}"] = difference(q, p)
    return {"wrong": {k: v for k, v in found.items() if not v <= TOLERANCE},
            "forward": forward.messages, "backward": backward.messages}  # fmt: skip


def steps(
    module: nn.Module, sizes: list[tuple[int, ...]], grid: Grid, on: bool | None, needs_grad: bool = True
) -> list[dict[str, Any]]:
    """Several steps on images of these sizes, fused as told."""
    plain, sharded = deepcopy(module), deepcopy(module)
    with fusing(on):
        return [step(plain, sharded, image(*size, seed=i), grid, needs_grad) for i, size in enumerate(sizes)]


def holds_in_steps(
    module: nn.Module, size: tuple[int, ...], grid: Grid, on: bool | None = True, needs_grad: bool = True
) -> list[tuple[int, int]]:
    """Check three steps on every rank; messages forward (rank 0) of the first, which learns, and of the last."""
    found = run_on(grid.world, steps, module.double(), [size] * 3, grid, on, needs_grad)
    for rank, of_rank in enumerate(found):
        for number, one in enumerate(of_rank):
            assert not one["wrong"], f"rank {rank}, step {number} of {grid}: {one['wrong']}"
    return [(one["forward"], one["backward"]) for one in found[0]]


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """A module with the same parameters in each test."""
    torch.manual_seed(0)
    return make()
