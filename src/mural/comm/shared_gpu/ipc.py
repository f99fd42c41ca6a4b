"""CUDA IPC: GPU memory and events of one process that another process on the same GPU opens.

torch counts the processes that have opened a shared block, and keeps it until the last one closes it. Mailboxes do not
need this (they free a slot only after the peer has said that it closed it), so they give back the count of slots that
are kept at once: otherwise a process that ends first would warn about blocks that nobody uses. A slot that goes with
its own message keeps its count: closing it counts once more, and with a count below zero torch would never free the
block.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mural.comm.copy_streams import CudaLanes


class CudaMemory:
    """Slots of mailboxes in GPU memory, from torch's allocator; their marks are interprocess events."""

    def __init__(self, lanes: CudaLanes):
        self.lanes, self.device = lanes, lanes.device

    def allocate(self, size: int) -> Tensor:
        """See `Memory`. The block belongs to the outward lane, the only stream of this process that touches it."""
        with torch.cuda.stream(self.lanes.outward), torch.inference_mode(False):  # slots outlive evaluations
            return torch.empty(size, dtype=torch.uint8, device=self.device)

    def share(self, slot: Tensor) -> bytes:
        storage: Any = slot.untyped_storage()
        with torch.cuda.stream(self.lanes.outward):
            return pickle.dumps(storage._share_cuda_())

    def open(self, handle: bytes, brief: bool) -> Tensor:
        _, block, size, offset, counter, counter_offset, event, _ = pickle.loads(handle)
        opener: Any = torch.UntypedStorage
        with torch.cuda.stream(self.lanes.inward), torch.inference_mode(False):
            # The device may have another number in each process. Marks say when a slot is written: no event is needed.
            storage = opener._new_shared_cuda(
                self.device.index, block, size, offset, counter, counter_offset, event, False
            )
            if not brief:
                opener._release_ipc_counter_cuda(counter, counter_offset)
            return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage, 0, (size,), (1,))

    def close(self, opened: dict[int, Tensor], numbers: Sequence[int]) -> None:
        """See `Memory`. torch waits for the current stream when it closes a block: let it be the lane."""
        with torch.cuda.stream(self.lanes.inward):
            for number in numbers:
                opened.pop(number, None)

    def marks(self, count: int) -> list[Any]:
        return [torch.cuda.Event(interprocess=True) for _ in range(count)]

    def share_marks(self, marks: Sequence[Any]) -> list[bytes]:
        with torch.cuda.device(self.device):
            return [mark.ipc_handle() for mark in marks]

    def open_marks(self, handles: Sequence[bytes]) -> list[Any]:
        return [torch.cuda.Event.from_ipc_handle(self.device, handle) for handle in handles]

    def drain(self) -> None:
        self.lanes.outward.synchronize()
        self.lanes.inward.synchronize()
