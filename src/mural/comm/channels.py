"""Channels: messages between any two ranks, each sent and received when its own time has come.

Unlike a `Transfer`, in which all ranks of a mesh take part, a message here concerns its two ranks alone. Each direction
between two ranks is a queue without tags: its n-th message sent is its n-th received.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mural.comm.device_paths import Incoming, Outgoing, Turn
from mural.comm.messages import Transport
from mural.comm.presence import reason
from mural.comm.rooms import group_of, room
from mural.errors import PeerError


@dataclass
class Awaited:
    """A message that is on its way here; as a wait it is what the alarm looks at."""

    name: str
    peer: int
    message: Incoming
    turn: Turn
    works: list[Any]
    serial: int
    incoming: dict[int, Tensor]
    outgoing: dict[int, Tensor] = field(default_factory=dict[int, Tensor])


@dataclass
class Departing:
    """A message that has not left yet, as the alarm looks at it."""

    serial: int
    outgoing: dict[int, Tensor]
    incoming: dict[int, Tensor] = field(default_factory=dict[int, Tensor])


class Channels:
    """The queues between this rank and all others of a run.

    NCCL runs the messages of a batch behind all others of their group, so each message is posted by itself: then they
    wait for those between the same two ranks alone. That holds for both directions, so each has a group of its own. All
    models of a run use the same channels: `Channels.of(world)`. Collective.
    """

    def __init__(self, world: Transport):
        if world.group is None:
            raise PeerError("channels need several ranks")
        every = tuple(range(dist.get_world_size()))
        groups = [group_of(world, every, purpose) for purpose in ("to higher ranks", "to lower ranks")]
        self.transports = [Transport(group, world.timeout) for group in groups]
        for transport in self.transports:
            transport.paths = world.paths
            transport.records, transport.traces = world.records, world.traces
        self.rank = dist.get_rank()
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()
        self.leaving: list[tuple[int, Outgoing, list[Any]]] = []
        self.unsent: list[tuple[int, Outgoing, list[Any]]] = []
        self.epoch = 0
        self.met: set[tuple[int, int]] = set()

    @classmethod
    def of(cls, world: Transport) -> Channels:
        """The channels of a run. Collective."""
        return room(world, "channels", lambda: cls(world))

    def begin(self) -> None:
        """Begin a step of all ranks: an error that a rank raises in it ends the others' waits in it."""
        self.epoch += 1
        for transport in self.transports:
            if transport.alarm is not None:
                transport.alarm.since = self.epoch

    def meet(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Let pairs of ranks exchange a first message, before any that others wait behind. Collective.

        NCCL connects two ranks when they first meet, and both wait there. In one order for all, nobody waits in a ring.
        """
        token = torch.zeros(1, dtype=torch.uint8)
        for pair in sorted({(min(two), max(two)) for two in pairs} - self.met):
            self.met.add(pair)
            if self.rank not in pair:
                continue
            low, high = pair
            if self.rank == low:
                self.send(high, token)
                greeting = self.post("a first message", high, 1, token)
            else:
                greeting = self.post("a first message", low, 1, token)
                self.send(low, token)
            self.wait(greeting)

    def transport(self, source: int, target: int) -> Transport:
        """What carries messages of that direction."""
        return self.transports[0 if source < target else 1]

    def send(self, peer: int, buffer: Tensor) -> None:
        """Begin to send a flat buffer, which has to stay as it is until `finish`."""
        transport = self.transport(self.rank, peer)
        self._flush()
        self.sent[peer] += 1
        paths = transport.paths.get(buffer.device.type)
        home = paths.home(buffer) if paths is not None else buffer
        turn = Turn(self.sent[peer], paths.lanes.now() if paths is not None else None)
        message = transport.way(peer, home, home.numel()).send(home, turn)
        item = (peer, message, list[Any]())
        for record in transport.records:
            record.messages += 1
            record.bytes += buffer.numel() * buffer.element_size()
        for trace in transport.traces:
            trace.posts["channel", self.rank, peer, self.sent[peer]] = perf_counter()
        if message.prompt:
            self._start(item)
        else:
            self.unsent.append(item)

    def post(self, name: str, peer: int, count: int, like: Tensor) -> Awaited:
        """Begin to receive that many values, of the type and on the device of a tensor."""
        transport = self.transport(peer, self.rank)
        self._flush()
        self.received[peer] += 1
        message = transport.way(peer, like, count).receive(count, like)
        paths = transport.paths.get(like.device.type)
        turn = Turn(self.received[peer], paths.lanes.now() if paths is not None else None)
        works = begun(dist.irecv, message.wire, peer, transport)
        return Awaited(name, peer, message, turn, works, self.epoch + 1, {peer: message.wire})

    def wait(self, awaited: Awaited) -> Tensor:
        """The values of a message, once they are here."""
        self._flush()
        transport = self.transport(awaited.peer, self.rank)
        alarm = transport.alarm
        if alarm is None:
            raise PeerError("channels need several ranks")
        sent = (awaited.peer, ("channel", awaited.peer, self.rank, awaited.turn.transfer))
        works = list(awaited.works)
        with alarm.watching(awaited), transport.blocked("stages", (sent,)):
            while awaited.works:
                try:
                    awaited.works[0].wait()
                except RuntimeError as error:
                    why = alarm.heard or f"{reason(error)}. It or another rank has ended: see the logs"
                    raise PeerError(f"waiting for rank {awaited.peer} in {awaited.name}: {why}") from error
                if alarm.heard:
                    raise PeerError(f"waiting for rank {awaited.peer} in {awaited.name}: {alarm.heard}")
                awaited.works.pop(0)
        if transport.waits_on_stream(awaited.message.wire.device):
            alarm.follow(awaited.serial, awaited.name, works)
        found = awaited.message.arrived(awaited.turn)
        self.collect()  # while this rank waited, others took what it had sent
        return found

    def collect(self) -> None:
        """Let go of messages that have left."""
        self._flush()
        kept: list[tuple[int, Outgoing, list[Any]]] = []
        for item in self.leaving:
            if all(work.is_completed() for work in item[2]):
                item[1].sent()
            else:
                kept.append(item)
        self.leaving = kept
        for paths in self.transports[0].paths.values():
            if paths.mail is not None:
                paths.mail.collect()

    def finish(self) -> None:
        """Wait until all messages have left."""
        self._flush()
        while self.leaving:
            peer, message, works = self.leaving[0]
            alarm = self.transport(self.rank, peer).alarm
            if alarm is None:
                raise PeerError("channels need several ranks")
            with alarm.watching(Departing(self.epoch + 1, {peer: message.wire})):
                for work in works:
                    try:
                        work.wait()
                    except RuntimeError as error:
                        raise PeerError(
                            f"sending to rank {peer}: {alarm.heard or str(error).splitlines()[0]}"
                        ) from error
            if alarm.heard:
                raise PeerError(f"sending to rank {peer}: {alarm.heard}")
            message.sent()
            self.leaving.pop(0)

    def raised(self, error: BaseException) -> None:
        """Tell the others that this rank raised in this step; end the waits of those that wait for it."""
        for transport in self.transports:
            alarm = transport.alarm
            if alarm is not None and isinstance(error, PeerError) and any(self.heard()):
                alarm.heard = alarm.heard or str(error)  # the others have heard of the rank that raised first
            elif alarm is not None:
                alarm.ring(self.epoch, error)

    def heard(self) -> list[str]:
        """What the alarms have told this rank: that another one raised, not that it ended."""
        return [transport.alarm.heard for transport in self.transports if transport.alarm is not None]

    def _flush(self) -> None:
        """Send what was left until its copy in host memory is complete."""
        while self.unsent:
            item = self.unsent.pop(0)
            item[1].ready()
            self._start(item)

    def _start(self, item: tuple[int, Outgoing, list[Any]]) -> None:
        peer, message, works = item
        transport = self.transport(self.rank, peer)
        works += begun(dist.isend, message.wire, peer, transport)
        message.begun()  # gloo says that a message has left only to who waits for it, at the end of the step
        self.leaving.append(item)


def begun(call: Callable[..., Any], wire: Tensor, peer: int, transport: Transport) -> list[Any]:
    """What to wait for of a message that starts now; nothing does not travel."""
    if not wire.numel():
        return []
    try:
        return [call(wire, peer, group=transport.group)]
    except RuntimeError as error:
        raise PeerError(
            f"no message to or from rank {peer} can be posted: {reason(error)}. It or another has ended: see the logs"
        ) from error
