"""Gauges: how much memory a step takes from moment to moment, and how long that lasts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from mural.memory.offload.moment_times import MomentTimes


class Gauge(Protocol):
    """Reads bytes and seconds of the device that a step runs on."""

    def most(self) -> int:
        """The most bytes since the last moment."""
        ...

    def now(self) -> int:
        """The bytes now."""
        ...

    def stop(self) -> None:
        """A moment begins."""
        ...

    def start(self) -> None:
        """It is over."""
        ...

    def seconds(self) -> tuple[float, ...]:
        """The seconds after each moment, up to the next one."""
        ...


class GpuGauge(MomentTimes):
    """The gauge of a GPU: torch's allocator counts."""

    def most(self) -> int:
        """The most bytes since the last moment."""
        return torch.cuda.max_memory_allocated(self.device)

    def now(self) -> int:
        """The bytes now."""
        return torch.cuda.memory_allocated(self.device)

    def start(self) -> None:
        """A moment is over."""
        torch.cuda.reset_peak_memory_stats(self.device)
        super().start()


class KnownGauge(MomentTimes):
    """The gauge of a CPU, whose memory nobody counts: what is known of the step."""

    def __init__(self, device: torch.device, known: Callable[[], int]):
        super().__init__(device)
        self.now = self.most = known
