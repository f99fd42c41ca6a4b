"""A team: the ranks of a process group as collectives see them, with the watch that ends waits which cannot end well.

A rank that raises in a call leaves a note for the others. Ranks that made different calls (another size, type,
algorithm or root) find out too: messages carry a tag made of the call, so that those of different calls never meet, and
a rank that waits for long compares its call with those of the others. A wait then ends with an error that says why.
"""

from __future__ import annotations

import atexit
import contextlib
import time
from collections import deque
from collections.abc import Generator, Hashable
from datetime import timedelta
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from mural.comm import groups
from mural.comm.failure.alarm import POLL_SECONDS, Alarm, Pending
from mural.comm.host_staging import Pinned
from mural.comm.mpi.installation import NAME as MPI
from mural.comm.path_choice import from_host
from mural.comm.processes import host
from mural.comm.rooms import room
from mural.errors import MuralError, PeerError, PlanError
from mural.ranks.join import join

TIMEOUT = 600.0
MOST_SECONDS = 5.0
"""How long a rank that waits lets pass before it looks again at what the others called."""
KEPT_CALLS = 16
"""How many of its calls a rank tells: one that missed nothing is ahead of those that wait."""
TRIP_TAG, FIRST_TAG, TAGS = 63, 64, 16_000

_teams: dict[str, Team] = {}


class Call:
    """One call of a collective that somebody waits in; its messages have its tag."""

    def __init__(self, serial: int, words: str, log: tuple[str, ...]):
        self.serial, self.words, self.begun = serial, words, time.monotonic()
        self.log = log
        """The words of the last calls, this one's included."""
        self.tag = FIRST_TAG + crc32(words.encode()) % TAGS
        self.outgoing: dict[int, Tensor] = {}
        self.incoming: dict[int, Tensor] = {}


class Watch(Alarm):
    """The alarm of a team's calls: it compares them, and ends waits without the help of others."""

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int):
        self.place, self.size, self.told, self.next_look = rank, size, 0, 0.0
        super().__init__(group, "/rounds")

    def close(self) -> None:
        """Stop watching, and hold the group no longer."""
        super().close()
        atexit.unregister(self.close)

    def tell(self, call: Call) -> None:
        """Let the others know of a call."""
        self.store.set(f"{self.key}/calls/{self.place}", "\n".join([str(call.serial), *call.log]))
        self.told = call.serial

    def look(self) -> None:
        """Read what others left, now."""
        self.next_look = 0.0
        with contextlib.suppress(RuntimeError):
            self._read_notes()

    def _read_notes(self) -> None:
        call = self.waiting
        if isinstance(call, Call) and not self.heard:
            self._compare(call)
        super()._read_notes()

    def _compare(self, call: Call) -> None:
        """Find out whether another rank made another call; ranks that wait for long look less often."""
        now = time.monotonic()
        if self.told != call.serial:
            self.tell(call)
        elif now < self.next_look:
            return
        self.next_look = now + min(max(now - call.begun, POLL_SECONDS), MOST_SECONDS)
        for other in range(self.size):
            words = call.words if other == self.place else self._told(other, call.serial)
            if words not in ("", call.words):
                self.heard = f"rank {other} called {words}, but this rank {call.words}: make the same call on all"
                self._ask(call)
                return

    def _told(self, other: int, serial: int) -> str:
        """What another rank's call of that number was, where it has told."""
        key = f"{self.key}/calls/{other}"
        if not self.store.check([key]):
            return ""
        last, *log = self.store.get(key).decode().split("\n")
        place = serial - int(last) - 1
        return log[place] if -len(log) <= place < 0 else ""

    def _ask(self, transfer: Pending) -> None:
        self.give_up()

    def give_up(self) -> None:
        """End all waits in the group, on every rank: those for ranks that are well would not end by themselves."""
        if self.abort():
            return
        # gloo gives a group up, on all its ranks, when one wait in it ends without an answer. One for a rank that is
        # gone ends otherwise, so try them all.
        for other in set(range(self.size)) - {self.place}:
            nothing = torch.zeros(1, dtype=torch.uint8, device="cpu")
            self.kept.append(nothing)
            with contextlib.suppress(RuntimeError):
                self.group.recv([nothing], other, TRIP_TAG).wait(timedelta(milliseconds=1))


