"""Lanes: separate streams that copy messages concurrently with the computation, ordered by events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

Moment = Any
"""A point in the work of a stream, here or in another process: on a GPU, an event."""


class Lanes(Protocol):
    """Two lanes of one device, outward and inward; the copies on a lane run one after the other."""

    device: torch.device

    def now(self) -> Moment:
        """The moment when all work queued on the calling stream so far is done."""
        ...

    def copy(self, target: Tensor, source: Tensor, outward: bool, after: Sequence[Moment], mark: Any = None) -> Moment:
        """The moment when a copy that starts after given moments is done; `mark`, if given, records it for others."""
        ...

    def join(self, moment: Moment, tensor: Tensor) -> None:
        """Make the calling stream wait for a moment, and use the tensor from then on."""
        ...

    def finish(self, moment: Moment) -> None:
        """Make the calling process wait for a moment."""
        ...

    def over(self, moment: Moment) -> bool:
        """Whether a moment has passed."""
        ...


class CudaLanes:
    """The lanes of a GPU: two high-priority streams, since computations on other ranks wait for what they carry."""

    def __init__(self, device: torch.device):
        self.device = device
        index: Any = device.index  # None for «cuda»
        self.index: int = torch.cuda.current_device() if index is None else index
        self.outward = torch.cuda.Stream(device, priority=-1)
        self.inward = torch.cuda.Stream(device, priority=-1)

    @property
    def calling(self) -> torch.cuda.Stream:
        """The calling stream. Asked for by the device's number: torch takes as long again to find that of a device."""
        return torch.cuda.current_stream(self.index)

    def now(self) -> Moment:
        return self.calling.record_event()

    def copy(self, target: Tensor, source: Tensor, outward: bool, after: Sequence[Moment], mark: Any = None) -> Moment:
        stream = self.outward if outward else self.inward
        for moment in after:
            stream.wait_event(moment)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        if mark is not None:
            mark.record(stream)
        return stream.record_event()

    def copies(self, pairs: Iterable[tuple[Tensor, Tensor]], outward: bool, after: Sequence[Moment]) -> list[Moment]:
        """The moments when copies to the first tensors of pairs from the second ones are done, one after the other."""
        stream, found = self.outward if outward else self.inward, list[Moment]()
        with torch.cuda.stream(stream):
            for moment in after:
                stream.wait_event(moment)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
                found.append(stream.record_event())
        return found

    def join(self, moment: Moment, tensor: Tensor) -> None:
        """See `Lanes`. Tells the allocator about the calling stream, which may not be the one that allocated."""
        stream = self.calling
        stream.wait_event(moment)
        tensor.record_stream(stream)

    def wait(self, moments: Iterable[Moment]) -> None:
        """Make the calling stream wait for moments."""
        stream = self.calling
        for moment in moments:
            stream.wait_event(moment)

    def arriving(self) -> AbstractContextManager[Any]:
        """A block in which memory is taken for what comes: it belongs to the inward lane."""
        return torch.cuda.stream(self.inward)

    def hold(self, tensor: Tensor) -> None:
        """Have a tensor's memory stay until what was sent of it so far has left."""
        tensor.record_stream(self.outward)

    def catch_up(self) -> None:
        """Make the calling stream wait for all that travels."""
        for stream in (self.inward, self.outward):
            self.calling.wait_stream(stream)

    def finish(self, moment: Moment) -> None:
        moment.synchronize()

    def over(self, moment: Moment) -> bool:
        return moment.query()
