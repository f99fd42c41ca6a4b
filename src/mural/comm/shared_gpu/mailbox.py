"""Mailboxes: messages in memory that two processes share, in slots that are free again once the peer has read them.

    sender                                                receiver
    find a free slot, or make one
    lane: wait for its last reader's mark
          copy the message into it, mark it written
    header ───────────── gloo, 48 bytes ────────────────▶ lane: wait for the writer's mark
    (transfer, message, place, slot, bytes, …)                  copy the message out, mark it read
    the slot is free ◀────── board, shared numbers ─────── board[place] = message

No rank waits for a free slot: one that sends many messages before its peer reads any makes as many slots. Lanes keep
their order, so a mark that has been set again since stands for more work than asked, never for less; and all work that
a mark waits for was queued before it, on either rank, so waits never form a cycle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mural.comm.copy_streams import Lanes, Moment
from mural.errors import PeerError

PLACES = 4096
"""How many messages to one peer may be unread at a time."""
MARKS = 4
"""Marks in each direction, used in turn: a message's mark is its number modulo this."""
SMALLEST, LARGEST = 2**16, 2**26
"""Bytes of the smallest slot, and of the largest that is kept for later messages."""


class SharedMemory(Protocol):
    """Memory and marks that other processes can open."""

    def allocate(self, size: int) -> Tensor:
        """That many new bytes."""
        ...

    def share(self, slot: Tensor) -> bytes:
        """The handle with which another process opens allocated bytes."""
        ...

    def open(self, handle: bytes, brief: bool) -> Tensor:
        """Another process's bytes; `brief` says that they are closed after one message."""
        ...

    def close(self, opened: dict[int, Tensor], numbers: Sequence[int]) -> None:
        """Let go of opened bytes."""
        ...

    def marks(self, count: int) -> list[Any]:
        """New marks."""
        ...

    def share_marks(self, marks: Sequence[Any]) -> list[bytes]:
        """The handles of marks."""
        ...

    def open_marks(self, handles: Sequence[bytes]) -> list[Any]:
        """Another process's marks."""
        ...

    def drain(self) -> None:
        """Wait for all copies."""
        ...


class MessageHeader(NamedTuple):
    """The header of a message: transfer, number, place on the board, slot, size, and a slot given up (or 0)."""

    transfer: int
    message: int
    place: int
    slot: int
    size: int
    given_up: int

    @staticmethod
    def wire() -> Tensor:
        """A tensor to receive a header into; zeros are not a header, since transfers and messages count from 1."""
        return torch.zeros(len(MessageHeader._fields), dtype=torch.int64, device="cpu")


@dataclass(eq=False)
class Slot:
    """Room for one message at a time."""

    number: int
    place: int
    memory: Tensor
    message: int = 0


