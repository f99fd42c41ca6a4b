"""How much memory a streamed step may take: of the host, and of a GPU."""

from __future__ import annotations

import torch

from mural.memory.choice import Room

DEVICE_SHARE, HOST_SHARE = 0.2, 0.7
"""The part of the device's memory, and of the host's free memory, that kept values may take."""
RECENT_SHARE = 0.2
"""The part of the device's memory for what was sent to the host lately."""
MOST_DECODED = 0.25
"""The part of the host's free memory that decoded pixels may take for later passes."""


def room_for_kept(device: int, host: int, itemsize: int) -> Room:
    """The room for kept values on a device with that memory, next to a host with that much free memory."""
    return Room(int(device * DEVICE_SHARE), int(host * HOST_SHARE), itemsize, recent=int(device * RECENT_SHARE))


def device_limit(device: torch.device) -> int:
    """How many bytes this process may reserve on a GPU."""
    total = torch.cuda.get_device_properties(device).total_memory
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)
    return int(min(total * fraction(device), torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)))
