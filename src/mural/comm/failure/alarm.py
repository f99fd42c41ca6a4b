"""The alarm: ends a wait for a rank that raised alone, which would otherwise last until the timeout.

A rank that raises leaves a note in the group's store: how many transfers it had begun, and its error. A rank
that waits in a later transfer, and did not itself raise at that number, will never get its messages. Its
watching thread then asks the peers' watching threads to complete the pending messages with empty data (gloo
cannot abort a wait; NCCL and the MPI group can), and the wait ends with the note's text as an error.

Over NCCL a rank waits on the GPU, and goes on by itself to the next value that it reads. So transfers whose messages
are on a stream are followed until the GPU is done with them, and the oldest of them is what the rank waits for. A rank
that is killed leaves no note: whether its process lives is looked up, where it is on the same machine.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mural.comm import groups
from mural.comm.processes import has_ended, identity

POLL_SECONDS = 0.25
ABORTED = "mural/aborted"
"""Where a rank says that it aborted its communicators: those of its peers wait for it in vain."""
LEFT_SECONDS = 5.0
"""How long a wait lasts before a rank that came to its end counts as one that will not come: what it sent before may
still be under way."""


class Pending(Protocol):
    """A transfer that somebody waits for."""

    serial: int
    outgoing: dict[int, torch.Tensor]
    incoming: dict[int, torch.Tensor]


@dataclass(eq=False)
class Awaited:
    """Something that this rank waits for: a collective, or messages on a stream of the GPU.

    It has no messages of its own that a peer could complete.
    """

    serial: int
    name: str
    works: tuple[Any, ...] = ()
    outgoing: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    incoming: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])


class Alarm:
    """Notes of ranks that raised, and the thread that watches for them while this rank waits."""

    def __init__(self, group: dist.ProcessGroup, name: str = ""):
        self.group, self.rank = group, dist.get_rank()
        self.ranks = dist.get_process_group_ranks(group)
        self.on_gpu = groups.backend_of(group) == groups.NCCL
        self.store: Any = dist.distributed_c10d._get_default_store()
        self.key = f"mural/alarm/{group.group_name}{name}"
        self.heard = ""
        self.since = 0
        """Notes with smaller numbers are over."""
        self.own: set[int] = set()
        self.notes: list[tuple[int, str]] = []
        self.rescued = 0
        self.kept: list[Any] = []  # buffers of messages that may still be under way
        self.waiting: Pending | None = None  # written by the waiting thread, read by the watching one
        self.followed: deque[Awaited] = deque()
        self.lock = threading.Lock()
        self.begun = 0
        """The largest number of what this rank ever waited for."""
        self.identities: dict[int, str] = {}
        self.store.set(f"{self.key}/process/{self.rank}", identity())
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True, name="mural-alarm")
        self.thread.start()
        # A thread that is inside torch when the interpreter ends would take the process down with it.
        atexit.register(self.close)

    def close(self) -> None:
        """Stop watching, and tell the others that this rank came to its end."""
        if not self.over.is_set():
            with contextlib.suppress(RuntimeError):
                self.store.set(f"{self.key}/left/{self.rank}", str(self.begun))
                self.store.add(f"{self.key}/leaving", 1)
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
        before, self.waiting, self.begun = self.waiting, transfer, max(self.begun, transfer.serial)
        try:
            yield
        finally:
            self.waiting = before

    def follow(self, serial: int, name: str, works: Iterable[Any]) -> None:
        """Listen for notes until the GPU has done some works, which this rank may wait for elsewhere.

        Nothing is put on a stream for it: one that is full of work behind a wait takes no more, and this process would
        stop here with the interpreter in its hands.
        """
        self.begun = max(self.begun, serial)
        with self.lock:
            self._drop_done()
            self.followed.append(Awaited(serial, name, tuple(works)))

    def _drop_done(self) -> None:
        while self.followed and all(work.is_completed() for work in self.followed[0].works):
            self.followed.popleft()

    def _oldest(self) -> Awaited | None:
        """The first of what is followed that the GPU has not done."""
        with self.lock:
            self._drop_done()
            return self.followed[0] if self.followed else None

    def pending(self) -> Pending | None:
        """What this rank waits for now, here or on the GPU."""
        return self.waiting or self._oldest()

    def _watch(self) -> None:
        """Look every now and then: waking this thread for each transfer would cost more than most transfers."""
        before, since = None, time.monotonic()
        while not self.over.wait(POLL_SECONDS):
            now = self.pending()
            if now is not before:
                before, since = now, time.monotonic()
            waited = time.monotonic() - since
            try:
                if now is not None and waited > POLL_SECONDS / 2:
                    self._read_notes()
                    self._look_around(now, waited)
                elif self.on_gpu and now is None and self._suspicious():
                    # This rank may hang behind messages that NCCL has given up, and counts as done.
                    self._look_around(Awaited(self.begun, "NCCL"), waited)
                if self.own or self.heard:
                    self._serve()
            except RuntimeError:
                return  # the store went away with the process group

    def _suspicious(self) -> bool:
        """Whether NCCL reports an error, or the process of another rank is gone."""
        return bool(groups.trouble()) or any(map(has_ended, self._identities().values()))

    def _look_around(self, waiting: Pending, seconds: float) -> None:
        """Find out whether a rank of the group is gone, so that nobody will send what this rank waits for."""
        if self.on_gpu and (self.store.check([ABORTED]) or groups.trouble()):
            told = self.store.get(ABORTED).decode() if self.store.check([ABORTED]) else groups.trouble()
            self._hear(told, waiting)
        left = self._left() if not self.heard else {}
        for rank, other in self._identities().items() if not self.heard else ():
            if rank not in left and has_ended(other):
                self._hear(f"the process of rank {rank} ended: see its log", waiting)
        for rank, begun in left.items():
            if seconds > LEFT_SECONDS and begun < waiting.serial:
                self._hear(f"rank {rank} came to its end and does not take part", waiting)

    def _identities(self) -> dict[int, str]:
        """The processes of the other ranks that have said who they are; all are asked for once."""
        if not self.identities:
            others = [rank for rank in self.ranks if rank != self.rank]
            keys = [f"{self.key}/process/{rank}" for rank in others]
            if self.store.check(keys):
                texts = self.store.multi_get(keys) if self.store.has_extended_api() else map(self.store.get, keys)
                self.identities = {rank: text.decode() for rank, text in zip(others, texts, strict=True)}
        return self.identities

    def _left(self) -> dict[int, int]:
        """The ranks that came to their end, with the number of the last thing that each took part in."""
        if not self.store.check([f"{self.key}/leaving"]):
            return {}
        keys = {rank: f"{self.key}/left/{rank}" for rank in self.ranks if rank != self.rank}
        return {rank: int(self.store.get(key)) for rank, key in keys.items() if self.store.check([key])}

    def _hear(self, text: str, waiting: Pending) -> None:
        if not self.heard:
            self.heard = text
            self._ask(waiting)

    def _read_notes(self) -> None:
        while self.store.check([f"{self.key}/note/{len(self.notes) + 1}"]):
            serial, text = self.store.get(f"{self.key}/note/{len(self.notes) + 1}").decode().split(" ", 1)
            self.notes.append((int(serial), text))
        waiting = self.pending()
        if waiting is None or self.heard:
            return
        for serial, text in self.notes:
            if serial not in self.own and self.since <= serial < waiting.serial:
                self._hear(text, waiting)
                return

    def _ask(self, transfer: Pending) -> None:
        """Ask every peer of a transfer to complete its messages on the host, so that the wait ends."""
        if self.abort():
            return
        self.kept.append((transfer.outgoing, transfer.incoming))
        for peer in {*transfer.outgoing, *transfer.incoming}:
            sizes = [
                b[peer].nbytes if peer in b and not b[peer].is_cuda else 0
                for b in (transfer.incoming, transfer.outgoing)
            ]
            number = self.store.add(f"{self.key}/asks/{peer}", 1)
            self.store.set(f"{self.key}/ask/{peer}/{number}", f"{self.rank} {sizes[0]} {sizes[1]}")

    def abort(self) -> bool:
        """End the waits of this rank that a backend can end by itself; whether that were all."""
        if self.on_gpu:
            self.store.set(ABORTED, self.heard)
            groups.end(self.heard)
        elif getattr(self.group, "aborts_waits", False):
            self.group.abort()
            return True
        return False

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
