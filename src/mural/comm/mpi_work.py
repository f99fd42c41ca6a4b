"""Work over MPI: operations under way, the lock under which MPI is called, and the thread that moves them on.

MPI moves messages only while somebody is inside one of its calls. A waiting rank calls it again and again, with pauses
that grow, so that ranks which share a core leave it to each other. While nobody waits, one thread per process does so:

    post ──► [a copy from the GPU] ──► requests ──► arrived ──► put in place ──► done
              waiter or thread asks     waiter or thread tests    waiter; thread, if somebody has the future

Every call is non-blocking and made under one lock, so an MPI that takes one thread at a time is enough.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Work

from mural.comm.mpi_library import library
from mural.errors import PeerError

SPIN_SECONDS, LONGEST_PAUSE = 2e-4, 1e-3
IDLE_SECONDS = 0.05
"""After that long without anything under way, the thread sleeps until it is called."""

Requests = list[tuple[Any, int]]
"""MPI's requests, each with the bytes that it must receive; -1 where it receives none."""


@dataclass(frozen=True)
class Operation:
    """What one call of a group does: it begins by handing something to MPI, and ends by putting results in place.

    `sources` are the tensors that it reads. The memory that MPI reads and writes belongs to `begin`.
    """

    name: str
    begin: Callable[[], Requests]
    end: Callable[[], None]
    sources: list[Tensor]
    results: list[Tensor]


class Queue:
    """The operations of one group that wait for a copy from a GPU, and those behind them: all start in their order."""

    def __init__(self, name: str):
        self.name, self.unposted, self.aborted = name, deque[MPIWork](), ""

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
        """Whether it has arrived, after MPI was asked once. Under the engine's lock."""
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
        """End the operation for those who wait; its memory stays with MPI."""
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
            if self.queue.aborted:
                self.fail(PeerError(f"{self.name} was given up: {self.queue.aborted}"))
            elif waited > limit:
                self.fail(PeerError(f"{self.name} was not answered in {limit:g} s: a peer hangs, or has ended"))
            elif waited < SPIN_SECONDS:
                os.sched_yield()
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
        """The error with which it ended."""
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


class Engine:
    """All operations of this process that are under way, and the thread that moves them on while nobody waits."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.pending: list[MPIWork] = []
        self.abandoned: list[MPIWork] = []
        self.waiters = 0
        self.called = threading.Event()
        self.over = False
        self.thread = threading.Thread(target=self._run, daemon=True, name="mural-mpi")
        self.thread.start()

    def post(self, work: MPIWork) -> None:
        """Start an operation now, or after those of its group that are not ready yet."""
        with self.lock:
            if work.queue.aborted:
                raise PeerError(f"{work.name}: the group was given up before, since {work.queue.aborted}")
            work.queue.unposted.append(work)
            work.queue.start()
            self.pending.append(work)
        if not self.called.is_set():
            self.called.set()

    def abandon(self, work: MPIWork) -> None:
        """Ask no more for an operation, and keep its memory: MPI may still read or write there."""
        with self.lock:
            if work in self.pending:
                self.pending.remove(work)
                self.abandoned.append(work)

    @contextlib.contextmanager
    def waiting(self) -> Generator[None]:
        """Keep the thread away from MPI: the waiter asks often enough for all."""
        with self.lock:
            self.waiters += 1
        try:
            yield
        finally:
            with self.lock:
                self.waiters -= 1

    def close(self) -> None:
        """Stop the thread; MPI may be finalized afterwards."""
        self.over = True
        self.called.set()
        self.thread.join(timeout=5.0)

    def _run(self) -> None:
        idle = 0.0
        while not self.over:
            if self.pending:
                self._move()
                idle = 0.0
                # Often enough to keep a large message moving, which travels in many parts.
                time.sleep(LONGEST_PAUSE if self.waiters else LONGEST_PAUSE / 5)
            elif idle < IDLE_SECONDS:
                time.sleep(LONGEST_PAUSE)
                idle += LONGEST_PAUSE
            else:
                self.called.clear()
                if not self.pending:
                    self.called.wait()
                idle = 0.0

    def _move(self) -> None:
        """Ask MPI for all that is under way; beside a waiter, for that alone whose future somebody may wait for."""
        for work in list(self.pending):
            with self.lock:
                arrived = work.advance() if work.future is not None or not self.waiters else work.arrived
                if arrived and work in self.pending:
                    self.pending.remove(work)
            if arrived and work.future is not None:
                work.complete()


def moments_of(tensors: list[Tensor]) -> list[tuple[torch.device, Any]]:
    """For each GPU of some tensors, the moment when the current stream has done what it was given so far."""
    devices = {t.device for t in tensors if t.is_cuda}
    return [(device, torch.cuda.current_stream(device).record_event()) for device in sorted(devices, key=str)]
