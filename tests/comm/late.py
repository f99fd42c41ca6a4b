"""A GPU's lanes and memory, imitated on the CPU: copies happen later, on threads; slots and marks are shared files."""

from __future__ import annotations

import mmap
import os
import queue
import random
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PATIENCE = 20.0


class Mark:
    """An interprocess event: how often it was recorded, and how many of these records were reached."""

    def __init__(self, path: str | None = None):
        if path is None:
            handle, path = tempfile.mkstemp(prefix="mural-mark-")
            os.ftruncate(handle, 16)
            weakref.finalize(self, Path(path).unlink, missing_ok=True)
        else:
            handle = os.open(path, os.O_RDWR)
        self.path = path
        self.numbers = memoryview(mmap.mmap(handle, 16)).cast("q")
        os.close(handle)

    def record(self) -> int:
        """The number of a new record, in the order of calls."""
        self.numbers[0] += 1
        return self.numbers[0]

    def reach(self, number: int) -> None:
        """A record is reached."""
        self.numbers[1] = number

    def capture(self) -> Callable[[], bool]:
        """Whether the last record at the time of this call is reached."""
        number = self.numbers[0]
        return lambda: self.numbers[1] >= number


class LateLanes:
    """Two threads that copy in order, each copy some time after it was asked for."""

    device = torch.device("cpu")

    def __init__(self, delay: float = 0.002):
        self.delay = delay
        self.queues: list[queue.Queue[Callable[[], None]]] = [queue.Queue(), queue.Queue()]
        self.random = random.Random(os.getpid())
        for lane in self.queues:
            threading.Thread(target=self._work, args=(lane,), daemon=True).start()

    def _work(self, lane: queue.Queue[Callable[[], None]]) -> None:
        while True:
            lane.get()()

    def now(self) -> None:
        return None

    def copy(self, target: Tensor, source: Tensor, outward: bool, after: Sequence[Any], mark: Any = None) -> Any:
        reached = [m.capture() if isinstance(m, Mark) else m.is_set for m in after if m is not None]
        number = mark.record() if mark is not None else 0
        done, pause = threading.Event(), self.random.random() * self.delay

        def work() -> None:
            begun = time.monotonic()
            while not all(r() for r in reached) and time.monotonic() - begun < PATIENCE:
                time.sleep(1e-4)
            time.sleep(pause)
            with torch.inference_mode():  # whatever mode the caller was in
                target.copy_(source)
            if mark is not None:
                mark.reach(number)
            done.set()

        self.queues[outward].put(work)
        return done

    def join(self, moment: Any, tensor: Tensor) -> None:
        self.finish(moment)

    def finish(self, moment: Any) -> None:
        if not moment.wait(PATIENCE):
            raise TimeoutError("a copy did not end")

    def over(self, moment: Any) -> bool:
        return moment.is_set()


class LateMemory:
    """Slots in files that processes share."""

    def __init__(self, lanes: LateLanes):
        self.lanes, self.paths = lanes, dict[int, str]()

    def allocate(self, size: int) -> Tensor:
        handle, path = tempfile.mkstemp(prefix="mural-slot-")
        os.close(handle)
        slot = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        self.paths[slot.data_ptr()] = path
        weakref.finalize(self, Path(path).unlink, missing_ok=True)
        return slot

    def share(self, slot: Tensor) -> bytes:
        return f"{slot.nbytes} {self.paths.pop(slot.data_ptr())}".encode()

    def open(self, handle: bytes, brief: bool) -> Tensor:
        size, path = handle.decode().split(" ", 1)
        slot = torch.from_file(path, shared=True, size=int(size), dtype=torch.uint8)
        os.unlink(path)
        return slot

    def close(self, opened: dict[int, Tensor], numbers: Sequence[int]) -> None:
        for number in numbers:
            # Whoever reads a closed slot reads nonsense.
            opened.pop(number).fill_(255)

    def marks(self, count: int) -> list[Mark]:
        return [Mark() for _ in range(count)]

    def share_marks(self, marks: Sequence[Mark]) -> list[bytes]:
        return [mark.path.encode() for mark in marks]

    def open_marks(self, handles: Sequence[bytes]) -> list[Mark]:
        return [Mark(handle.decode()) for handle in handles]

    def drain(self) -> None:
        for lane in self.lanes.queues:
            ended = threading.Event()
            lane.put(ended.set)
            ended.wait(PATIENCE)
