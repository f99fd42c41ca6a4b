"""Clocks: seconds and peak bytes of a piece of work, on a CPU or a GPU, as it would have them inside a model.

Inside a model, what a layer reads first was just written, and the rest (parameters, what backward kept) was used
long ago. So on a GPU the cache is emptied before each run, and only `fresh` tensors are brought back into it. On a CPU
results are kept for a while, so that a run does not write to what is still in the cache from the last.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
CACHE = 2**27
"""Bytes that displace all others from a cache."""
CYCLES = 2e9
"""About a GPU's cycles a second."""
PAUSE = 4e-4
"""Seconds in which a host queues a layer, with what goes before it."""
KEPT = 8
"""How many results are kept on a CPU while more are made."""


class Clock(Protocol):
    """How long work takes on a device, and what memory it needs."""

    device: torch.device

    def seconds(self, work: Callable[[], Any], fresh: Sequence[Tensor] = (), *, repeats: int = 5) -> list[float]:
        """The seconds of each of some runs, after one that is not counted."""
        ...

    def typical(self, times: Sequence[float]) -> float:
        """The one number that stands for the times of some runs."""
        ...

    def peak(self, work: Callable[[], Any]) -> tuple[int, Any]:
        """The most bytes that the work needs beyond those held before, and its result."""
        ...


class CudaClock:
    """Time on the device itself: kernels are queued after a pause, so that none waits for the host."""

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self.device = torch.device(device)
        self._other = torch.zeros(CACHE, dtype=torch.uint8, device=self.device)
        self._sum = torch.zeros((), device=self.device)

    def seconds(self, work: Callable[[], Any], fresh: Sequence[Tensor] = (), *, repeats: int = 5) -> list[float]:
        """Between two events around each run."""
        torch.cuda.synchronize(self.device)
        begin = time.perf_counter()
        self._run(work, fresh)  # loads kernels, and makes the allocator take its memory
        torch.cuda.synchronize(self.device)
        begin, first = time.perf_counter(), begin
        repeats = max(3, min(repeats, int(0.1 / max(begin - first, 1e-4))))
        torch.cuda._sleep(int(CYCLES * PAUSE * repeats))
        events = [self._run(work, fresh) for _ in range(repeats)]
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(stop) / 1000 for start, stop in events]

    def _run(self, work: Callable[[], Any], fresh: Sequence[Tensor]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._other.zero_()
        with torch.no_grad():
            for tensor in fresh:
                torch.sum(tensor, dtype=torch.float32, dim=tuple(range(tensor.dim())), out=self._sum)
        start.record()
        result = work()
        stop.record()
        del result
        return start, stop

    def typical(self, times: Sequence[float]) -> float:
        """The median."""
        return median(times)

    def peak(self, work: Callable[[], Any]) -> tuple[int, Any]:
        """The allocator's own count: tensors and workspaces."""
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        result = work()
        return torch.cuda.max_memory_allocated(self.device) - before, result


class CpuClock:
    """The seconds of the calling thread where torch runs one, which other programs hardly change, else the clock's."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def seconds(self, work: Callable[[], Any], fresh: Sequence[Tensor] = (), *, repeats: int = 5) -> list[float]:
        """Of runs that follow each other; the results of some are kept, so that the next writes to other memory."""
        now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        begin = now()
        result = work()
        first = now() - begin
        size = (
            sum(leaf.nbytes for leaf in result if isinstance(leaf, Tensor)) if isinstance(result, (list, tuple)) else 0
        )
        kept = deque([result], maxlen=max(1, min(KEPT, CACHE // max(1, size))))
        del result
        repeats = max(3, min(repeats * 4, int(0.1 / max(first, 1e-5))))
        found: list[float] = []
        for _ in range(len(kept) + repeats):
            begin = now()
            kept.append(work())
            found.append(now() - begin)
        return found[1:]

    def typical(self, times: Sequence[float]) -> float:
        """The least: other programs on the same cores and caches only ever add to it."""
        return min(times)

    def peak(self, work: Callable[[], Any]) -> tuple[int, Any]:
        """The growth of the resident size of this process, which should do nothing else."""
        trim()
        if RESET.exists():
            RESET.write_text("5")
        before = resident("VmRSS")
        result = work()
        return resident("VmHWM") - before, result


def resident(field: str) -> int:
    """A size of this process, in bytes: VmRSS now, VmHWM at most; 0 where the system does not say."""
    if not STATUS.exists():
        return 0
    lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines() if ":" in line)
    return int(lines[field].split()[0]) * 1024


def trim() -> None:
    """Give free memory back to the system, where the C library can."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def clock_of(device: torch.device | str) -> Clock:
    """The clock for a device."""
    return CudaClock(device) if torch.device(device).type == "cuda" else CpuClock()
