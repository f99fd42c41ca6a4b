"""How much memory there is: on the host, and for this process on a GPU."""

from __future__ import annotations

import torch

DEVICE_SHARE, HOST_SHARE = 0.3, 0.7
"""The part of the device's memory, and of the host's free memory, that kept values may take."""
MOST_DECODED = 0.25
"""The part of the host's free memory that decoded pixels may take for later passes."""


def free_memory() -> int:
    """How many bytes of the host's memory are free."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 2**32


def device_limit(device: torch.device) -> int:
    """How many bytes this process may reserve on a GPU."""
    total = torch.cuda.get_device_properties(device).total_memory
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)
    return int(min(total * fraction(device), torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)))
