"""Lanes: copies of messages on streams of their own, beside the computation, ordered by events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Moment = Any
"""A point in the work of a stream, here or in another process: on a GPU, an event."""


class Lanes(Protocol):
    """Two lanes of one device, outward and inward; the copies on a lane happen one after the other."""

    device: torch.device

    def now(self) -> Moment:
        """The moment when all is done that the calling stream was given so far."""
        ...

    def copy(self, target: Tensor, source: Tensor, outward: bool, after: Sequence[Moment], mark: Any = None) -> Moment:
        """The moment when a copy is done that begins after some moments; `mark`, if given, marks it for others."""
        ...

    def join(self, moment: Moment, tensor: Tensor) -> None:
        """Let the calling stream go on after a moment, and use the tensor from then on."""
        ...

    def finish(self, moment: Moment) -> None:
        """Let the calling process go on after a moment."""
        ...

    def over(self, moment: Moment) -> bool:
        """Whether a moment has passed."""
        ...


class CudaLanes:
    """The lanes of a GPU: two streams of high priority, since computations on other ranks wait for what they carry."""

    def __init__(self, device: torch.device):
        self.device = device
        self.outward = torch.cuda.Stream(device, priority=-1)
        self.inward = torch.cuda.Stream(device, priority=-1)

    def now(self) -> Moment:
        return torch.cuda.current_stream(self.device).record_event()

    def copy(self, target: Tensor, source: Tensor, outward: bool, after: Sequence[Moment], mark: Any = None) -> Moment:
        stream = self.outward if outward else self.inward
        with torch.cuda.stream(stream):
            for moment in after:
                stream.wait_event(moment)
            target.copy_(source, non_blocking=True)
            if mark is not None:
                mark.record(stream)
            return stream.record_event()

    def join(self, moment: Moment, tensor: Tensor) -> None:
        """See `Lanes`. The allocator hears of the calling stream, which may not be the one of the allocation."""
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(moment)
        tensor.record_stream(stream)

    def finish(self, moment: Moment) -> None:
        moment.synchronize()

    def over(self, moment: Moment) -> bool:
        return moment.query()
