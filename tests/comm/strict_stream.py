"""A stream of the strict backend: calls on a group run one after the other in a thread, and can be waited for."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Work


class Group(Protocol):
    """What a wait asks of the group: how long it may last, whether it was given up, and who waits for what."""

    seconds: float
    aborted: bool

    def report(self) -> str: ...


class StrictError(RuntimeError):
    """The ranks do not fit together: an order, a size or a kind of call differs."""


class Kernel(Work):
    """Something that a stream runs, and the wait for it."""

    def __init__(self, group: Group, text: str, action: Callable[[], None], results: Sequence[Tensor]):
        super().__init__()
        self.group, self.text, self.action, self.results = group, text, action, list(results)
        self.over, self.error = threading.Event(), None
        self.future: Any = None

    def run(self) -> None:
        """Do it; in the stream's thread."""
        try:
            self.action()
        except Exception as error:
            self.error = error if isinstance(error, StrictError) else StrictError(f"{self.text}: {error}")
        self.over.set()
        if self.future is not None:
            self.settle()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until it is over, or raise."""
        limit = timeout.total_seconds() or self.group.seconds
        until = time.monotonic() + limit
        while not self.over.wait(0.02):
            if self.group.aborted:
                raise StrictError(f"{self.text}: the group was aborted")
            if time.monotonic() > until:
                raise StrictError(f"{self.text} was not answered in {limit:g} s.\n{self.group.report()}")
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        """Whether it is over."""
        return self.over.is_set()

    def get_future(self) -> Any:
        """A future with the results."""
        if self.future is None:
            self.future = torch.futures.Future()
            if self.over.is_set():
                self.settle()
        return self.future

    def settle(self) -> None:
        """Give the future what it was made for."""
        if not self.future.done():
            self.future.set_result(self.results) if self.error is None else self.future.set_exception(self.error)


class Stream:
    """Kernels one after the other, in a thread."""

    def __init__(self, name: str):
        self.waiting: queue.SimpleQueue[Kernel | None] = queue.SimpleQueue()
        self.pending: list[Kernel] = []
        self.thread = threading.Thread(target=self._run, daemon=True, name=f"strict {name}")
        self.thread.start()

    def post(self, kernel: Kernel) -> Kernel:
        """Run it after all that was posted before."""
        self.pending.append(kernel)
        self.waiting.put(kernel)
        return kernel

    def _run(self) -> None:
        while (kernel := self.waiting.get()) is not None:
            kernel.run()
            self.pending.remove(kernel)
            del kernel  # and its tensors
