"""The alarm: ends a wait for a rank that raised alone, which would otherwise last until the timeout.

A rank that raises leaves a note in the group's store: how many transfers it had begun, and its error. A rank that waits
in a later transfer, and did not itself raise at that number, will never get its messages. The thread that watches its
waits then asks the peers' threads to complete the pending messages with empty data (gloo cannot abort a wait; NCCL and
the MPI group can), and the wait ends with the note's text as an error.

Over NCCL the GPU waits, and the process continues until it reads a value. So transfers whose messages are on a stream
are followed until the GPU is done with them, and the oldest of them is what the rank waits for. A rank that is killed
leaves no note: if it is on the same machine, this one checks whether its process is alive.

One thread per process serves all its alarms.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mural.comm.backends import backend_of
from mural.comm.failure.connections import abort_all, destroyed, hang_up, is_pause, reason, trouble
from mural.comm.groups import kept
from mural.comm.hosts import has_ended, identity
from mural.errors import PeerError

THREAD, POLL_SECONDS, LOOK = "mural-alarm", 0.25, timedelta(seconds=1)
ABORTED = "mural/aborted"
"""Where a rank says that it aborted its communicators: those of its peers will wait for it in vain."""
LEFT_SECONDS = 5.0
"""How long a wait lasts before a finished rank counts as missing: what it sent before may still be under way."""

_alarms: list[Alarm] = []
_listing, _over = threading.Lock(), threading.Event()


class Pending(Protocol):
    """A transfer that this rank waits for."""

    serial: int
    outgoing: dict[int, torch.Tensor]
    incoming: dict[int, torch.Tensor]


@dataclass(eq=False)
class Awaited:
    """Something that this rank waits for: a collective, or messages on a stream of the GPU.

    It has no messages of its own that a peer could complete.
    """

    serial: int
    name: str
    works: tuple[Any, ...] = ()
    outgoing: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    incoming: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])


class Alarm:
    """The notes of a group's ranks that raised, and what ends this rank's waits for them.

    `differs` says what other ranks do instead of what this one waits for. An alarm has it if its group makes no other
    calls: the group is then given up as a whole.
    """

    def __init__(self, group: dist.ProcessGroup, name: str = "", differs: Callable[[Any], str] | None = None):
        self.group, self.rank, self.differs = group, dist.get_rank(), differs
        self.ranks = dist.get_process_group_ranks(group)
        self.on_gpu = backend_of(group).on_stream
        self.store: Any = kept(dist.group.WORLD, "the store of alarms", own_connection)
        self.key = f"mural/alarm/{group.group_name}{name}"
        self.heard = ""
        self.since = 0  # notes with smaller numbers no longer matter
        self.own: set[int] = set()
        self.notes: list[tuple[int, str]] = []
        self.rescued = 0
        self.kept: list[Any] = []  # buffers of messages that may still be under way
        self.waiting: Pending | None = None  # written by the waiting thread, read by the watching one
        self.followed: deque[Awaited] = deque()
        self.lock = threading.Lock()
        self.begun = 0  # the largest number that this rank ever waited for
        self.looked: tuple[Pending | None, float] = (None, 0.0)
        self.identities: dict[int, str] = {}
        self.store.set(f"{self.key}/process/{self.rank}", identity())
        _list(self)

    def ring(self, serial: int, error: BaseException) -> None:
        """Leave a note that this rank raised after it had begun that many transfers."""
        self.own.add(serial)
        with contextlib.suppress(RuntimeError):
            text = f"{serial} rank {self.rank} raised {type(error).__name__}: {error}"
            self.store.set(f"{self.key}/note/{self.store.add(f'{self.key}/notes', 1)}", text)

    @contextlib.contextmanager
    def watching(self, transfer: Pending) -> Generator[None]:
        """Listen for notes while the block waits for a transfer."""
        before, self.waiting, self.begun = self.waiting, transfer, max(self.begun, transfer.serial)
        try:
            yield
        finally:
            self.waiting = before

    def complete(self, works: list[tuple[int, Any]], name: str) -> None:
        """Wait for messages by peer, dropping each when it is done, or raise what kept a peer from its part."""
        while works:
            peer, work = works[0]
            try:
                work.wait()
            except RuntimeError as error:
                why = self.heard or f"{reason(error)}. It or another rank has ended: see the logs"
                raise PeerError(f"waiting for rank {peer} in {name}: {why}") from error
            if self.heard:
                raise PeerError(f"waiting for rank {peer} in {name}: {self.heard}")
            works.pop(0)

    def join(self, work: Any, serial: int, name: str) -> None:
        """Wait for a collective over gloo, or raise what kept a peer from joining it.

        A peer that raised before it began as many transfers as this rank will not come.
        """
        with self.watching(Awaited(serial, name)):
            while True:
                try:
                    work.wait(LOOK)
                    return
                except RuntimeError as error:
                    if self.heard or not is_pause(error):
                        why = self.heard or f"{reason(error)}. A peer has ended: see its log"
                        raise PeerError(f"waiting for {name}: {why}") from error

    def follow(self, serial: int, name: str, works: Iterable[Any]) -> None:
        """Listen for notes until the GPU has completed some works, which this rank may wait for elsewhere.

        This queues nothing on a stream: a stream whose queue is full after a wait blocks the process, which would then
        stop here while it holds the interpreter lock.
        """
        self.begun = max(self.begun, serial)
        with self.lock:
            self._drop_done()
            self.followed.append(Awaited(serial, name, tuple(works)))

    def _drop_done(self) -> None:
        while self.followed and all(work.is_completed() for work in self.followed[0].works):
            self.followed.popleft()

    def pending(self) -> Pending | None:
        """What this rank waits for now: here, or the first of the followed works that the GPU has not completed."""
        if (waiting := self.waiting) is not None:
            return waiting
        with self.lock:
            self._drop_done()
            return self.followed[0] if self.followed else None

    def look(self) -> None:
        """End the current wait if it cannot end well. Runs in the watching thread."""
        pending, now = self.pending(), time.monotonic()
        if pending is not self.looked[0]:
            self.looked = (pending, now)
        waited = now - self.looked[1]
        if pending is not None and waited > POLL_SECONDS / 2:
            self.read_notes()
            self._look_around(pending, waited)
        elif self.on_gpu and pending is None and (trouble() or any(map(has_ended, self._identities().values()))):
            # This rank may hang after messages that NCCL gave up, which count as done.
            self._look_around(Awaited(self.begun, "NCCL"), waited)
        if self.own or self.heard:
            self._serve()

    def _look_around(self, waiting: Pending, seconds: float) -> None:
        """Find out whether a rank of the group is gone and will not send what this rank waits for."""
        if self.on_gpu:
            told = self.store.get(ABORTED).decode() if self.store.check([ABORTED]) else trouble()
            self._hear(told, waiting)
        left = self._left() if not self.heard else {}
        for rank, other in self._identities().items() if not self.heard else ():
            if rank not in left and has_ended(other):
                self._hear(f"the process of rank {rank} ended: see its log", waiting)
        for rank, begun in left.items():
            if seconds > LEFT_SECONDS and begun < waiting.serial:
                self._hear(f"rank {rank} came to its end and does not take part", waiting)

    def _identities(self) -> dict[int, str]:
        """The processes of the other ranks that have registered; each is read once."""
        if not self.identities:
            keys = {rank: f"{self.key}/process/{rank}" for rank in self.ranks if rank != self.rank}
            if self.store.check(list(keys.values())):
                self.identities = {rank: self.store.get(key).decode() for rank, key in keys.items()}
        return self.identities

    def _left(self) -> dict[int, int]:
        """The ranks that have finished, with the number of the last transfer that each took part in."""
        if not self.store.check([f"{self.key}/leaving"]):
            return {}
        keys = {rank: f"{self.key}/left/{rank}" for rank in self.ranks if rank != self.rank}
        return {rank: int(self.store.get(key)) for rank, key in keys.items() if self.store.check([key])}

    def _hear(self, text: str, waiting: Pending) -> None:
        if text and not self.heard:
            self.heard = text
            if self.differs is not None:
                self.give_up()
            elif not self.abort():
                self._ask(waiting)

    def read_notes(self) -> None:
        """Read the notes of others, and end this rank's wait if they will not come."""
        while self.store.check([f"{self.key}/note/{len(self.notes) + 1}"]):
            serial, text = self.store.get(f"{self.key}/note/{len(self.notes) + 1}").decode().split(" ", 1)
            self.notes.append((int(serial), text))
        waiting = self.pending()
        if waiting is None or self.heard:
            return
        told = [text for number, text in self.notes if self.since <= number < waiting.serial and number not in self.own]
        if text := (self.differs(waiting) if self.differs is not None else "") or "".join(told[:1]):
            self._hear(text, waiting)

    def give_up(self) -> None:
        """End all waits in the group, on every rank: waits for healthy ranks would not end by themselves."""
        if not self.abort():
            hang_up(self.group)

    def _ask(self, transfer: Pending) -> None:
        """Ask every peer of a transfer to complete its messages on the host, so that the wait ends."""
        self.kept.append((transfer.outgoing, transfer.incoming))
        for peer in {*transfer.outgoing, *transfer.incoming}:
            buffers = [b.get(peer) for b in (transfer.incoming, transfer.outgoing)]
            wanted, offered = (0 if b is None or b.is_cuda else b.nbytes for b in buffers)
            number = self.store.add(f"{self.key}/asks/{peer}", 1)
            self.store.set(f"{self.key}/ask/{peer}/{number}", f"{self.rank} {wanted} {offered}")

    def abort(self) -> bool:
        """Whether the backend could end all waits of this rank by itself; it has ended those that it can."""
        if self.on_gpu:
            told = self.heard or f"a call failed on rank {self.rank}"
            self.store.set(ABORTED, told)
            abort_all(told)
        elif getattr(self.group, "aborts_waits", False):
            self.group.abort()
            return True
        return False

    def _serve(self) -> None:
        """Complete the messages that peers asked for."""
        while self.store.check([f"{self.key}/ask/{self.rank}/{self.rescued + 1}"]):
            self.rescued += 1
            text = self.store.get(f"{self.key}/ask/{self.rank}/{self.rescued}").decode()
            peer, wanted, offered = (int(n) for n in text.split())
            self.heard = self.heard or f"rank {peer} gave up waiting for this rank, which had raised"
            for size, send in ((wanted, True), (offered, False)):
                if size:
                    buffer = torch.zeros(size, dtype=torch.uint8)
                    work = (dist.isend if send else dist.irecv)(buffer, peer, group=self.group)
                    self.kept.append((buffer, work))


