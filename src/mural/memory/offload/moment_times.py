"""The seconds between the moments of a step, on a CPU or a GPU."""

from __future__ import annotations

import time
from typing import Any

import torch


class MomentTimes:
    """A clock that stands still during moments: on a GPU, events in its stream, looked at when the step is over."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stops: list[Any] = []
        self.starts: list[Any] = []
        self.begun, self.host = time.perf_counter(), 0.0
        """When the clock was made, and the seconds of the host until `seconds` was asked for."""

    def stop(self) -> None:
        """A moment begins, in which copies may be waited for."""
        self.stops.append(self._now())

    def start(self) -> None:
        """It is over."""
        self.starts.append(self._now())

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self) -> tuple[float, ...]:
        """The seconds after each moment, up to the next one."""
        self.host = time.perf_counter() - self.begun
        pairs = zip(self.starts[:-1], self.stops[1:], strict=True)
        if self.device.type != "cuda":
            return tuple(end - begin for begin, end in pairs)
        torch.cuda.synchronize(self.device)
        return tuple(max(begin.elapsed_time(end), 0.0) / 1e3 for begin, end in pairs)