class Team:
    """The ranks of a process group; None stands for a process alone."""

    def __init__(self, group: dist.ProcessGroup | None):
        self.group, self.rank, self.size = group, 0, 1
        self.nodes: tuple[tuple[int, ...], ...] = ((0,),)
        self.backend, self.broken, self.serial, self.connected = "", "", 0, False
        self.made: dict[Hashable, Any] = {}
        """Collectives by what was asked for."""
        self.jobs: dict[Hashable, Any] = {}
        """What runs them on tensors of one size and type."""
        self.log: deque[str] = deque(maxlen=KEPT_CALLS)
        self.pinned: Pinned | None = None
        self.watch: Watch | None = None
        if group is not None:
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
            self.backend = groups.backend_of(group)
            if self.backend == groups.NCCL:
                groups.watch(group)
            self.watch = Watch(group, self.rank, self.size)
            self.nodes = nodes_of(self.watch, self.rank, self.size)

    @property
    def eager(self) -> bool:
        """Whether messages are on their way one by one; else those of a round have to be posted together."""
        return self.backend in ("gloo", MPI)

    def staged(self, tensor: Tensor) -> bool:
        """Whether a tensor travels through host memory."""
        return tensor.is_cuda and from_host(self.backend)

    def host_copy(self, tensor: Tensor) -> Tensor:
        """The values in pinned memory, the same again in the next call."""
        if self.pinned is None or self.pinned.memory.nbytes < tensor.nbytes:
            self.pinned = Pinned(max(tensor.nbytes, 1))
        return self.pinned.memory[: tensor.nbytes].view(tensor.dtype).copy_(tensor)

    @contextlib.contextmanager
    def calling(self, words: str) -> Generator[Call]:
        """A call that the ranks make together, in these words: what is raised inside ends it on all."""
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
        """What another rank called instead, in words, where NCCL would not notice; empty for all the same. Collective.

        Messages of other backends have the tag of their call, and a wait for them finds out. Those of NCCL have none.
        """
        told: list[Any] = [words] * self.size
        if self.backend == groups.NCCL:
            dist.all_gather_object(told, words, group=self.group)
        others = ((rank, other) for rank, other in enumerate(told) if other != words)
        rank, other = next(others, (0, words))
        return "" if other == words else f"rank {rank} called {other}, but this rank {words}: make the same call on all"

    def await_gpu(self, words: str) -> None:
        """Wait for the GPU where it waits for messages: what they brought is read from here on."""
        if self.backend == groups.NCCL:
            groups.await_gpu(words)

    def connect(self, tensor: Tensor) -> None:
        """Make ready for messages of a tensor, of which some ranks have none in the first rounds. Collective."""
        if tensor.is_cuda and self.group is not None and not self.connected:
            groups.connect(self.group)
            self.connected = True

    def check(self, words: str) -> None:
        """Raise if an earlier call failed: messages of it may be under way."""
        if self.broken:
            raise PeerError(f"{words}: an earlier call of these ranks failed ({self.broken}): start the run anew")

    def begin(self, words: str) -> Call:
        """A call that the ranks make together."""
        self.check(words)
        self.serial += 1
        self.log.append(words)
        call = Call(self.serial, words, tuple(self.log))
        if self.watch is not None:
            self.watch.waiting = call
        return call

    def end(self) -> None:
        """The call came to its end."""
        if self.watch is not None:
            self.watch.waiting = None

    def fail(self, call: Call, error: BaseException) -> None:
        """End a call that raised: on the other ranks too, with the reason. What a peer caused becomes a `PeerError`."""
        watch = self.watch
        if watch is None:
            return
        if isinstance(error, RuntimeError):
            watch.look()
        reason = watch.heard or str(error).split("\n")[0] or type(error).__name__
        self.broken = reason
        watch.waiting = None
        self.serial -= 1  # this call did not come about
        if not watch.heard:  # else the others hear the same
            self.refuse(error)
        watch.give_up()
        if isinstance(error, PeerError) or (isinstance(error, RuntimeError) and not isinstance(error, MuralError)):
            raise PeerError(f"{call.words}: {reason}") from error

    def close(self) -> None:
        """Stop the watch: the group is used no more."""
        if self.watch is not None:
            self.watch.close()

    def refuse(self, error: BaseException) -> None:
        """Tell the others that this rank raised instead of its next call."""
        if self.watch is not None:
            self.watch.ring(self.serial, error)


def nodes_of(watch: Watch, rank: int, size: int) -> tuple[tuple[int, ...], ...]:
    """The ranks that share a machine, as its name, its boot and its network tell. Collective."""
    watch.store.set(f"{watch.key}/host/{rank}", host())
    found: dict[bytes, list[int]] = {}
    for other in range(size):
        found.setdefault(watch.store.get(f"{watch.key}/host/{other}"), []).append(other)
    return tuple(map(tuple, found.values()))


def team_of(group: dist.ProcessGroup | None) -> Team:
    """The team of a group; for None that of all ranks, in a group of its own. Collective when it is called first."""
    if group is None:
        world, _, transport = join(None, TIMEOUT)
        return room(transport, "rounds", lambda: Team(groups.new_group(None, TIMEOUT) if world > 1 else None))
    if dist.get_rank(group) < 0:
        raise PlanError("this rank is none of the group's: call on the ranks of the group alone")
    name = group.group_name
    if name not in _teams or _teams[name].group is not group:
        # A watch costs a thread and keeps the sockets of its group: those of groups that are gone end here.
        for old in [old for old, team in _teams.items() if old == name or groups.destroyed(team.group)]:
            _teams.pop(old).close()
        _teams[name] = Team(group)
    return _teams[name]
