"""The document's experiment: one more process with its own batch, the same number of iterations."""

from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist
from harness.clock import timed
from problems import problem
from turns import WARMUP
from variants import MAKERS

import mural


def measure(rank: int, folder: str, rounds: int, quick: bool) -> None:
    """On a rank: seconds of each iteration of LeNet-5 with 200 images a rank; written by rank 0."""
    mesh = mural.init(data=dist.get_world_size())
    ready = MAKERS["mural"](problem("lenet", quick), mesh, "cpu")
    seconds = [timed(ready.step, "cpu") for _ in range(WARMUP + rounds)][WARMUP:]
    if rank == 0:
        (Path(folder) / "scaling.json").write_text(json.dumps(seconds))
