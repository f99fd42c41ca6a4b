"""Paired steps: all variants take turns in the same processes, so that what slows the machine slows all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness.clock import timed
from problems import problem
from turns import taken
from variants import MAKERS, gradients, names_for

import mural


def measure(rank: int, folder: str, name: str, device: str, rounds: int, quick: bool) -> None:
    """On a rank: seconds of each variant's step in each round, the slowest rank's; written by rank 0."""
    if device == "cuda":
        torch.cuda.set_device(0)
    mesh = mural.init(data=dist.get_world_size())
    ready = {key: MAKERS[key](problem(name, quick), mesh, device) for key in names_for(device)}
    differences = first_steps(ready)
    seconds = taken({key: one.step for key, one in ready.items()}, rounds, device)
    queued = {k: [timed(one.forward, device, wait=False) for _ in range(rounds)] for k, one in ready.items()}
    if rank == 0:
        answer = {"seconds": seconds, "queued": queued, "differences": differences, "threads": torch.get_num_threads()}
        (Path(folder) / "pairs.json").write_text(json.dumps(answer))


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
