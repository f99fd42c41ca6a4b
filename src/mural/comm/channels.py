"""Channels: messages between any two ranks, each sent and received independently of the others.

Unlike an exchange, in which all ranks of a mesh take part, a message here involves only its two ranks. Each direction
between two ranks is a queue without tags: the n-th message sent is the n-th received.
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

    NCCL runs the messages between two ranks of one group one after the other, in whichever direction, so each direction
    has its own group. All models of a run use the same channels: `Channels.of(world)`. Collective.
    """

    def __init__(self, world: Transport):
        if world.group is None:
            raise PeerError("channels need several ranks")
        every = tuple(range(dist.get_world_size()))
        ways = ("to higher ranks", "to lower ranks")
        groups = [group_of(world, every, way, pairwise=True) for way in ways]
        self.transports = [world.sibling(group, way, pairwise=True) for group, way in zip(groups, ways, strict=True)]
        # Messages that wait for their copy are sent first, in whichever direction.
        self.transports[1].unsent = self.transports[0].unsent
        self.rank = dist.get_rank()
        self.leaving: list[Transfer] = []
        self.met: set[tuple[int, int]] = set()

    @classmethod
    def of(cls, world: Transport) -> Channels:
        """The channels of a run. Collective."""
        return kept(world.group, "channels", lambda: cls(world))

    def begin(self) -> None:
        """Begin a step on all ranks: if one rank raises in it, the waits of the others end."""
        for transport in self.transports:
            transport.serial += 1
            if transport.alarm is not None:
                transport.alarm.since = transport.serial

    def meet(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Exchange a first message between pairs of ranks, before any message that could block others. Collective.

        NCCL connects two ranks at their first message, and both wait. With one order for all, no circular wait can
        form. The message is in the memory that later ones are in: one on the host would travel over gloo.
        """
        token, name = self.transports[0].in_common(torch.zeros(1, dtype=torch.uint8)), "a first message"
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
        """The transport for messages in that direction."""
        return self.transports[0 if source < target else 1]

    def send(self, name: str, peer: int, buffer: Tensor) -> None:
        """Begin to send a flat buffer, which must not change until `finish`."""
        transfer = Transfer(self.transport(self.rank, peer), f"stages: {name}", {peer: buffer}, {}, buffer)
        for message in transfer.leaving.values():
            message.begun()  # gloo completes a send only when it is waited for, at the end of the step
        self.leaving.append(transfer)

    def post(self, name: str, peer: int, count: int, like: Tensor) -> Transfer:
        """Begin to receive that many values, with the dtype and device of `like`."""
        return Transfer(self.transport(peer, self.rank), f"stages: {name}", {}, {peer: count}, like)

    def wait(self, posted: Transfer) -> Tensor:
        """The values of a message, once they have arrived."""
        (found,) = posted.wait().values()
        self.collect()  # while this rank waited, others received what it had sent
        return found

    def collect(self) -> None:
        """Release messages that have been sent."""
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
        """Wait until all messages have been sent."""
        while self.leaving:
            self.leaving[0].wait()
            self.leaving.pop(0)

    def raised(self, error: BaseException) -> None:
        """Tell the others that this rank raised in this step, and end their waits for it."""
        for transport in self.transports:
            alarm = transport.alarm
            if alarm is not None and isinstance(error, PeerError) and any(self.heard()):
                alarm.heard = alarm.heard or str(error)  # the others know which rank raised first
            elif alarm is not None:
                alarm.ring(transport.serial, error)

    def heard(self) -> list[str]:
        """What the alarms told this rank: that another rank raised, not that it ended."""
        return [transport.alarm.heard for transport in self.transports if transport.alarm is not None]
