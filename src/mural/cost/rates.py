"""Rates: what large products of matrices and large copies reach on a device, measured in a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Rates:
    """What one device reaches: operations a second by type, and bytes a second, read and written.

    `workspace` are bytes that libraries keep once they ran, `units` its multiprocessors, or threads.
    """

    float32: float
    bfloat16: float
    tf32: float
    bandwidth: float
    workspace: int
    units: int = 1

    def of(self, dtype: str, family: str) -> float:
        """The rate of operations of a type; a GPU's convolutions in float32 run as TF32 unless that is forbidden."""
        if dtype in ("bfloat16", "float16"):
            return self.bfloat16
        return self.tf32 if family in ("conv", "transposed") else self.float32


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
    products = {dtype: product_rate(n, dtype, device, repeats) for dtype in (torch.bfloat16, torch.float32)}
    convolved = conv_rate(16 if cuda else 1, 256 if cuda else 64, device, repeats)
    bandwidth = copy_rate(2**30 if cuda else 2**26, device, repeats)
    kept = torch.cuda.memory_allocated(device) - before if cuda else 0
    units = torch.cuda.get_device_properties(device).multi_processor_count if cuda else torch.get_num_threads()
    return Rates(products[torch.float32], products[torch.bfloat16], convolved, bandwidth, kept, units)


def product_rate(n: int, dtype: torch.dtype, device: torch.device, repeats: int) -> float:
    """Operations a second of a product of square matrices; backward too runs once, for its thread has workspaces."""
    square = torch.rand((n, n), device=device).to(dtype).requires_grad_()
    with torch.no_grad():
        seconds = best(lambda: square @ square, device, repeats)
    (square[:64, :64] @ square[:64, :64]).sum().backward()
    return 2 * n**3 / seconds


def conv_rate(batch: int, channels: int, device: torch.device, repeats: int) -> float:
    """Operations a second of a convolution k3 in float32, as TF32 where that is allowed."""
    image = torch.rand((batch, channels, 64, 64), device=device)
    weight = torch.rand((channels, channels, 3, 3), device=device)
    seconds = best(lambda: F.conv2d(image, weight, padding=1), device, repeats)
    return 2 * weight[0].numel() * image.numel() / seconds


def copy_rate(size: int, device: torch.device, repeats: int) -> float:
    """Bytes read and written a second by a large copy."""
    block = torch.rand(size // 4, device=device)
    target = torch.empty_like(block)
    return 2 * block.nbytes / best(lambda: target.copy_(block), device, repeats)
