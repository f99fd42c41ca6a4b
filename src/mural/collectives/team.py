"""A team: the ranks of a process group as collectives see them, with the alarm that ends hopeless waits.

A rank that raises in a call leaves a note for the others. Ranks that made different calls (another size, type,
algorithm or root) find out too: messages carry a tag made from the call, so that those of different calls never match,
and a rank that waits for long compares its call with those of the others. A wait then ends with an error that says why.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Generator, Hashable
from functools import partial
from typing import Any
from zlib import crc32

import torch.distributed as dist
from torch import Tensor

from mural.comm import groups
from mural.comm.backends import backend_of
from mural.comm.failure import connections
from mural.comm.failure.alarm import POLL_SECONDS, Alarm
from mural.comm.host_staging import Pinned
from mural.comm.hosts import host
from mural.errors import MuralError, PeerError, PlanError
from mural.ranks.join import join

TIMEOUT = 600.0
MOST_SECONDS = 5.0
"""How long a waiting rank pauses before it checks again what the others called."""
KEPT_CALLS = 16
"""How many of its last calls a rank publishes: one that missed nothing is ahead of those that wait."""
FIRST_TAG, TAGS = 64, 16_000


class CollectiveCall:
    """One call of a collective that ranks wait in; its messages have its tag."""

    def __init__(self, serial: int, words: str, log: tuple[str, ...]):
        self.serial, self.words, self.begun = serial, words, time.monotonic()
        self.log = log
        """Descriptions of the last calls, this one included."""
        self.tag = FIRST_TAG + crc32(words.encode()) % TAGS
        self.outgoing: dict[int, Tensor] = {}
        self.incoming: dict[int, Tensor] = {}


class Calls:
    """The calls of a team's ranks, as they publish them in the store."""

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int):
        self.store: Any = dist.distributed_c10d._get_default_store()
        self.key, self.rank, self.size = f"mural/calls/{group.group_name}", rank, size
        self.told, self.next_look = 0, 0.0

    def tell(self, call: CollectiveCall) -> None:
        """Publish a call for the others."""
        self.store.set(f"{self.key}/{self.rank}", "\n".join([str(call.serial), *call.log]))
        self.told = call.serial

    def differs(self, call: CollectiveCall) -> str:
        """A description of what another rank called instead, if one did; ranks that wait for long check less often."""
        now = time.monotonic()
        if self.told != call.serial:
            self.tell(call)
        elif now < self.next_look:
            return ""
        self.next_look = now + min(max(now - call.begun, POLL_SECONDS), MOST_SECONDS)
        for other in range(self.size):
            words = call.words if other == self.rank else self._told(other, call.serial)
            if words not in ("", call.words):
                return f"rank {other} called {words}, but this rank {call.words}: make the same call on all"
        return ""

    def _told(self, other: int, serial: int) -> str:
        """Another rank's call of that number, if it has published it."""
        key = f"{self.key}/{other}"
        if not self.store.check([key]):
            return ""
        last, *log = self.store.get(key).decode().split("\n")
        place = serial - int(last) - 1
        return log[place] if -len(log) <= place < 0 else ""

    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that share a machine, judged by its name, its boot and its network. Collective."""
        self.store.set(f"{self.key}/host/{self.rank}", host())
        found: dict[bytes, list[int]] = {}
        for other in range(self.size):
            found.setdefault(self.store.get(f"{self.key}/host/{other}"), []).append(other)
        return tuple(map(tuple, found.values()))


class Team:
    """The ranks of a process group; None stands for a single process."""

    def __init__(self, group: dist.ProcessGroup | None):
        self.group, (self.rank, self.size) = group, groups.place_in(group)
        self.nodes: tuple[tuple[int, ...], ...] = ((0,),)
        self.backend, self.broken, self.serial, self.connected = backend_of(group), "", 0, False
        self.made: dict[Hashable, Any] = {}
        """Collectives by the arguments of the call."""
        self.jobs: dict[Hashable, Any] = {}
        """What runs them on tensors of one size and type."""
        self.log: deque[str] = deque(maxlen=KEPT_CALLS)
        self.pinned: Pinned | None = None
        self.alarm: Alarm | None = None
        self.calls: Calls | None = None
        if group is not None:
            if self.backend.on_stream:
                connections.watch(group)
            self.calls = Calls(group, self.rank, self.size)
            self.alarm = Alarm(group, "/rounds", self.calls.differs)
            self.nodes = self.calls.nodes()

    def staged(self, tensor: Tensor) -> bool:
        """Whether a tensor travels through host memory."""
        return tensor.is_cuda and self.backend.from_host

    def host_copy(self, tensor: Tensor) -> Tensor:
        """The values in pinned memory, which the next call reuses."""
        if self.pinned is None or self.pinned.memory.nbytes < tensor.nbytes:
            self.pinned = Pinned(max(tensor.nbytes, 1))
        return self.pinned.memory[: tensor.nbytes].view(tensor.dtype).copy_(tensor)

    @contextlib.contextmanager
    def calling(self, words: str) -> Generator[CollectiveCall]:
        """A call that the ranks make together, described by `words`: an error inside ends it on all ranks."""
        call = self.begin(words)
        try:
            if not (differs := self.difference(words)):
                yield call
                self.await_gpu(words)
        except BaseException as error:
            self.fail(call, error)
            raise
        self.end()
        if differs:
            raise PeerError(differs)

    def difference(self, words: str) -> str:
        """A description of what another rank called instead, unnoticed by NCCL; empty if none did. Collective.

        Messages of other backends have the tag of their call, and a wait for them finds out. Those of NCCL have none.
        """
        told: list[Any] = [words] * self.size
        if self.backend.on_stream:
            dist.all_gather_object(told, words, group=self.group)
        others = ((rank, other) for rank, other in enumerate(told) if other != words)
        rank, other = next(others, (0, words))
        return "" if other == words else f"rank {rank} called {other}, but this rank {words}: make the same call on all"

    def await_gpu(self, words: str) -> None:
        """Wait for the GPU if it waits for messages: from here on, their values are read."""
        if self.backend.on_stream:
            connections.await_gpu(words)

    def connect(self, tensor: Tensor) -> None:
        """Prepare for a tensor's messages, since some ranks have none in the first rounds. Collective."""
        if tensor.is_cuda and self.group is not None and not self.connected:
            groups.connect(self.group)
            self.connected = True

    def check(self, words: str) -> None:
        """Raise if an earlier call failed: its messages may still be under way."""
        if self.broken:
            raise PeerError(f"{words}: an earlier call of these ranks failed ({self.broken}): start the run again")

    def begin(self, words: str) -> CollectiveCall:
        """A call that the ranks make together."""
        self.check(words)
        self.serial += 1
        self.log.append(words)
        call = CollectiveCall(self.serial, words, tuple(self.log))
        if self.alarm is not None:
            self.alarm.waiting = call
        return call

    def end(self) -> None:
        """End a call that succeeded."""
        if self.alarm is not None:
            self.alarm.waiting = None

    def fail(self, call: CollectiveCall, error: BaseException) -> None:
        """End a call that raised, on the other ranks too, with the reason. What a peer caused becomes a `PeerError`."""
        alarm = self.alarm
        if alarm is None or self.calls is None:
            return
        if isinstance(error, RuntimeError):
            self.calls.next_look = 0.0
            with contextlib.suppress(RuntimeError):
                alarm.read_notes()
        reason = alarm.heard or str(error).split("\n")[0] or type(error).__name__
        self.broken = reason
        alarm.waiting = None
        self.serial -= 1  # this call did not happen
        if not alarm.heard:  # otherwise the others have heard the same
            self.refuse(error)
        alarm.give_up()
        if isinstance(error, PeerError) or (isinstance(error, RuntimeError) and not isinstance(error, MuralError)):
            raise PeerError(f"{call.words}: {reason}") from error

    def refuse(self, error: BaseException) -> None:
        """Tell the others that this rank raised instead of its next call."""
        if self.alarm is not None:
            self.alarm.ring(self.serial, error)


def team_of(group: dist.ProcessGroup | None) -> Team:
    """The team of a group; for None that of all ranks, in a separate group. Collective the first time."""
    if group is None:
        world, _, transport = join(None, TIMEOUT)
        ours, new = transport.group, partial(groups.new_group, None, TIMEOUT)

        def build() -> Team:
            return Team(connections.interruptible(ours, "a group for collectives", new) if world > 1 else None)

        return groups.kept(ours, "rounds", build)
    return groups.kept(group, "rounds in it", lambda: team_in(group))


def team_in(group: dist.ProcessGroup) -> Team:
    """The team of a group that this rank is in."""
    if dist.get_rank(group) < 0:
        raise PlanError("this rank is not in the group: call this only on the ranks of the group")
    return Team(group)
