"""The step that all variants share, timed, and the check of its result against one device."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from job import CHANNELS, Job
from torch import Tensor, nn
from variants import Variant

CHECK_SIZE = 64


def network(layers: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """That many times convolution 16→16 3×3 and ReLU, with the same parameters on every rank."""
    torch.manual_seed(0)
    pairs = [(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.ReLU()) for _ in range(layers)]
    return nn.Sequential(*(module for pair in pairs for module in pair)).to(dtype)


class Step:
    """Forward and backward of `y.square().mean()` on this rank's rows."""

    def __init__(self, job: Job, variant: Variant) -> None:
        self.job, self.variant = job, variant
        self.net = variant.model(network(job.layers))
        start, stop = job.rows
        self.piece = torch.randn(1, CHANNELS, stop - start, job.size)

    def __call__(self) -> dict[str, float]:
        """Seconds of the step, and of the step with the gradients averaged; all ranks begin together."""
        self.net.zero_grad()
        gc.collect()
        if self.job.ranks > 1:
            dist.barrier()
        begin = time.perf_counter()
        y = self.net(self.variant.place(self.piece, self.job.size))
        y.square().mean().backward()
        done = time.perf_counter()
        self.variant.average(self.net)
        return {"seconds": done - begin, "averaged": time.perf_counter() - begin}


def check(job: Job, variant: Variant) -> dict[str, Any]:
    """Relative errors in float64 against one device, or the error raised, of the forward and of the gradients."""
    net = network(job.layers, torch.float64)
    image = torch.randn(1, CHANNELS, CHECK_SIZE, CHECK_SIZE, dtype=torch.float64)
    expected = net(image)
    loss = expected.square().mean()
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    start, stop = (CHECK_SIZE * r // job.ranks for r in (job.rank, job.rank + 1))
    net = variant.model(net)
    found: dict[str, Any] = {}

    def forward() -> float:
        found["y"] = net(variant.place(image[:, :, start:stop].contiguous(), CHECK_SIZE))
        return difference(variant.local(found["y"]), expected[:, :, start:stop])

    def backward() -> float:
        found["loss"] = found["y"].square().mean()
        found["loss"].backward()
        variant.average(net)
        grads = [variant.full(p.grad) for p in net.parameters()]
        errors = [difference(g, e) for g, e in zip(grads, gradients, strict=True)]
        return max(difference(variant.full(found["loss"].detach()), loss), *errors)

    return {"forward": attempt(forward), "backward": attempt(backward)}


def attempt(part: Callable[[], float]) -> float | str:
    """The error of one part of the check, or what it raised."""
    try:
        return part()
    except Exception as error:  # a peer may raise anything: what it raised is the result
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest expected value."""
    if found.shape != expected.shape:
        raise ValueError(f"shape {tuple(found.shape)} instead of {tuple(expected.shape)}")
    return float((found - expected).abs().max() / expected.abs().max())
