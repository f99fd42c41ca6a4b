"""Ways: how a message travels between each pair of ranks: handed over as it is, staged, or through a mailbox.

A message has a wire: the tensor that torch.distributed sends or receives. Handed over, the wire is the message; staged,
it is a copy in pinned memory; through a mailbox, it is a header of 48 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from mural.comm.backends import Backend
from mural.comm.copy_streams import Lanes, Moment
from mural.comm.host_staging import Arena, Buffer
from mural.comm.shared_gpu.mail import Mail
from mural.comm.shared_gpu.mailbox import Inbox, MessageHeader, Outbox


@dataclass(frozen=True)
class TransferTurn:
    """A transfer's number, the same on every rank, and the moment when the calling stream reached it."""

    transfer: int
    now: Moment


class Outgoing(Protocol):
    """A message to send.

    `prompt` says that the wire may be sent at once; otherwise the CPU has to wait for the GPU, and does so as late as
    it can.
    """

    prompt: ClassVar[bool]

    @property
    def wire(self) -> Tensor:
        """The tensor to send."""
        ...

    def ready(self) -> None:
        """Wait until the wire may be sent, and release what it was copied from."""
        ...

    def begun(self) -> None:
        """Release what is not needed once the wire is being sent."""
        ...

    def sent(self) -> None:
        """Release what the message used; its source may be overwritten from now on."""
        ...


class Incoming(Protocol):
    """A message to receive."""

    @property
    def wire(self) -> Tensor:
        """The tensor to receive into."""
        ...

    def arrived(self, turn: TransferTurn) -> Tensor:
        """The message, once its wire has been received; its memory was free when the transfer began."""
        ...

    def skipped(self, turn: TransferTurn) -> None:
        """Release what the message used, once its wire has been received, when nobody needs it."""
        ...


class Way(Protocol):
    """How messages travel between this rank and one peer."""

    def send(self, buffer: Tensor, turn: TransferTurn) -> Outgoing:
        """A message with the values of a flat buffer, which are ready when the transfer begins."""
        ...

    def receive(self, count: int, like: Tensor) -> Incoming:
        """A message of that many values, with the dtype and device of `like`."""
        ...


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a flat tensor."""
    return tensor.detach().view(torch.uint8)


@dataclass
class Handed:
    """A message that is its own wire."""

    prompt: ClassVar[bool] = True
    wire: Tensor

    def ready(self) -> None:
        pass

    def begun(self) -> None:
        pass

    def sent(self) -> None:
        pass

    def arrived(self, turn: TransferTurn) -> Tensor:
        return self.wire

    def skipped(self, turn: TransferTurn) -> None:
        pass


@dataclass(frozen=True)
class Direct:
    """Messages handed to the backend in memory that it can use: host memory for gloo, any for NCCL's groups."""

    backend: Backend

    def outbound(self, buffer: Tensor) -> Tensor:
        """The buffer in memory that the backend can send from."""
        return buffer.cpu() if buffer.is_cuda and not self.backend.takes_cuda else buffer

    def send(self, buffer: Tensor, turn: TransferTurn) -> Handed:
        return Handed(self.outbound(buffer))

    def receive(self, count: int, like: Tensor) -> Handed:
        if like.is_cuda and not self.backend.takes_cuda:
            return Handed(torch.empty(count, dtype=like.dtype, pin_memory=True))
        return Handed(torch.empty(count, dtype=like.dtype, device=like.device))


@dataclass
class StagedOut:
    """A message sent through pinned memory."""

    prompt: ClassVar[bool] = False
    arena: Arena
    buffer: Buffer
    source: Tensor | None
    size: int
    copied: Moment

    @property
    def wire(self) -> Tensor:
        return self.buffer.memory[: self.size]

    def ready(self) -> None:
        self.arena.lanes.finish(self.copied)
        self.source = None

    def begun(self) -> None:
        pass

    def sent(self) -> None:
        self.arena.give(self.buffer)


