"""Channels: messages between any two ranks, each sent and received when its own time has come.

Unlike an exchange, in which all ranks of a mesh take part, a message here concerns its two ranks alone. Each direction
between two ranks is a queue without tags: its n-th message sent is its n-th received.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from mural.comm.groups import group_of, kept
from mural.comm.messages import Transfer, Transport
from mural.errors import PeerError


class Channels:
    """The queues between this rank and all others of a run.

    NCCL runs the messages between two ranks of one group one after the other, whichever way they go, so each direction
    has a group of its own. All models of a run use the same channels: `Channels.of(world)`. Collective.
    """

    def __init__(self, world: Transport):
        if world.group is None:
            raise PeerError("channels need several ranks")
        every = tuple(range(dist.get_world_size()))
        ways = ("to higher ranks", "to lower ranks")
        self.transports = [world.sibling(group_of(world, every, way), way, pairwise=True) for way in ways]
        # What waits for its copy is sent before anything else, whichever way that goes.
        self.transports[1].unsent = self.transports[0].unsent
        self.rank = dist.get_rank()
        self.leaving: list[Transfer] = []
        self.met: set[tuple[int, int]] = set()

    @classmethod
    def of(cls, world: Transport) -> Channels:
        """The channels of a run. Collective."""
        return kept(world.group, "channels", lambda: cls(world))

    def begin(self) -> None:
        """Begin a step of all ranks: an error that a rank raises in it ends the others' waits in it."""
        for transport in self.transports:
            transport.serial += 1
            if transport.alarm is not None:
                transport.alarm.since = transport.serial

    def meet(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Let pairs of ranks exchange a first message, before any that others wait behind. Collective.

        NCCL connects two ranks when they first meet, and both wait there. In one order for all, nobody waits in a ring.
        """
        token, name = torch.zeros(1, dtype=torch.uint8), "a first message"
        for pair in sorted({(min(two), max(two)) for two in pairs} - self.met):
            self.met.add(pair)
            if self.rank not in pair:
                continue
            low, high = pair
            if self.rank == low:
                self.send(name, high, token)
                greeting = self.post(name, high, 1, token)
            else:
                greeting = self.post(name, low, 1, token)
                self.send(name, low, token)
            self.wait(greeting)

    def transport(self, source: int, target: int) -> Transport:
        """What carries messages of that direction."""
        return self.transports[0 if source < target else 1]

    def send(self, name: str, peer: int, buffer: Tensor) -> None:
        """Begin to send a flat buffer, which has to stay as it is until `finish`."""
        transfer = Transfer(self.transport(self.rank, peer), f"stages: {name}", {peer: buffer}, {}, buffer)
        for message in transfer.leaving.values():
            message.begun()  # gloo says that a message has left only to who waits for it, at the end of the step
        self.leaving.append(transfer)

    def post(self, name: str, peer: int, count: int, like: Tensor) -> Transfer:
        """Begin to receive that many values, of the type and on the device of a tensor."""
        return Transfer(self.transport(peer, self.rank), f"stages: {name}", {}, {peer: count}, like)

    def wait(self, posted: Transfer) -> Tensor:
        """The values of a message, once they are here."""
        (found,) = posted.wait().values()
        self.collect()  # while this rank waited, others took what it had sent
        return found

    def collect(self) -> None:
        """Let go of messages that have left."""
        self.transports[0].flush()
        kept: list[Transfer] = []
        for transfer in self.leaving:
            if all(work.is_completed() for _, work in transfer.works):
                transfer.works.clear()
                transfer.wait()
            else:
                kept.append(transfer)
        self.leaving = kept
        for paths in self.transports[0].paths.values():
            if paths.mail is not None:
                paths.mail.collect()

    def finish(self) -> None:
        """Wait until all messages have left."""
        while self.leaving:
            self.leaving[0].wait()
            self.leaving.pop(0)

    def raised(self, error: BaseException) -> None:
        """Tell the others that this rank raised in this step; end the waits of those that wait for it."""
        for transport in self.transports:
            alarm = transport.alarm
            if alarm is not None and isinstance(error, PeerError) and any(self.heard()):
                alarm.heard = alarm.heard or str(error)  # the others have heard of the rank that raised first
            elif alarm is not None:
                alarm.ring(transport.serial, error)

    def heard(self) -> list[str]:
        """What the alarms have told this rank: that another one raised, not that it ended."""
        return [transport.alarm.heard for transport in self.transports if transport.alarm is not None]
