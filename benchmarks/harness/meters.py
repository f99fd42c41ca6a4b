"""Memory and time of one rank: the allocator's peaks on a GPU, the resident size on a CPU."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Meter(Protocol):
    """Peaks since the last reset, and the time of work that this rank does alone."""

    def cap(self, limit: int | None) -> None:
        """Let this rank have no more than that many bytes."""
        ...

    def reset(self) -> None:
        """Forget the peaks so far; what is alive now counts."""
        ...

    def peaks(self) -> dict[str, int]:
        """Bytes: the peaks, and what is held now."""
        ...

    def wait(self) -> None:
        """Wait for the work that was started."""
        ...

    def alone(self, work: Callable[[], Any]) -> float:
        """Seconds of work on a device that nobody else uses now."""
        ...


class CudaMeter:
    """The caching allocator's own counts. The CUDA context and libraries' code are not in them, nor under the cap."""

    def cap(self, limit: int | None) -> None:
        """Raises OutOfMemoryError once the allocator would take more than the limit from the device."""
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, (limit or total) / total))

    def reset(self) -> None:
        """Give cached blocks back, and count anew."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def peaks(self) -> dict[str, int]:
        """Allocated: tensors and workspaces. Reserved: what the allocator held. Device: used by all processes, now."""
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return {
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
            "reserved_now": torch.cuda.memory_reserved(),
            "device_now": total - free,
        }

    def wait(self) -> None:
        """Wait for the kernels."""
        torch.cuda.synchronize()

    def alone(self, work: Callable[[], Any]) -> float:
        """Between two events around the work, on the device's clock."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000


class CpuMeter:
    """Resident memory of the process above what it had at the last reset. The cap is checked after each peak."""

    def __init__(self) -> None:
        self.limit: int | None = None
        self.base = 0

    def cap(self, limit: int | None) -> None:
        """Raise OutOfMemoryError when a peak above the limit is read."""
        self.limit = limit

    def reset(self) -> None:
        """Count from the present resident size on."""
        gc.collect()
        if RESET.exists():
            RESET.write_text("5")
        self.base = resident("VmRSS")

    def peaks(self) -> dict[str, int]:
        """The growth of the resident size since the reset, and the size now."""
        grown, now = resident("VmHWM") - self.base, resident("VmRSS")
        if self.limit is not None and grown > self.limit:
            raise torch.OutOfMemoryError(f"{grown} bytes, where {self.limit} are allowed")
        return {"allocated": grown, "reserved": grown, "reserved_now": now, "device_now": now}

    def wait(self) -> None:
        """Nothing runs beside."""

    def alone(self, work: Callable[[], Any]) -> float:
        """By the clock."""
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin


def resident(field: str) -> int:
    """A size of this process, in bytes: VmRSS now, VmHWM at most."""
    lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines() if ":" in line)
    return int(lines[field].split()[0]) * 1024


METERS: dict[str, Callable[[], Meter]] = {"cuda": CudaMeter, "cpu": CpuMeter}
