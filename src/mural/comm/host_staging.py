"""Staging: pinned host memory that GPU tensors pass through, in buffers that are reused."""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mural.comm.copy_streams import Lanes, Moment

IDLE_BYTES = 2**29
"""How many bytes may be idle, unless told otherwise; more are returned to the system."""


class Pinned:
    """Page-locked host memory of exactly the requested size: torch rounds its own up to a power of two."""

    def __init__(self, size: int):
        self.address = 0
        """Where the registered memory is. A buffer may end while calls are recorded, and `data_ptr()` is 0 there."""
        area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                area.madvise(mmap.MADV_HUGEPAGE)
        with torch.inference_mode(False):  # buffers outlive evaluations
            self.memory = torch.frombuffer(area, dtype=torch.uint8)
        self.memory.zero_()  # all cores find the pages, which one alone would do while they are registered
        portable = 1  # pinned for every GPU of the process
        runtime: Any = torch.cuda.cudart()
        address = self.memory.data_ptr()
        if int(runtime.cudaHostRegister(address, size, portable)) == 0:
            self.address = address
            return
        clear_error()
        with torch.inference_mode(False):
            self.memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def __del__(self) -> None:
        # At the end of the process the driver may be gone, and the memory is freed anyway.
        if self.address and not sys.is_finalizing():
            _unused.append((self.address, self.memory))
            unregister_unused()


_unused: list[tuple[int, Tensor]] = []
"""Registered memory of buffers that are gone. It has to stay mapped until CUDA lets go of it: new memory at the same
addresses would count as pinned, and copies to it would fail, or get lost without an error."""


def unregister_unused() -> None:
    """Free registered memory of buffers that are gone, unless this thread captures a graph: CUDA refuses it then."""
    if torch.cuda.is_current_stream_capturing():
        return
    runtime: Any = torch.cuda.cudart()
    with contextlib.suppress(IndexError):  # another thread took the last one
        for _ in range(len(_unused)):
            address, memory = _unused.pop(0)
            if int(runtime.cudaHostUnregister(address)) != 0:
                _unused.append((address, memory))  # the next buffer that goes tries again
                clear_error()


def clear_error() -> None:
    """Drop the error of the last call to CUDA's runtime, which the next kernel would report as its own."""
    with contextlib.suppress(RuntimeError), torch._C.DisableTorchFunction(), _disable_current_modes():
        torch.zeros(1, device="cuda")


class PageableMemory:
    """Ordinary host memory."""

    def __init__(self, size: int):
        with torch.inference_mode(False):
            self.memory = torch.empty(size, dtype=torch.uint8, device="cpu")


Buffer = Pinned | PageableMemory


class Arena:
    """Buffers that messages take and return, each a quarter larger than the message that it was made for."""

    def __init__(self, lanes: Lanes, make: Callable[[int], Buffer] = Pinned, most_idle: float = IDLE_BYTES):
        self.lanes, self.make, self.most_idle = lanes, make, most_idle
        self.idle: list[Buffer] = []
        self.leaving: list[tuple[Moment, Buffer]] = []

    def take(self, size: int) -> Buffer:
        """The smallest idle buffer with room for that many bytes, or a new one."""
        self._collect()
        self.idle.sort(key=lambda buffer: buffer.memory.nbytes)
        for index, buffer in enumerate(self.idle):
            if buffer.memory.nbytes >= size:
                return self.idle.pop(index)
        pages = -(-(size + size // 4) // mmap.PAGESIZE)
        return self.make(pages * mmap.PAGESIZE)

    def give(self, buffer: Buffer, after: Moment = None) -> None:
        """Return a buffer, which is free from a moment on."""
        if after is None:
            self.idle.append(buffer)
        else:
            self.leaving.append((after, buffer))

    def _collect(self) -> None:
        still = [(moment, buffer) for moment, buffer in self.leaving if not self.lanes.over(moment)]
        if len(still) < len(self.leaving):
            kept = {id(buffer) for _, buffer in still}
            self.idle += [buffer for _, buffer in self.leaving if id(buffer) not in kept]
            self.leaving = still
        while sum(buffer.memory.nbytes for buffer in self.idle) > self.most_idle:
            self.idle.remove(max(self.idle, key=lambda buffer: buffer.memory.nbytes))
