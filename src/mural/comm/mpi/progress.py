"""The engine of messages over MPI: the lock under which MPI is called, and the thread that advances operations.

MPI moves messages only inside its calls. A rank that waits calls it again and again, with growing pauses, so that ranks
on the same core yield to each other. While no rank waits, one thread per process does so: messages of any size and the
rounds of an all-reduce make progress while Python computes.

Every call is non-blocking and made under one lock, so an MPI that takes one thread at a time is enough.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Generator, Iterable
from typing import Any

from mural.comm.mpi.installation import library
from mural.comm.mpi.pending import LONGEST_PAUSE, MPIWork
from mural.errors import PeerError

NAP_SECONDS, IDLE_SECONDS = 1e-3, 0.05
"""With nothing under way, the thread polls now and then; after a while it sleeps until it is woken."""
FAREWELL_SECONDS = 3.0
"""This long after a farewell, everything that the rank sent before it has arrived."""


class Engine:
    """All operations of this process that are under way, and the thread that advances them while nobody waits.

    `farewells` is the communicator in which ranks announce that they leave.
    """

    def __init__(self, farewells: Any) -> None:
        self.lock = threading.RLock()
        self.pending: list[MPIWork] = []
        self.abandoned: list[MPIWork] = []
        self.waiters = 0
        self.farewells = farewells
        self.left: dict[int, float] = {}
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
        """Stop polling an operation, and keep its memory: MPI may still read or write it."""
        with self.lock:
            if work in self.pending:
                self.pending.remove(work)
                self.abandoned.append(work)

    def gone(self, ranks: Iterable[int]) -> list[int]:
        """The ranks that left the run some time ago: what they sent before has arrived by now."""
        with self.lock:
            while self.farewells.Iprobe():
                status = library().Status()
                self.farewells.Recv(bytearray(0), status=status)
                self.left[status.Get_source()] = time.monotonic()
        return [rank for rank in ranks if time.monotonic() - self.left.get(rank, float("inf")) > FAREWELL_SECONDS]

    @contextlib.contextmanager
    def waiting(self) -> Generator[None]:
        """Keep the thread away from MPI: the waiter polls often enough for all."""
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
                time.sleep(LONGEST_PAUSE)
            elif idle < IDLE_SECONDS:
                time.sleep(NAP_SECONDS)
                idle += NAP_SECONDS
            else:
                self.called.clear()
                if not self.pending:
                    self.called.wait()
                idle = 0.0

    def _move(self) -> None:
        """Poll MPI for all that is under way; next to a waiter, only for operations that have a future."""
        for work in list(self.pending):
            with self.lock:
                arrived = work.advance() if work.future is not None or not self.waiters else work.arrived
                if arrived and work in self.pending:
                    self.pending.remove(work)
            if arrived and work.future is not None:
                work.complete()
