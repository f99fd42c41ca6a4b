"""The alarm: ends a wait for a rank that raised alone, which would otherwise last until the timeout.

A rank that raises leaves a note in the group's store: how many transfers it had begun, and its error. A rank
that waits in a later transfer, and did not itself raise at that number, will never get its messages. Its
watching thread then asks the peers' watching threads to complete the pending messages with empty data (gloo
cannot abort a wait; NCCL and the MPI group can), and the wait ends with the note's text as an error.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Generator
from typing import Any, Protocol

import torch
import torch.distributed as dist

POLL_SECONDS = 0.25


class Pending(Protocol):
    """A transfer that somebody waits for."""

    serial: int
    outgoing: dict[int, torch.Tensor]
    incoming: dict[int, torch.Tensor]


class Alarm:
    """Notes of ranks that raised, and the thread that watches for them while this rank waits."""

    def __init__(self, group: dist.ProcessGroup, name: str = ""):
        self.group, self.rank = group, dist.get_rank()
        self.store = dist.distributed_c10d._get_default_store()
        self.key = f"mural/alarm/{group.group_name}{name}"
        self.heard = ""
        self.since = 0
        """Notes with smaller numbers are over."""
        self.own: set[int] = set()
        self.notes: list[tuple[int, str]] = []
        self.rescued = 0
        self.kept: list[Any] = []  # buffers of messages that may still be under way
        self.waiting: Pending | None = None  # written by the waiting thread, read by the watching one
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True, name="mural-alarm")
        self.thread.start()
        # A thread that is inside torch when the interpreter ends would take the process down with it.
        atexit.register(self.close)

    def close(self) -> None:
        """Stop watching."""
        self.over.set()
        if self.thread is not threading.current_thread():
            self.thread.join(timeout=2.0)

    def ring(self, serial: int, error: BaseException) -> None:
        """Leave the note that this rank raised after it had begun that many transfers."""
        self.own.add(serial)
        with contextlib.suppress(RuntimeError):
            number = self.store.add(f"{self.key}/notes", 1)
            self.store.set(
                f"{self.key}/note/{number}", f"{serial} rank {self.rank} raised {type(error).__name__}: {error}"
            )

    @contextlib.contextmanager
    def watching(self, transfer: Pending) -> Generator[None]:
        """Listen for notes while the block waits for a transfer."""
        self.waiting = transfer
        try:
            yield
        finally:
            self.waiting = None

    def _watch(self) -> None:
        """Look every now and then: waking this thread for each transfer would cost more than most transfers."""
        before: Pending | None = None
        while not self.over.wait(POLL_SECONDS):
            now = self.waiting
            long_wait, before = now is not None and now is before, now
            try:
                if long_wait:
                    self._read_notes()
                if self.own or self.heard:
                    self._serve()
            except RuntimeError:
                return  # the store went away with the process group

    def _read_notes(self) -> None:
        while self.store.check([f"{self.key}/note/{len(self.notes) + 1}"]):
            serial, text = self.store.get(f"{self.key}/note/{len(self.notes) + 1}").decode().split(" ", 1)
            self.notes.append((int(serial), text))
        waiting = self.waiting
        if waiting is None or self.heard:
            return
        for serial, text in self.notes:
            if serial not in self.own and self.since <= serial < waiting.serial:
                self.heard = text
                self._ask(waiting)
                return

    def _ask(self, transfer: Pending) -> None:
        """Ask every peer of a transfer to complete its messages, so that the wait ends."""
        if dist.get_backend(self.group) == "nccl" or getattr(self.group, "aborts_waits", False):
            self.group.abort()
            return
        self.kept.append((transfer.outgoing, transfer.incoming))
        for peer in {*transfer.outgoing, *transfer.incoming}:
            number = self.store.add(f"{self.key}/asks/{peer}", 1)
            sizes = [b[peer].nbytes if peer in b else 0 for b in (transfer.incoming, transfer.outgoing)]
            self.store.set(f"{self.key}/ask/{peer}/{number}", f"{self.rank} {sizes[0]} {sizes[1]}")

    def _serve(self) -> None:
        """Complete the messages that peers asked for."""
        while self.store.check([f"{self.key}/ask/{self.rank}/{self.rescued + 1}"]):
            self.rescued += 1
            text = self.store.get(f"{self.key}/ask/{self.rank}/{self.rescued}").decode()
            peer, wanted, offered = (int(n) for n in text.split())
            self.heard = self.heard or f"rank {peer} gave up waiting for this rank, which had raised"
            for size, send in ((wanted, True), (offered, False)):
                if size:
                    buffer = torch.zeros(size, dtype=torch.uint8)
                    work = (dist.isend if send else dist.irecv)(buffer, peer, group=self.group)
                    self.kept.append((buffer, work))
