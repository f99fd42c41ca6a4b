"""What the ranks of an mpirun bring to a check, and how they compare what they find."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
DEVICE = os.environ.get("MPI_CHECKS_DEVICE", "cpu")
SHAPES = ((7,), (3, 5), (), (0,), (2, 0, 3))


def size() -> int:
    return dist.get_world_size()


def rank() -> int:
    return dist.get_rank()


def values(of: int, shape: tuple[int, ...], dtype: torch.dtype, low: int = 1, high: int = 4) -> Tensor:
    """What a rank brings: small whole numbers, whose sums and products every type holds exactly."""
    generator = torch.Generator().manual_seed(of)
    return torch.randint(low, high, shape, generator=generator, device="cpu").to(DEVICE, dtype)


def fractions(of: int, count: int) -> Tensor:
    """Other values of a rank, whose sums are rounded."""
    return torch.rand(count, generator=torch.Generator().manual_seed(of), device="cpu").to(DEVICE)


def everybody(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.stack([values(r, shape, dtype) for r in range(size())])


def same(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected), f"{found} is not {expected}"
