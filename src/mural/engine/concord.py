"""Concord: a step that fails on one rank ends on all, with the error there and a `PeerError` elsewhere.

    rank 0   prepare ── run ── (waits for rank 1's message) ─ PeerError ──┐
    rank 1   prepare ── run ✗ rings every alarm that a rank may wait by ──┤ agree: all raise
    rank 2   prepare ── run, to its end ──────────────────────────────────┘

Without the agreement rank 2 would go on to add up gradients, and wait there for ranks that do not come.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from mural.comm import groups
from mural.comm.channels import Channels
from mural.comm.failure.agree import Met, share_failure
from mural.comm.failure.connections import ended, hang_up
from mural.comm.failure.shared_fate import ANEW
from mural.comm.rooms import leave, room
from mural.errors import PeerError
from mural.gradients.waiting import wait_for
from mural.ranks import Mesh


class Concord:
    """The steps of one model on the ranks of a run: `seat` is the mesh of this rank's stages."""

    def __init__(self, world: Mesh, seat: Mesh, channels: Channels | None):
        self.world, self.seat, self.channels = world, seat, channels
        # An alarm of its own: what ranks heard in a step does not keep them from agreeing behind it.
        self.ends = room(world.transport, "ends of steps", lambda: world.transport.fork("ends of steps"))
        self.broken = ""
        """What ended a step in which messages were under way; none can follow it."""
        self.running = False

    @contextmanager
    def step(self) -> Generator[None]:
        """A block in which ranks may wait for each other, and which they leave alike. Collective."""
        if self.broken:
            again = ANEW if self.seat == self.world else "make the model parallel anew"
            raise PeerError(f"an earlier step failed ({self.broken}): {again}")
        self.running = False
        if self.channels is not None:
            self.channels.begin()
        failure: Exception | None = None
        try:
            yield
        except BaseException as error:
            self._ring(error)
            if not isinstance(error, Exception):
                raise
            failure = error
        self._agree(failure)

    def begin(self) -> None:
        """Note that messages are sent from here on."""
        self.running = True

    def _ring(self, error: BaseException) -> None:
        """End the waits of others for this rank, between stages and within its own."""
        transport, channels = self.seat.transport, [] if self.channels is None else self.channels.transports
        heard = [t.alarm.heard for t in (transport, *channels) if t.alarm is not None]
        if ended(error, *heard):
            for group in (self.world.transport.group, transport.group, *(t.group for t in channels)):
                hang_up(group)
        if self.channels is not None:
            self.channels.raised(error)
        if transport.alarm is not None:
            with suppress(RuntimeError):  # the others wait for what was posted before, and get it
                transport.flush()
            transport.alarm.ring(transport.serial, error)

    def _agree(self, failure: Exception | None) -> None:
        """Raise on all ranks where one failed."""
        if self.world.world == 1:
            if failure is not None:
                raise failure
            return
        try:
            failed, began = self._counted(failure is not None, failure is not None and self.running)
            if not failed:
                return
            if began or failed < self.world.world:
                self._give_up("on another rank")
            met = share_failure(failure, self._told)
        except RuntimeError as error:  # the group was ended with the wait for a rank that failed
            self._give_up(str(error).splitlines()[0])
            self.ends.raised(error)
            raise failure or PeerError(f"the step failed on another rank: {error}") from error
        if failure is not None:
            self.broken = self.broken and f"{type(failure).__name__}: {failure}".splitlines()[0]
            raise failure
        raise PeerError(f"the step failed {met.text if met else ''}")

    def _give_up(self, reason: str) -> None:
        """Send nothing more over what this step used: messages of it may be under way."""
        self.broken = reason
        leave(self.world.transport)
        groups.give_up(f"a step failed ({reason})")
        alarm = self.seat.transport.alarm
        if alarm is not None:
            alarm.heard = alarm.heard or f"a step failed ({reason})"

    def _counted(self, *mine: bool) -> list[int]:
        """On how many ranks each statement holds."""
        transport = self.ends
        counts = transport.outbound(torch.tensor(mine, dtype=torch.float32))
        group = transport.group
        needs = transport.appointment("agreement", group) if transport.traces and group is not None else ()
        work = dist.all_reduce(counts, group=group, async_op=True)
        wait_for(work, transport, "the end of a step", needs, kind="agreement", on_host=True)
        return [round(count) for count in counts.tolist()]

    def _told(self, mine: Met | None) -> dict[int, Met | None]:
        """What each rank met."""
        told: list[Met | None] = [None] * self.world.world
        dist.all_gather_object(told, mine, group=self.world.transport.group)
        return dict(enumerate(told))
