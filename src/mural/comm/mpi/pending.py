"""Work over MPI: one operation from its call until its results are in place, and the wait for it.

call ──► [a copy from the GPU] ──► requests ──► arrived ──► in place
          waiter or thread asks     waiter or thread tests    by the waiter; by the thread, if it has a future
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Work

from mural.comm.mpi.installation import library
from mural.errors import PeerError

if TYPE_CHECKING:
    from mural.comm.mpi.progress import Engine

SPIN_SECONDS, LONGEST_PAUSE = 2e-4, 3e-4

Requests = list[tuple[Any, int]]
"""MPI's requests, each with the bytes that it must receive; -1 where it receives none."""


@dataclass(frozen=True)
class Operation:
    """What one call of a group does: it begins by handing memory to MPI, and ends by putting results in place.

    `sources` are the tensors that it reads. The memory that MPI reads and writes belongs to `begin`. `peers` are the
    ranks of the group without which it does not end.
    """

    name: str
    begin: Callable[[], Requests]
    end: Callable[[], None]
    sources: list[Tensor]
    results: list[Tensor]
    peers: frozenset[int]


class Queue:
    """The operations of one group that wait for a copy from a GPU, and those after them: all start in order.

    `ranks` are the group's, as MPI counts them in the whole run.
    """

    def __init__(self, name: str, ranks: Sequence[int]):
        self.name, self.ranks, self.unposted, self.aborted = name, ranks, deque[MPIWork](), ""

    def start(self) -> None:
        """Start what can start. Under the engine's lock."""
        while self.unposted and self.unposted[0].ready():
            self.unposted.popleft().begin()


class MPIWork(Work):
    """One operation of a group, from its call until its results are in place."""

    def __init__(self, engine: Engine, queue: Queue, operation: Operation, timeout: float):
        super().__init__()
        self.engine, self.queue, self.operation, self.timeout = engine, queue, operation, timeout
        self.name, self.results = operation.name, operation.results
        self.requests: Requests | None = None
        self.statuses: list[Any] = []
        self.error: Exception | None = None
        self.arrived = self.done = False
        self.guard = threading.RLock()
        self.future: Any = None
        # What the calling stream was given before this moment is what the operation sends.
        self.moments = moments_of([*operation.sources, *operation.results])
        engine.post(self)

    def ready(self) -> bool:
        """Whether the copies that it sends from are complete."""
        return all(moment.query() for _, moment in self.moments)

    def begin(self) -> None:
        """Hand the operation to MPI. Under the engine's lock."""
        try:
            self.requests = self.operation.begin()
            self.statuses = [library().Status() for _ in self.requests]
        except Exception as error:
            self.requests, self.error, self.arrived = [], error, True

    def advance(self) -> bool:
        """Whether it has arrived, by asking MPI once. Under the engine's lock."""
        self.queue.start()
        if self.requests is None or self.arrived:
            return self.arrived
        try:
            if not library().Request.Testall([request for request, _ in self.requests], self.statuses):
                return False
            self._check_sizes(self.requests)
        except library().Exception as error:
            self.error = PeerError(f"{self.name}: MPI says {error}: a peer ended, or sent more than this rank expected")
        self.arrived = True
        return True

    def _check_sizes(self, requests: Requests) -> None:
        for (_, expected), status in zip(requests, self.statuses, strict=True):
            if expected >= 0 and (found := status.Get_count(library().BYTE)) != expected:
                self.error = PeerError(
                    f"{self.name}: rank {status.Get_source()} of the group sent {found} bytes where {expected} were "
                    "expected: the ranks no longer run the same operations"
                )

    def complete(self) -> None:
        """Put the results in place, once, on the current stream."""
        with self.guard:
            if self.done:
                return
            try:
                if self.error is None:
                    self.operation.end()
            except Exception as error:
                self.error = error
            self.moments = moments_of(self.results)
            self._finish()

    def fail(self, error: Exception) -> None:
        """End the operation for those that wait for it; its memory stays with MPI."""
        with self.guard:
            if not self.done:
                self.error = error
                self.engine.abandon(self)
                self._finish()

    def _finish(self) -> None:
        self.done = True
        if self.future is not None and self.error is not None:
            self.future.set_exception(self.error)
        elif self.future is not None:
            self.future.set_result(self.results)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the results are in place; raise if they do not come in time, or if the group was aborted."""
        seconds = timeout.total_seconds()
        with self.engine.waiting():
            self._poll(seconds if seconds > 0 else self.timeout)
        self.complete()
        if self.error is not None:
            raise self.error
        for device, moment in self.moments:
            torch.cuda.current_stream(device).wait_event(moment)
        return True

    def _poll(self, limit: float) -> None:
        begun = time.monotonic()
        while not self.done:
            with self.engine.lock:
                if self.advance():
                    return
            waited = time.monotonic() - begun
            if waited < SPIN_SECONDS:
                os.sched_yield()
            elif self.queue.aborted:
                self.fail(PeerError(f"{self.name} was given up: {self.queue.aborted}"))
            elif gone := self.engine.gone(self.queue.ranks[peer] for peer in self.operation.peers):
                self.fail(PeerError(f"{self.name} needs rank {gone[0]}, which has left the run; see its output"))
            elif waited > limit:
                self.fail(PeerError(f"{self.name} was not answered in {limit:g} s: a peer hangs, or has ended"))
            else:
                time.sleep(min(waited / 10, LONGEST_PAUSE))

    def is_completed(self) -> bool:
        """Whether the results are in place."""
        with self.engine.lock:
            arrived = self.advance()
        if arrived:
            self.complete()
        return self.done

    def is_success(self) -> bool:
        """Whether it ended without an error."""
        return self.done and self.error is None

    def exception(self) -> Any:
        """The error that ended it."""
        return self.error

    def result(self) -> list[Tensor]:
        """The tensors with the results."""
        return self.results

    def synchronize(self) -> None:
        """Wait until the results are in place."""
        self.wait()

    def source_rank(self) -> int:
        """The rank of the group that sent what was received."""
        return self.statuses[0].Get_source()

    _source_rank = source_rank

    def get_future(self) -> Any:
        """A future with the results, which the thread completes."""
        with self.guard:
            if self.future is None:
                devices: Any = sorted({t.device for t in self.results if t.is_cuda}, key=str)
                self.future = torch.futures.Future(devices=devices)
                if self.done:
                    self._finish()
        return self.future


def moments_of(tensors: list[Tensor]) -> list[tuple[torch.device, Any]]:
    """For each GPU of some tensors, the moment when the current stream has done its work so far."""
    devices = {t.device for t in tensors if t.is_cuda}
    return [(device, torch.cuda.current_stream(device).record_event()) for device in sorted(devices, key=str)]
