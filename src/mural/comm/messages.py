"""Messages between ranks: posted, sent when due, awaited, counted, traced, and ended by an error when a peer fails.

A `Transfer` is what one rank sends and receives at a time. Messages have no tags (NCCL ignores them): over one group,
the n-th message from one rank to another is the n-th that the other receives. So all ranks begin their transfers in the
same order, or, over a pairwise transport, every two ranks begin theirs with each other in the same order.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mural.comm.backends import backend_of
from mural.comm.device_paths import Direct, Outgoing, Paths, TransferTurn, Way
from mural.comm.failure import connections
from mural.comm.failure.alarm import Alarm, Awaited
from mural.comm.failure.connections import reason
from mural.comm.trace import Flight, Observed, Post
from mural.errors import OutOfTime, PeerError


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
        if transport.alarm is not None and (heard := transport.alarm.heard or connections.aborted()):
            raise PeerError(
                f"{name}: the ranks no longer agree, since {heard}. Create the mesh and the model again (mural.init, "
                f"mural.parallelize) on all ranks, or start the run again"
            )
        self.peers = tuple({*sends, *sizes})
        if any(peer < 0 for peer in self.peers):
            raise OutOfTime(f"{name} needs images of another micro-batch")
        self.transport, self.name, self.posted = transport, name, time.perf_counter()
        self.device = like.device
        self.bytes = {peer: buffer.nbytes for peer, buffer in sends.items()}
        paths = transport.paths.get(like.device.type)
        if paths is not None:
            sends = {peer: paths.home(buffer) for peer, buffer in sends.items()}
        self.awaited = {peer: transport.way(peer, like, n).receive(n, like) for peer, n in sizes.items()}
        # Messages are copied concurrently with the calling stream, from what it has computed and to what it has freed
        # by now.
        self.turn = TransferTurn(transport.upcoming(self.peers), paths.lanes.now() if paths is not None else None)
        self.leaving = {peer: transport.way(peer, like, b.numel()).send(b, self.turn) for peer, b in sends.items()}
        self.outgoing = {peer: message.wire for peer, message in self.leaving.items()}
        self.incoming = {peer: message.wire for peer, message in self.awaited.items()}
        self.works: list[tuple[int, Any]] = []
        # From here on the transfer counts as begun: a rank that raises before tells its peers not to wait for it.
        self.serial = transport.count(self.peers)
        transport.post(self)

    def __enter__(self) -> Transfer:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Let the messages end before their buffers are freed, if the work between raised."""
        if kind is not None:
            with contextlib.suppress(PeerError):
                self.transport.wait(self)
                for incoming in self.awaited.values():
                    incoming.skipped(self.turn)
                self._release()

    def wait(self) -> dict[int, torch.Tensor]:
        """The buffers that arrived, by peer."""
        self.transport.wait(self)
        found = {peer: message.arrived(self.turn) for peer, message in self.awaited.items()}
        # A copy to the host has to be complete when it is read, one to a GPU when its stream reaches it.
        later = self.device.type != "cpu"
        arrived = {peer: buffer.to(self.device, non_blocking=later) for peer, buffer in found.items()}
        self._release()
        if not self.transport.pairwise:  # otherwise nobody checks when a message has been sent
            for record in self.transport.records:
                record.events.append(("transfer", self.posted, time.perf_counter()))
            for trace in self.transport.traces:
                trace.flights.append(Flight(self.kind, self.posted, time.perf_counter(), sum(self.bytes.values())))
        return arrived

    @property
    def kind(self) -> str:
        """The operation that it belongs to, forward or backward."""
        return self.name.removesuffix(" backward").partition(":")[0]

    @property
    def part(self) -> Post:
        """The name of a rank's part in it, the same on all ranks involved."""
        pair = sorted((dist.get_rank(), *self.peers)) if self.transport.pairwise else ()
        return (self.transport.name, *pair, self.turn.transfer)

    def _release(self) -> None:
        for outgoing in self.leaving.values():
            outgoing.sent()


