"""The clock: how long a step takes that several ranks take together."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
import torch.distributed as dist


def timed(step: Any, device: str, wait: bool = True) -> float:
    """Seconds of a step on the slowest rank; all begin together, with no garbage to collect.

    Without `wait`, those until it is queued: the device may still be at work.
    """
    gc.collect(1)  # what steps left; a whole collection took 0.13 s
    gc.disable()
    dist.barrier()
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    if wait and device == "cuda":
        torch.cuda.synchronize()
    took = time.perf_counter() - begin
    gc.enable()
    slowest = torch.tensor(took, dtype=torch.float64, device=device)  # NCCL has no other way for it
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)
