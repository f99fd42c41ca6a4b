"""Carriers: how a bucket of gradients is added up over ranks while backward goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from mural.collectives import all_reduce
from mural.collectives.choose import BACKEND
from mural.comm.groups import NCCL, backend_of


class Carrier(Protocol):
    """Starts the sum of a buffer over a group; what it returns can be waited for."""

    averages: bool
    """Whether the result is the mean already."""

    def launch(self, buffer: Tensor, group: dist.ProcessGroup) -> Any:
        """What to wait for."""
        ...


class OfBackend:
    """The backend's own all-reduce."""

    def __init__(self, backend: str):
        self.averages = backend == NCCL

    def launch(self, buffer: Tensor, group: dist.ProcessGroup) -> Any:
        """What to wait for."""
        op = dist.ReduceOp.AVG if self.averages else dist.ReduceOp.SUM
        return dist.all_reduce(buffer, op=op, group=group, async_op=True)


class OfRounds:
    """Rounds of ours, in a thread that takes one bucket after the other, in the order in which they were launched."""

    averages = False

    def __init__(self, algorithm: str):
        self.algorithm = algorithm
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="mural gradients")

    def launch(self, buffer: Tensor, group: dist.ProcessGroup) -> Any:
        """What to wait for."""
        return Underway(self.thread.submit(all_reduce, buffer, self.algorithm, group))


class Underway:
    """A call in another thread, waited for as a collective of torch is."""

    def __init__(self, future: Future[Tensor]):
        self.future = future

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for its end, or raise what it raised; as gloo does, a wait that is too short says so."""
        try:
            self.future.result(None if timeout is None else timeout.total_seconds())
        except TimeoutError as error:
            raise RuntimeError("Operation timed out!") from error

    def get_future(self) -> Underway:
        """Itself: it has `then`."""
        return self

    def then(self, called: Callable[[Any], None]) -> None:
        """Call something at its end."""
        self.future.add_done_callback(called)


def summed(buffer: Tensor, algorithm: str, group: dist.ProcessGroup | None) -> None:
    """Make a buffer the sum over a group, by an algorithm by name, and wait for it."""
    if algorithm == BACKEND:
        dist.all_reduce(buffer, group=group)
    else:
        all_reduce(buffer, algorithm, group)


def carrier_of(algorithm: str, group: dist.ProcessGroup | None) -> Carrier:
    """The carrier of an algorithm by name: "backend" is the backend's own."""
    if algorithm == BACKEND:
        return OfBackend(backend_of(group) if group is not None else "")
    return OfRounds(algorithm)