@dataclass
class Outbox:
    """Messages to one peer."""

    lanes: Lanes
    memory: SharedMemory
    reads: memoryview
    written: Sequence[Any]
    read: Sequence[Any]
    announce: Callable[[int, bytes], None]
    slots: list[Slot] = field(default_factory=list[Slot])
    given_up: list[tuple[Slot, int, int]] = field(default_factory=list[tuple[Slot, int, int]])
    places: list[int] = field(default_factory=lambda: list(reversed(range(PLACES))))
    messages: int = 0
    made: int = 0

    def put(self, data: Tensor, transfer: int, after: Moment) -> tuple[Tensor, Moment]:
        """The header of a transfer's message, and the moment from which its bytes may be overwritten."""
        self.collect()
        slot, loser = self._slot(data.nbytes)
        freed = [self.read[slot.message % MARKS]] if slot.message else []
        self.messages += 1
        slot.message = self.messages
        if loser is not None:
            self.slots.remove(loser)
            self.given_up.append((loser, slot.place, slot.message))
        mark = self.written[slot.message % MARKS]
        done = self.lanes.copy(slot.memory[: data.nbytes], data, True, (after, *freed), mark)
        header = MessageHeader(
            transfer, slot.message, slot.place, slot.number, data.nbytes, loser.number if loser else 0
        )
        return torch.tensor(header, dtype=torch.int64, device="cpu"), done

    def all_read(self) -> bool:
        """Whether the peer has read all messages."""
        unread = any(self.reads[slot.place] < slot.message for slot in self.slots)
        return not unread and all(self.reads[place] >= message for _, place, message in self.given_up)

    def close(self) -> None:
        """Let go of all slots."""
        self.slots.clear()
        self.given_up.clear()

    def _slot(self, size: int) -> tuple[Slot, Slot | None]:
        """A slot for that many bytes, and a slot to give up with the message: a smaller one, or a huge one itself."""
        free = [slot for slot in self.slots if self.reads[slot.place] >= slot.message]
        fitting = [slot for slot in free if slot.memory.nbytes >= size]
        if fitting:
            return min(fitting, key=lambda slot: slot.memory.nbytes), None
        if size > LARGEST:
            slot = self._made(size, None)
            return slot, slot
        smaller = max(free, key=lambda slot: slot.memory.nbytes, default=None)
        return self._made(min(LARGEST, max(SMALLEST, size + size // 4)), smaller), smaller

    def _made(self, size: int, instead: Slot | None) -> Slot:
        """A new slot that the peer can find, in the place of another one or in a new place."""
        if instead is None and not self.places:
            raise PeerError(f"{PLACES} messages to one rank are unread: let it receive before sending more")
        memory = self.memory.allocate(size)
        handle = self.memory.share(memory)
        self.made += 1
        self.announce(self.made, handle)
        slot = Slot(self.made, self.places.pop() if instead is None else instead.place, memory)
        self.slots.append(slot)
        return slot

    def collect(self) -> None:
        """Free the slots that the peer has closed."""
        waiting: list[tuple[Slot, int, int]] = []
        for slot, place, message in self.given_up:
            if self.reads[place] < message:
                waiting.append((slot, place, message))
            elif slot.message == message:  # it went with its own message, and no other took its place
                self.places.append(place)
        self.given_up = waiting


@dataclass
class Inbox:
    """Messages from one peer."""

    rank: int
    lanes: Lanes
    memory: SharedMemory
    reads: memoryview
    written: Sequence[Any]
    read: Sequence[Any]
    learn: Callable[[int], bytes]
    opened: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def take(self, wire: Tensor, transfer: int, into: Tensor, after: Moment) -> Moment:
        """The moment when the bytes of that transfer's message have been copied."""
        header = self._checked(wire, transfer, into.nbytes)
        if header.slot not in self.opened:
            brief = header.given_up == header.slot
            self.opened[header.slot] = self.memory.open(self.learn(header.slot), brief)
        mark = header.message % MARKS
        source = self.opened[header.slot][: header.size]
        done = self.lanes.copy(into, source, False, (after, self.written[mark]), self.read[mark])
        del source
        self._answer(header, done)
        return done

    def skip(self, wire: Tensor, transfer: int, size: int) -> None:
        """Count an unwanted message as read."""
        self._answer(self._checked(wire, transfer, size), None)

    def close(self) -> None:
        """Let go of all slots."""
        self.memory.close(self.opened, list(self.opened))

    def _checked(self, wire: Tensor, transfer: int, size: int) -> MessageHeader:
        header = MessageHeader(*wire.tolist())
        if (header.transfer, header.size) != (transfer, size) or header.message < 1:
            raise PeerError(
                f"the message from rank {self.rank} in transfer {transfer} ({size} bytes) came with {header}: "
                "the ranks no longer run the same operations"
            )
        return header

    def _answer(self, header: MessageHeader, done: Moment) -> None:
        """Close the slot that was given up, then say that the message was read."""
        if header.given_up in self.opened:
            if done is not None:
                self.lanes.finish(done)
            self.memory.close(self.opened, [header.given_up])
        self.reads[header.place] = header.message
