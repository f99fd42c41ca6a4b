"""Hardware: what a device and its links can do, as data; known machines, and the one at hand.

The rates are those that large products of matrices and large copies reach, not those of a datasheet: predictions are
made relative to them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

GIB = 2**30


@dataclass(frozen=True)
class Rates:
    """What one device reaches: operations a second by type, bytes a second read and written, bytes kept by libraries."""

    float32: float
    bfloat16: float
    tf32: float
    bandwidth: float
    workspace: int


def best(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The fewest seconds of some runs, after one that is not counted."""
    found: list[float] = []
    for _ in range(repeats + 1):
        synchronize(device)
        begin = time.perf_counter()
        work()
        synchronize(device)
        found.append(time.perf_counter() - begin)
    return min(found[1:])


def synchronize(device: torch.device) -> None:
    """Wait for a GPU to be done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rates(device: torch.device | str) -> Rates:
    """The rates of a device, measured in about a second."""
    device = torch.device(device)
    cuda = device.type == "cuda"
    n, repeats = (8192, 20) if cuda else (768, 5)
    before = torch.cuda.memory_allocated(device) if cuda else 0
    products: dict[torch.dtype, float] = {}
    for dtype in (torch.bfloat16, torch.float32):
        square = torch.rand((n, n), device=device).to(dtype)
        products[dtype] = 2 * n**3 / best(lambda square=square: square @ square, device, repeats)
        del square
    inputs = torch.rand((16 if cuda else 1, 256 if cuda else 64, 64, 64), device=device, requires_grad=True)
    conv = torch.nn.Conv2d(inputs.shape[1], inputs.shape[1], 3, padding=1, device=device)
    work = 2 * 9 * inputs.numel() * inputs.shape[1]
    tf32 = work / best(lambda: conv(inputs), device, repeats)
    linear = torch.nn.Linear(64, 64, device=device)  # extents are 64 too
    linear(inputs).sum().backward()  # the libraries keep workspaces for the thread of backward too
    block = torch.rand(2**28 if cuda else 2**24, device=device)
    target = torch.empty_like(block)
    bandwidth = 2 * block.nbytes / best(lambda: target.copy_(block), device, repeats)
    del block, target, inputs, conv, linear
    kept = torch.cuda.memory_allocated(device) - before if cuda else 0
    return Rates(products[torch.float32], products[torch.bfloat16], tf32, bandwidth, kept)
