"""The mail of a rank: a mailbox out and one in for every rank that shares its memory, and the board of what it read."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mural.comm.copy_streams import Lanes
from mural.comm.shared_gpu.mailbox import MARKS, PLACES, Inbox, Outbox, SharedMemory

SHARED_FOLDER = "/dev/shm"
PARTING_SECONDS = 2.0
"""How long a process that ends waits for its peers to read its last messages."""


class ReadMarks:
    """Numbers of this rank that others on this machine see: for each sender and place, the last message read there.

    They are in a file that processes map into memory; its name is removed once all have opened it.
    """

    def __init__(self, path: str | None, rows: int):
        size = rows * PLACES * 8
        if path is None:
            folder = SHARED_FOLDER if os.path.isdir(SHARED_FOLDER) else None
            handle, path = tempfile.mkstemp(prefix="mural-board-", dir=folder)
            self.unlink = weakref.finalize(self, Path(path).unlink, missing_ok=True)
            os.ftruncate(handle, size)
        else:
            handle = os.open(path, os.O_RDWR)
        self.path = path
        self.numbers = memoryview(mmap.mmap(handle, size)).cast("q")
        os.close(handle)

    def row(self, index: int) -> memoryview:
        """The places of one sender."""
        return self.numbers[index * PLACES : (index + 1) * PLACES]


@dataclass(frozen=True)
class Card:
    """What a rank tells the others: where its board is, and its marks for each of them."""

    board: str
    written: Mapping[int, Sequence[bytes]]
    read: Mapping[int, Sequence[bytes]]


class Mail:
    """The mailboxes of a rank: one out and one in for every other rank of its circle, those that share its memory."""

    def __init__(self, rank: int, circle: Sequence[int], lanes: Lanes, memory: SharedMemory, store: Any):
        self.rank, self.circle, self.lanes, self.memory, self.store = rank, tuple(circle), lanes, memory, store
        self.board = ReadMarks(None, len(self.circle))
        self.others = [other for other in self.circle if other != rank]
        self.written = {other: memory.marks(MARKS) for other in self.others}
        self.read = {other: memory.marks(MARKS) for other in self.others}
        self.outboxes: dict[int, Outbox] = {}
        self.inboxes: dict[int, Inbox] = {}
        self.close = weakref.finalize(self, part, self.outboxes, self.inboxes, memory)

    def card(self) -> Card:
        """What the others need to know of this rank."""
        share = self.memory.share_marks
        return Card(
            self.board.path,
            {other: share(marks) for other, marks in self.written.items()},
            {other: share(marks) for other, marks in self.read.items()},
        )

    def meet(self, cards: Mapping[int, Card]) -> None:
        """Create the mailboxes, from the cards of all ranks."""
        for other in self.others:
            card = cards[other]
            reads = ReadMarks(card.board, len(self.circle)).row(self.circle.index(self.rank))
            read = self.memory.open_marks(card.read[self.rank])
            written = self.memory.open_marks(card.written[self.rank])
            announce = announcer(self.store, f"{self.board.path}/{other}")
            learn = learner(self.store, f"{card.board}/{self.rank}")
            own = self.board.row(self.circle.index(other))
            self.outboxes[other] = Outbox(self.lanes, self.memory, reads, self.written[other], read, announce)
            self.inboxes[other] = Inbox(other, self.lanes, self.memory, own, written, self.read[other], learn)

    def collect(self) -> None:
        """Free the memory of large messages that were read."""
        for box in self.outboxes.values():
            box.collect()

    def discard(self) -> None:
        """Release all slots without waiting for any rank."""
        self.close.detach()
        for box in (*self.inboxes.values(), *self.outboxes.values()):
            box.close()


def announcer(store: Any, key: str) -> Callable[[int, bytes], None]:
    """A function that leaves a slot's handle for the peer."""
    return lambda slot, handle: store.set(f"{key}/{slot}", handle)


def learner(store: Any, key: str) -> Callable[[int], bytes]:
    """A function that takes the handle of a peer's slot."""

    def learn(slot: int) -> bytes:
        handle: bytes = store.get(f"{key}/{slot}")
        with contextlib.suppress(RuntimeError):  # some stores keep what they were given
            store.delete_key(f"{key}/{slot}")
        return handle

    return learn


def part(outboxes: dict[int, Outbox], inboxes: dict[int, Inbox], memory: SharedMemory) -> None:
    """Leave the mailboxes once the peers have read what was sent, as they could from a socket."""
    memory.drain()
    until = time.monotonic() + PARTING_SECONDS
    while time.monotonic() < until and not all(box.all_read() for box in outboxes.values()):
        time.sleep(0.005)
    for box in (*inboxes.values(), *outboxes.values()):
        box.close()