def own_connection() -> Any:
    """The process group's store over another connection: torch keeps its own busy while it waits there for a rank."""
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone()


def _list(alarm: Alarm) -> None:
    """Watch an alarm from now on, and drop those whose group is gone: they would keep its sockets."""
    with _listing:
        _alarms[:] = [*(each for each in _alarms if not destroyed(each.group)), alarm]
        if all(thread.name != THREAD for thread in threading.enumerate()):
            threading.Thread(target=_watch, daemon=True, name=THREAD).start()
    # A thread that is inside torch when the interpreter ends would crash the process. What is registered last runs
    # first: before the process group is destroyed.
    atexit.unregister(_leave)
    atexit.register(_leave)


def _watch() -> None:
    """Poll now and then: waking this thread for each transfer would cost more than most transfers."""
    while not _over.wait(POLL_SECONDS):
        for alarm in tuple(_alarms):
            try:
                alarm.look()
            except (RuntimeError, ValueError, KeyError):  # the store went away with the process group
                with _listing, contextlib.suppress(ValueError):
                    _alarms.remove(alarm)
            del alarm  # it keeps the sockets of its group


def _leave() -> None:
    """Stop watching, and tell the others that this rank has finished."""
    for alarm in tuple(_alarms):
        with contextlib.suppress(RuntimeError):
            alarm.store.set(f"{alarm.key}/left/{alarm.rank}", str(alarm.begun))
            alarm.store.add(f"{alarm.key}/leaving", 1)
    _over.set()
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join(timeout=2.0)
