"""How much memory a step may take, of the host and of a GPU, and how torch's allocator stays within it."""

from __future__ import annotations

import os
from zlib import crc32

import torch

from mural.comm import stack
from mural.comm.hosts import host
from mural.memory.choice import Room
from mural.memory.machine_memory import machine_memory
from mural.ranks import Mesh

DEVICE_SHARE, HOST_SHARE = 0.1, 0.8
"""The part of the device's memory, and of the host's free memory, that kept values may take."""
BANDS_SHARE, LEAST_BANDS_SHARE, MOST_BANDS_SHARE = 0.45, 0.15, 0.6
"""The part of the device's memory through which values pass on their way to the host and back: what is reckoned with
until the rest is known, and its bounds."""
USED, SPREAD = 0.97, 1.45
"""How much of the device's memory is used at most, and how many times what tensors take torch's allocator reserves, in
streamed steps of a U-Net on an H200."""
MOST_DECODED = 0.25
"""The part of the host's free memory that decoded pixels may take for later passes, if no values are kept there."""


def room_for_kept(device: int, host: int, itemsize: int) -> Room:
    """The room for kept values on a device with that memory, next to a host with that much free memory."""
    return Room(int(device * DEVICE_SHARE), int(host * HOST_SHARE), itemsize, bands=int(device * BANDS_SHARE))


def room_for_bands(limit: int, rest: int) -> int:
    """The bytes for bands on a device with that memory, next to all the rest of a step.

    >>> room_for_bands(1000, 300), room_for_bands(1000, 100), room_for_bands(1000, 900)
    (535, 600, 150)
    """
    left = int(USED * limit - SPREAD * rest)
    return max(int(LEAST_BANDS_SHARE * limit), min(left, int(MOST_BANDS_SHARE * limit)))


def device_limit(device: torch.device) -> int:
    """How many bytes this process may reserve on a GPU."""
    total = torch.cuda.get_device_properties(device).total_memory
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)
    return int(min(total * fraction(device), torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)))


def free_for_each(mesh: Mesh, device: torch.device) -> int:
    """How many bytes of the host's memory are free for this rank: its part of those of the ranks on this host."""
    mine = crc32(host().encode())
    found = stack(torch.tensor([mine], device=device), mesh.everyone, mesh.rank, mesh.transport, "hosts of ranks")
    return machine_memory().free // int((found == mine).sum())


def least_of_ranks(mesh: Mesh, device: torch.device, *numbers: int) -> list[int]:
    """The least of all ranks of each number: ranks that would choose differently would wait for each other forever."""
    mine = torch.tensor(numbers, device=device)
    return stack(mine, mesh.everyone, mesh.rank, mesh.transport, "memory of ranks").amin(0).tolist()


def grow_segments() -> None:
    """Let torch's allocator grow its segments, unless the user has told it what to do.

    Memory that leaves and comes back in other sizes, or is taken again for blocks that are computed again, would break
    fixed segments up until nothing large fits, with a tenth of the memory free.
    """
    if not any(name in os.environ for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")  # type: ignore[attr-defined]
