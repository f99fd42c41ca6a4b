"""Paired steps: all variants take turns in the same processes, so that what slows the machine slows all of them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness.clock import timed
from problems import problem
from variants import MAKERS, Step, gradients, names_for

import mural

WARMUP = 3


def measure(rank: int, folder: str, name: str, device: str, rounds: int, quick: bool) -> None:
    """On a rank: seconds of each variant's step in each round, the slowest rank's; written by rank 0."""
    if device == "cuda":
        torch.cuda.set_device(0)
    mesh = mural.init(data=dist.get_world_size())
    ready = {key: MAKERS[key](problem(name, quick), mesh, device) for key in names_for(device)}
    seconds: dict[str, list[float]] = {key: [] for key in ready}
    differences = first_steps(ready)
    for number in range(WARMUP + rounds):
        keys = list(ready)
        turn = number % len(keys)
        for key in keys[turn:] + keys[:turn]:  # each goes first as often as the others
            found = timed(ready[key].step, device)
            if number >= WARMUP:
                seconds[key].append(found)
    queued = {key: [queueing(one.forward, device) for _ in range(rounds)] for key, one in ready.items()}
    if rank == 0:
        answer = {"seconds": seconds, "queued": queued, "differences": differences, "threads": torch.get_num_threads()}
        (Path(folder) / "pairs.json").write_text(json.dumps(answer))


def queueing(forward: Step, device: str) -> float:
    """Seconds until a forward pass returns, on this rank: on a GPU, until its kernels are queued."""
    dist.barrier()
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    forward()
    return time.perf_counter() - begin


def first_steps(ready: dict[str, Any]) -> dict[str, float]:
    """Take the first step of all; the relative distance of each one's gradients from DDP's."""
    for one in ready.values():
        one.step()
    expected = gradients(ready["ddp"].model)
    size = sum(float(g.square().sum()) for g in expected) ** 0.5
    found: dict[str, float] = {}
    for key, one in ready.items():
        pairs = zip(gradients(one.model), expected, strict=True)
        found[key] = sum(float((a - b).square().sum()) for a, b in pairs) ** 0.5 / size
    return found