@dataclass
class StagedIn:
    """A message that arrives in pinned memory; where it has no target yet, its memory is taken once it is there."""

    arena: Arena
    buffer: Buffer
    count: int
    dtype: torch.dtype
    target: Tensor | None

    @property
    def wire(self) -> Tensor:
        return self.buffer.memory[: self.count * self.dtype.itemsize]

    def arrived(self, turn: TransferTurn) -> Tensor:
        lanes, target, free = self.arena.lanes, self.target, turn.now
        if target is None:
            target = torch.empty(self.count, dtype=self.dtype, device=lanes.device)
            free = lanes.now()
        copied = lanes.copy(bytes_of(target), self.wire, False, (free,))
        lanes.join(copied, target)
        self.arena.give(self.buffer, copied)
        return target

    def skipped(self, turn: TransferTurn) -> None:
        self.arena.give(self.buffer)


@dataclass(frozen=True)
class StagedPath:
    """Messages through pinned memory; the wire is the same as for `Direct`.

    With `late`, memory for a message is taken when it has arrived, not when it is expected: less memory, and its copy
    waits for what was computed until then.
    """

    arena: Arena
    late: bool = False

    def send(self, buffer: Tensor, turn: TransferTurn) -> StagedOut:
        staging = self.arena.take(buffer.nbytes)
        copied = self.arena.lanes.copy(staging.memory[: buffer.nbytes], bytes_of(buffer), True, (turn.now,))
        return StagedOut(self.arena, staging, buffer, buffer.nbytes, copied)

    def receive(self, count: int, like: Tensor) -> StagedIn:
        target = None if self.late else torch.empty(count, dtype=like.dtype, device=self.arena.lanes.device)
        return StagedIn(self.arena, self.arena.take(count * like.element_size()), count, like.dtype, target)


@dataclass
class MailedOut:
    """A message sent through a mailbox; its header is the wire."""

    prompt: ClassVar[bool] = True
    lanes: Lanes
    source: Tensor | None
    wire: Tensor
    copied: Moment

    def ready(self) -> None:
        pass

    def begun(self) -> None:
        """See `Outgoing`. The values are in the slot, or will be before the calling stream continues."""
        if self.source is not None:
            self.lanes.join(self.copied, self.source)
            self.source = None

    def sent(self) -> None:
        self.begun()


@dataclass
class MailedIn:
    """A message received from a peer's mailbox."""

    inbox: Inbox
    wire: Tensor
    target: Tensor

    def arrived(self, turn: TransferTurn) -> Tensor:
        copied = self.inbox.take(self.wire, turn.transfer, bytes_of(self.target), turn.now)
        self.inbox.lanes.join(copied, self.target)
        return self.target

    def skipped(self, turn: TransferTurn) -> None:
        self.inbox.skip(self.wire, turn.transfer, self.target.nbytes)


@dataclass(frozen=True)
class Mailed:
    """Messages through mailboxes."""

    outbox: Outbox
    inbox: Inbox

    def send(self, buffer: Tensor, turn: TransferTurn) -> MailedOut:
        return MailedOut(self.outbox.lanes, buffer, *self.outbox.put(bytes_of(buffer), turn.transfer, turn.now))

    def receive(self, count: int, like: Tensor) -> MailedIn:
        target = torch.empty(count, dtype=like.dtype, device=self.inbox.lanes.device)
        return MailedIn(self.inbox, MessageHeader.wire(), target)


@dataclass(frozen=True)
class Sized:
    """Messages that take one way if they are small, and another if they have at least `limit` bytes."""

    small: Way
    large: Way
    limit: int

    def send(self, buffer: Tensor, turn: TransferTurn) -> Outgoing:
        return (self.large if buffer.nbytes >= self.limit else self.small).send(buffer, turn)

    def receive(self, count: int, like: Tensor) -> Incoming:
        return (self.large if count * like.element_size() >= self.limit else self.small).receive(count, like)


@dataclass(frozen=True)
class Paths:
    """How tensors on one kind of device travel: a way for every peer, the lanes of the copies, and a description."""

    lanes: Lanes
    ways: Mapping[int, Way]
    words: str
    mail: Mail | None = None

    def home(self, buffer: Tensor) -> Tensor:
        """A flat buffer as plain contiguous values on the lanes' device."""
        plain: Any = buffer.to(self.lanes.device).resolve_conj().resolve_neg()
        return plain.contiguous()
