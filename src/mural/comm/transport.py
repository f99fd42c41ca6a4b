"""The transport: messages between ranks, counted, traced, and ended by an error when a peer fails."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from mural.comm.alarm import Alarm
from mural.errors import PeerError


@dataclass
class Record:
    """What travelled while a `record()` block ran, seen from this rank."""

    messages: int = 0
    bytes: int = 0
    events: list[tuple[str, float, float]] = field(default_factory=list[tuple[str, float, float]])

    def spans(self, kind: str) -> list[tuple[float, float]]:
        """Start and end of every event of one kind: "transfer" (posted until arrived) or "interior"."""
        return [(start, end) for name, start, end in self.events if name == kind]


class Transfer:
    """Messages under way: one buffer to and from each peer."""

    def __init__(
        self,
        transport: Transport,
        name: str,
        sends: Mapping[int, torch.Tensor],
        sizes: Mapping[int, int],
        like: torch.Tensor,
    ):
        if transport.alarm is not None and transport.alarm.heard:
            raise PeerError(f"{name}: the ranks no longer agree, since {transport.alarm.heard}")
        self.transport, self.name, self.posted = transport, name, time.perf_counter()
        self.serial = transport.next_serial()
        self.device = like.device
        self.outgoing = {peer: transport.outbound(buffer) for peer, buffer in sends.items()}
        self.incoming = {peer: transport.inbound(count, like) for peer, count in sizes.items()}
        self.works: list[tuple[int, Any]] = transport.post(self.outgoing, self.incoming)

    def __enter__(self) -> Transfer:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Let the messages end before their buffers go, where the work beside them raised."""
        if kind is not None:
            with contextlib.suppress(PeerError):
                self.transport.wait(self)

    def wait(self) -> dict[int, torch.Tensor]:
        """The buffers that arrived, by peer."""
        self.transport.wait(self)
        arrived = {peer: buffer.to(self.device, non_blocking=True) for peer, buffer in self.incoming.items()}
        for record in self.transport.records:
            record.events.append(("transfer", self.posted, time.perf_counter()))
            record.messages += len(self.outgoing)
            record.bytes += sum(b.numel() * b.element_size() for b in self.outgoing.values())
        return arrived


class Transport:
    """Point-to-point messages over one torch.distributed group (None: a world of one process)."""

    def __init__(self, group: dist.ProcessGroup | None, timeout: float):
        self.group, self.timeout = group, timeout
        self.records: list[Record] = []
        self.serial = 0
        self.memory: Any = None
        """What the operations on the mesh learned of the program, for later runs of it."""
        self.staged = group is not None and dist.get_backend(group) == "gloo"
        self.on_device = group is not None and dist.get_backend(group) == "nccl"
        self.alarm = Alarm(group) if group is not None else None

    def describe(self) -> str:
        """How messages travel, in words."""
        if self.group is None:
            return "no messages"
        how = ", GPU tensors staged through pinned memory" if self.staged and torch.cuda.is_available() else ""
        return f"messages over {dist.get_backend(self.group)}{how}"

    def next_serial(self) -> int:
        """The number of this transfer; the same on every rank, as all run the same operations."""
        self.serial += 1
        return self.serial

    def outbound(self, buffer: torch.Tensor) -> torch.Tensor:
        """The buffer in memory that the backend can send from."""
        if self.staged and buffer.is_cuda:
            return buffer.cpu()
        return buffer.cuda() if self.on_device else buffer

    def inbound(self, count: int, like: torch.Tensor) -> torch.Tensor:
        """An empty buffer that the backend can receive into."""
        if self.staged and like.is_cuda:
            return torch.empty(count, dtype=like.dtype, pin_memory=True)
        return torch.empty(count, dtype=like.dtype, device="cuda" if self.on_device else like.device)

    def post(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> list[tuple[int, Any]]:
        """Start all messages; the order per pair is the order of transfers, so no tags are needed."""
        operations = [dist.P2POp(dist.irecv, b, peer, self.group) for peer, b in incoming.items() if b.numel()]
        operations += [dist.P2POp(dist.isend, b, peer, self.group) for peer, b in outgoing.items() if b.numel()]
        if not operations:
            return []
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise PeerError(
                f"a message could not be posted: {error}. A peer has probably ended; see its log"
            ) from error
        peers = [op.peer for op in operations] if len(works) == len(operations) else [-1] * len(works)
        return list(zip(peers, works, strict=True))

    def wait(self, transfer: Transfer) -> None:
        """Wait for every message, or raise what kept a peer from sending it."""
        if self.alarm is None or not transfer.works:
            return
        with self.alarm.watching(transfer):
            while transfer.works:
                peer, work = transfer.works[0]
                try:
                    work.wait()
                except RuntimeError as error:
                    reason = self.alarm.heard or str(error).split("\n")[0]
                    raise PeerError(f"waiting for rank {peer} in {transfer.name}: {reason}") from error
                if self.alarm.heard:
                    raise PeerError(f"waiting for rank {peer} in {transfer.name}: {self.alarm.heard}")
                transfer.works.pop(0)

    def raised(self, error: BaseException) -> None:
        """Tell the peers that this rank raised after its last transfer."""
        if self.alarm is not None and not isinstance(error, PeerError):
            self.alarm.ring(self.serial, error)

    @contextlib.contextmanager
    def record(self) -> Generator[Record]:
        """Count messages and bytes sent by this rank, and keep times, inside the block."""
        record = Record()
        self.records.append(record)
        try:
            yield record
        finally:
            self.records.remove(record)

    @contextlib.contextmanager
    def span(self, kind: str) -> Generator[None]:
        """Mark a stretch of work in the records."""
        start = time.perf_counter()
        yield
        for record in self.records:
            record.events.append((kind, start, time.perf_counter()))