class Transport(Observed):
    """Point-to-point messages over one torch.distributed group (None: a world of one process).

    `paths` says how tensors on a kind of device travel; others are handed to the backend. All ranks take part in all
    transfers, in the same order; with `pairwise`, each transfer is one message, which involves only its two ranks and
    is posted by itself: NCCL makes a batch wait for all earlier work of its group.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: float, pairwise: bool = False):
        super().__init__()
        self.group, self.timeout, self.pairwise, self.name = group, timeout, pairwise, ""
        self.serial = 0
        """How many transfers this rank began; over a pairwise transport, how many steps."""
        self.passed: Counter[int] = Counter()
        """How many messages a pairwise transport began with each peer."""
        self.memory: Any = None
        """What the operations on the mesh learned about the program, for later runs of it."""
        self.direct = Direct(backend_of(group))
        self.paths: dict[str, Paths] = {}
        self.unsent: list[tuple[Transfer, int, Outgoing]] = []
        self.alarm = Alarm(group) if group is not None else None

    def fork(self, name: str) -> Transport:
        """The same messages, for some of the ranks, which count their transfers separately.

        Ranks that share two forks use them in the same order, since messages have no tags.
        """
        other = Transport.__new__(Transport)
        vars(other).update(vars(self), name=name, serial=0, unsent=[], memory=None)
        other.alarm = Alarm(self.group, f"/{name}") if self.group is not None else None
        return other

    def sibling(self, group: dist.ProcessGroup | None, name: str, pairwise: bool = False) -> Transport:
        """Messages over another group, which travel the same way and are counted and traced together with these."""
        other = Transport(group, self.timeout, pairwise)
        other.name, other.paths, other.direct = name, self.paths, self.direct
        other.records, other.traces = self.records, self.traces
        return other

    def describe(self) -> str:
        """How messages travel, as text."""
        if self.group is None:
            return "no messages"
        return ", ".join([f"messages over {self.direct.backend}", *(paths.words for paths in self.paths.values())])

    def upcoming(self, peers: tuple[int, ...]) -> int:
        """The number of the next transfer with those peers; the same on all, as all run the same operations."""
        return 1 + (max(self.passed[peer] for peer in peers) if self.pairwise else self.serial)

    def count(self, peers: tuple[int, ...] = ()) -> int:
        """The number of the next transfer, now counted as begun; the alarms of its ranks know it by this number."""
        if self.pairwise:
            self.passed.update(peers)
            return self.serial + 1
        self.serial += 1
        return self.serial

    def outbound(self, buffer: torch.Tensor) -> torch.Tensor:
        """The buffer in memory that the backend can send from."""
        return self.direct.outbound(buffer)

    def in_common(self, buffer: torch.Tensor) -> torch.Tensor:
        """The buffer in memory of the same kind on all ranks: GPU memory over NCCL."""
        return buffer.cuda() if self.direct.backend.on_stream else self.outbound(buffer)

    def way(self, peer: int, like: torch.Tensor, count: int) -> Way:
        """How that many values travel to or from a peer; zero values do not travel at all."""
        paths = self.paths.get(like.device.type)
        return self.direct if paths is None or not count else paths.ways.get(peer, self.direct)

    def post(self, transfer: Transfer) -> None:
        """Start all messages of a transfer."""
        self.flush()
        if self.traces and self.waits_on_stream(transfer.device):
            torch.cuda.current_stream().synchronize()  # what was computed before is not part of the wait
        self.note(transfer.name, transfer.part, transfer.posted, list(transfer.bytes.values()))
        operations = [
            dist.P2POp(dist.irecv, wire, peer, self.group) for peer, wire in transfer.incoming.items() if wire.numel()
        ]
        for peer, wire in transfer.outgoing.items():
            if not wire.numel():
                continue
            if transfer.leaving[peer].prompt:
                operations.append(dist.P2POp(dist.isend, wire, peer, self.group))
            else:
                self.unsent.append((transfer, peer, transfer.leaving[peer]))
        transfer.works += self.begin(operations)

    def flush(self) -> None:
        """Send the messages that waited for their copy in host memory, in the order of transfers."""
        while self.unsent:
            transfer, peer, message = self.unsent.pop(0)
            message.ready()
            carrier = transfer.transport
            transfer.works += carrier.begin([dist.P2POp(dist.isend, transfer.outgoing[peer], peer, carrier.group)])

    def begin(self, operations: list[dist.P2POp]) -> list[tuple[int, Any]]:
        """Start the messages, and return what to wait for, by peer."""
        if not operations:
            return []
        peers = [op.peer for op in operations]
        try:
            if self.pairwise:
                works = [op.op(op.tensor, op.peer, op.group) for op in operations]
            else:
                works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise PeerError(
                f"no message to or from rank {', '.join(map(str, peers))} can be posted: {reason(error)}. "
                f"It or another rank has ended: see the logs"
            ) from error
        return list(zip(peers if len(works) == len(peers) else [-1] * len(works), works, strict=True))

    def wait(self, transfer: Transfer) -> None:
        """Wait for every message, or raise what kept a peer from its part."""
        self.flush()
        if self.alarm is None or not transfer.works:
            return
        needs = [(peer, transfer.part) for peer in transfer.peers] if self.traces else ()
        works = [work for _, work in transfer.works]
        with self.alarm.watching(transfer), self.blocked(transfer.kind, needs):
            self.alarm.complete(transfer.works, transfer.name)
            if self.traces:
                self.await_gpu(transfer.name)
        if self.waits_on_stream(transfer.device):
            self.alarm.follow(transfer.serial, transfer.name, works)

    def wait_for(
        self,
        work: Any,
        name: str,
        needs: Sequence[tuple[int, Post]] = (),
        kind: str = "gradients",
        on_host: bool = False,
    ) -> None:
        """Wait for a collective, or raise what kept a peer from joining it; `needs` is its `appointment`.

        Over NCCL this waits for the GPU, unless the tensors are `on_host`: gloo carries those.
        """
        backend = self.direct.backend
        with self.blocked(kind, needs):
            if self.alarm is not None and backend.host_by_gloo and (on_host or not backend.on_stream):
                self.alarm.join(work, self.serial + 1, name)
            else:
                work.wait()
                self.await_gpu(name)

    def waits_on_stream(self, device: torch.device) -> bool:
        """Whether waiting for messages of a device blocks its stream and not this process, as with NCCL."""
        return self.direct.backend.on_stream and device.type == "cuda"

    def await_gpu(self, name: str) -> None:
        """Wait until the GPU has all messages of the calling stream, or raise what kept a peer from sending one.

        An optimizer must not step on what a GPU computes after a group was aborted.
        """
        with self.attentive(name):
            pass

    @contextlib.contextmanager
    def attentive(self, name: str) -> Generator[None]:
        """A block in which the GPU may wait for others; it ends once the GPU no longer waits, or with an error."""
        if self.alarm is None or not self.direct.backend.on_stream:
            yield
            return
        with self.alarm.watching(Awaited(self.serial + 1, name)):
            yield
            connections.await_gpu(name)

    def raised(self, error: BaseException) -> None:
        """Tell the peers that this rank raised after its last transfer."""
        if isinstance(error, PeerError):
            connections.abort_all(str(error))  # the GPU may wait for what will not come, and this process for the GPU
        # What this rank heard from a peer, the others hear too; only ranks that wait for a peer see that it ended.
        if self.alarm is not None and not (isinstance(error, PeerError) and self.alarm.heard):
            with contextlib.suppress(RuntimeError):  # the peers still receive what was posted before
                self.flush()
            self.alarm.ring(self.serial, error)

    @contextlib.contextmanager
    def meeting(self, kind: str, group: dist.ProcessGroup | None = None) -> Generator[None]:
        """A block that runs a collective of a group, by default the transport's own, and waits for its end."""
        group = group or self.group
        needs = self.appointment(kind, group) if self.traces and group is not None else ()
        with self.blocked(kind, needs):
            try:
                with self.attentive(kind):
                    yield
            except PeerError:
                raise
            except RuntimeError as error:
                raise PeerError(f"{kind}: {reason(error)}. A peer has ended: see its log") from error
