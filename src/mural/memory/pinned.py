"""Memory for batches: ordinary for a CPU; for a GPU, pinned buffers that are used again once their copy has left."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from mural.comm.copy_streams import CudaLanes
from mural.comm.host_staging import Pinned


class Buffers:
    """Tensors that workers fill, and their copies on a device; up to `keep` idle buffers wait to be used again."""

    def __init__(self, device: torch.device, keep: int = 2):
        self.device, self.keep = device, keep
        self.lanes = CudaLanes(device) if device.type == "cuda" else None
        self.lock = threading.Lock()
        self.idle: list[Pinned] = []
        self.used: dict[int, Pinned] = {}
        """Buffers by the address of the tensor in them."""
        self.leaving: list[tuple[torch.cuda.Event, Pinned]] = []

    def new(self, shape: Sequence[int], dtype: torch.dtype, room: int = 0) -> Tensor:
        """A tensor that nobody else uses; `room` is what its buffer has at least, to be used again for larger ones."""
        size = prod(shape) * dtype.itemsize
        if self.lanes is None or not size:
            return torch.empty(tuple(shape), dtype=dtype)
        room = max(size, room)
        with self.lock:
            for event, buffer in [entry for entry in self.leaving if entry[0].query()]:
                self.leaving.remove((event, buffer))
                self.idle.append(buffer)
            fitting = [b for b in self.idle if room <= b.memory.numel() <= 2 * room]
            buffer = min(fitting, key=lambda b: b.memory.numel(), default=None)
            rest = [b for b in self.idle if b is not buffer]
            self.idle = rest[max(0, len(rest) - self.keep) :]
        if buffer is None:
            with torch.cuda.device(self.device):
                buffer = Pinned(room)
        tensor = buffer.memory[:size].view(dtype).view(tuple(shape))
        with self.lock:
            self.used[tensor.data_ptr()] = buffer
        return tensor

    def drop(self, tensor: Tensor | None) -> None:
        """Take a tensor of `new` back that will not be sent."""
        with self.lock:
            buffer = None if tensor is None else self.used.pop(tensor.data_ptr(), None)
            if buffer is not None:
                self.idle.append(buffer)

    def release(self) -> None:
        """Free the memory of all buffers that are not in use, once their copies have left."""
        with self.lock:
            for event, _ in self.leaving:
                event.synchronize()
            self.leaving.clear()
            self.idle.clear()

    def sent(self, tensor: Tensor) -> Sent:
        """A tensor of `new` on its way to the device, while the device computes."""
        if self.lanes is None or not tensor.numel():
            return Sent(tensor.to(self.device), None, self.lanes)
        with torch.cuda.stream(self.lanes.inward):
            copy = torch.empty_like(tensor, device=self.device, pin_memory=False)
        moment = self.lanes.copy(copy, tensor, False, [])
        with self.lock:
            self.leaving.append((moment, self.used.pop(tensor.data_ptr())))
        return Sent(copy, moment, self.lanes)


class Sent:
    """A tensor under way to a device."""

    def __init__(self, tensor: Tensor, moment: torch.cuda.Event | None, lanes: CudaLanes | None):
        self.tensor, self.moment, self.lanes = tensor, moment, lanes

    def arrived(self) -> Tensor:
        """The tensor on the device, for what the calling stream does from here on."""
        if self.lanes is not None and self.moment is not None:
            self.lanes.join(self.moment, self.tensor)
        return self.tensor


def settled(device: torch.device | str) -> torch.device:
    """The device with its number: threads have a current device of their own."""
    found = torch.device(device)
    if found.type == "cuda" and found.index is None:  # pyright: ignore[reportUnnecessaryComparison]
        return torch.device("cuda", torch.cuda.current_device())
    return found
