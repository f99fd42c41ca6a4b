"""The law over NCCL, as functions that ranks run: each returns the largest difference from one device."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import stage_cases
import torch
import torch.distributed as dist
from clinics import local_steps, model_of

import mural
from law import Expr, Grid, compare, difference, image
from mural.collectives.algorithms import ALGORITHMS
from mural.comm.messages import Transport
from mural.errors import UnsupportedOp
from mural.federated.federation import read
from mural.shard.halo.fuse import fusing

REFUSED = "refused"


def expressions(codes: Sequence[str], grid: Grid, shape: Sequence[int], both: bool) -> list[float | str]:
    """For each expression of images of a shape the largest difference, or that it is refused by name."""
    found: list[float | str] = []
    for code in codes:
        inputs = [image(*shape), image(*shape, seed=1)] if both else [image(*shape)]
        try:
            found.append(max(compare(Expr(code), inputs, grid).values()))
        except UnsupportedOp:
            found.append(REFUSED)
    return found


def modules(cases: Sequence[tuple[torch.nn.Module, Sequence[torch.Tensor]]], grid: Grid) -> list[float | str]:
    """The same for modules and what they are given."""
    return [max(compare(module, inputs, grid).values()) for module, inputs in cases]


def stages(cases: Sequence[stage_cases.Case], function: Callable[..., dict[str, float]]) -> list[float | str]:
    """The same for models under plans, over several steps of an optimizer."""
    return [max(function(case).values()) for case in cases]


def calls(function: Callable[..., float], cases: Sequence[tuple[Any, ...]]) -> list[float | str]:
    """What a function gives for each of some arguments."""
    return [float(function(*case)) for case in cases]


def collectives(world: int) -> list[float | str]:
    """Every algorithm for several types and sizes, averages, sums in one order, reduce, broadcast and the others."""
    rank, found = dist.get_rank(), list[float | str]()
    for kind in (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool):
        for size in (0, 1, 7, 1003, 70_001):
            parts = [whole_numbers(size, r).to(kind) for r in range(world)]
            total = sum((p.to(torch.int64) for p in parts), torch.zeros(size, dtype=torch.int64))
            for name in (*ALGORITHMS, "auto", "backend"):
                found.append(one_sum(parts[rank], name, total, kind))
    mine = whole_numbers(12 * world, rank).double().cuda()
    every = torch.stack([whole_numbers(12 * world, r).double() for r in range(world)])
    found += [
        difference(mural.comm.all_reduce(mine.clone(), "ring", average=True), every.mean(0)),
        difference(mural.comm.all_reduce(mine.clone(), "two-level", deterministic=True), every.sum(0)),
        difference(mural.comm.broadcast(mine.clone(), root=world - 1, chunks=3), every[-1]),
        difference(mural.comm.all_gather(mine), every),
        difference(mural.comm.reduce_scatter(mine), every.sum(0).chunk(world)[rank]),
        difference(mural.comm.all_reduce(mine.cpu(), "tree"), every.sum(0)),
    ]
    reduced = mural.comm.reduce(mine.clone(), root=0, chunks=2)
    found.append(difference(reduced, every.sum(0)) if rank == 0 else 0.0)
    return [*found, refused_calls(rank)]


def whole_numbers(size: int, rank: int) -> torch.Tensor:
    """Small whole numbers, whose sums every type holds."""
    return torch.randint(0, 3, (size,), generator=torch.Generator().manual_seed(rank))


def one_sum(mine: torch.Tensor, name: str, total: torch.Tensor, kind: torch.dtype) -> float | str:
    try:
        got = mural.comm.all_reduce(mine.cuda(), name).cpu()
    except UnsupportedOp:
        return REFUSED
    return difference(got.to(torch.int64), total) if kind != torch.bool else difference(got, total > 0)


def refused_calls(rank: int) -> str:
    """A call of another size on one rank: refused on all, in words, before anything is sent."""
    group = dist.new_group(backend="cpu:gloo,cuda:nccl")
    try:
        mural.comm.all_reduce(torch.ones(11 if rank else 10, device="cuda"), "ring", group)
    except mural.PeerError as error:
        return REFUSED if "make the same call on all" in str(error) else str(error)
    return "calls of different sizes were accepted"


def shaken(cases: Sequence[stage_cases.Case], seed: int) -> list[float | str]:
    """Models under plans, while streams and processes sleep at random before and after messages are posted."""
    draw, post = random.Random(seed * 100 + dist.get_rank()), Transport.post

    def late(self: Transport, transfer: Any) -> None:
        pause(draw)
        post(self, transfer)
        pause(draw)

    Transport.post = late  # type: ignore[method-assign]
    try:
        return [max(stage_cases.law(case).values()) for case in cases]
    finally:
        Transport.post = post  # type: ignore[method-assign]


def pause(draw: random.Random) -> None:
    """Let the stream sleep, or the process, or neither."""
    kind = draw.random()
    if kind < 0.2:
        torch.cuda._sleep(draw.randrange(10_000_000))  # up to about five milliseconds
    elif kind < 0.3:
        time.sleep(draw.random() * 0.004)


def fused(build: Callable[[], torch.nn.Module], grid: Grid) -> float:
    """A chain of layers that share exchanges, after a run that taught what follows what."""
    torch.manual_seed(3)
    module = build().double()
    with fusing(True):
        return max(max(compare(module, [image(2, 3, 24, 22)], grid).values()) for _ in range(2))


def meshes_in_turn() -> list[float | str]:
    """Spatial ranks alone, then stages of spatial ranks, in the same processes: the exchanges that each measured."""
    first = stage_cases.Case("unet", mural.Plan(spatial=(4, 1)), images=2, sizes=((64, 52),) * 3)
    plan = mural.Plan(stage=2, spatial=(2, 1), microbatches=2, schedule="1f1b", batchnorm="micro")
    second = stage_cases.Case("unet-wide", plan, images=2, sizes=((250, 203),) * 3)
    return [max(stage_cases.law(case).values()) for case in (first, second)]


def averaged_by_clinics() -> list[float | str]:
    """A federated round by hand over NCCL: the weighted mean of what ranks trained on samples of their own."""
    world, rank = dist.get_world_size(), dist.get_rank()
    total, samples = torch.zeros(()), 0
    for clinic in range(world):
        model = model_of(7)
        count = local_steps(model, clinic)
        total, samples = total + read(model) * count, samples + count
        if clinic == rank:
            mine = torch.cat([read(model) * count, torch.tensor([count])]).cuda()
    summed = mural.comm.all_reduce(mine, "ring").cpu()
    return [difference(summed[:-1] / summed[-1], total / samples)]
