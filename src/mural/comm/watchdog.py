"""The watchdog: finds a rank that hangs, names it on every rank, and ends the process so that a launcher can act.

gloo and NCCL cannot tell a slow rank from one that hangs, or which one it is. Each rank has two threads:

    messenger   sends this rank's heartbeat to the process group's store, and reads those of the others; a store that
                does not answer, since the rank that holds it is stopped, keeps this thread alone
    judge       looks at the heartbeats; after `limit` seconds without progress of some rank it reports and ends the
                process
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

import torch.distributed as dist

from mural.comm.failure.agree import MeshLike
from mural.comm.failure.alarm import Awaited
from mural.comm.heartbeats import Heartbeat, HungRank, judge, waits_for_others, where
from mural.comm.hosts import LOCAL_STORE
from mural.errors import PlanError

HUNG = 75
"""The exit code of a process whose watchdog found a rank that hangs."""

MOST_SECONDS, LISTED = 5.0, 16


class Watchdog:
    """Watches all ranks of a mesh inside a `with` block that every rank enters.

    `progress` reports that this rank is making progress; so do transfers of sharded tensors. A rank that does neither
    for `limit` seconds, and does not wait for others either, hangs. Every rank then writes to stderr which one it is
    and what it was doing, calls `on_hang` with that text, and ends with the exit code `HUNG`; the hung rank prints its
    stack, if it still can. `pause` is for work that may take long, such as writing to a slow disk.
    """

    def __init__(self, mesh: MeshLike, limit: float = 600.0, on_hang: Callable[[str], None] | None = None):
        if not limit > 0:
            raise PlanError(f"limit={limit}: the watchdog waits for a positive number of seconds")
        self.mesh, self.limit, self.on_hang = mesh, limit, on_hang
        self.interval = min(max(limit / 10, 0.1), MOST_SECONDS + mesh.world / 20)
        self.host, self.pid, self.main = socket.gethostname(), os.getpid(), threading.get_ident()
        self.count, self.beat, self.pauses, self.doing = 0, 0, 0, ""
        self.seen, self.moved_at = (-1, -1), time.monotonic()
        now = time.monotonic()
        self.heartbeats: dict[int, Heartbeat | None] = dict.fromkeys(range(mesh.world))
        self.heard_at = dict.fromkeys(range(mesh.world), now)
        self.answered_at = now
        self.over = threading.Event()
        self.threads: list[threading.Thread] = []
        self.key, self.store = "", None

    def __enter__(self) -> Watchdog:
        self.main = threading.get_ident()
        for thread in self.threads:
            raise PlanError(f"{thread.name} watches already: make a new Watchdog")
        self.progress(self.doing)
        now = time.monotonic()
        self.heard_at, self.answered_at = dict.fromkeys(self.heard_at, now), now
        if self.mesh.transport.group is not None:
            store: Any = dist.distributed_c10d._get_default_store()
            # A separate connection, and the number of this watchdog: all ranks create theirs in the same order.
            self.store, self.key = store.clone(), f"mural/watchdog/{_numbered(self.mesh)}"
            self.threads.append(threading.Thread(target=self._carry, daemon=True, name="mural-messenger"))
        self.threads.append(threading.Thread(target=self._watch, daemon=True, name="mural-judge"))
        for thread in self.threads:
            thread.start()
        atexit.register(self.close)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop watching, and tell the others that this rank has left."""
        self.over.set()
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join(timeout=2.0)
        atexit.unregister(self.close)

    def progress(self, doing: str) -> None:
        """Report that this rank is making progress, and what it is doing now, such as "step 12"."""
        self.doing = doing
        self.count += 1
        self.moved_at = time.monotonic()

    @contextlib.contextmanager
    def pause(self, doing: str = "") -> Generator[None]:
        """Inside the block this rank may take as long as it wants, as long as its process is alive."""
        before = self.doing
        self.progress(doing or before)
        self.pauses += 1
        try:
            yield
        finally:
            self.pauses -= 1
            self.progress(before)

    def heartbeat(self) -> Heartbeat:
        """This rank as it is now."""
        transport, now = self.mesh.transport, time.monotonic()
        seen = (self.count, transport.serial)
        if seen != self.seen:
            self.seen, self.moved_at = seen, now
        moved = now - self.moved_at
        still = moved > 2 * self.interval
        self.beat += 1
        return Heartbeat(
            self.host,
            self.pid,
            self.beat,
            moved,
            *seen,
            self.doing,
            self._waits() if still else "",
            where(self.main) if still else "",
            self.pauses > 0,
            self.over.is_set(),
        )

    def _waits(self) -> str:
        alarm = self.mesh.transport.alarm
        transfer: Any = alarm.pending() if alarm is not None else None
        if isinstance(transfer, Awaited):
            return f"in {transfer.name}"
        if transfer is not None and (works := list(transfer.works)):
            return f"for rank {works[0][0]} in {transfer.name}"
        return waits_for_others(self.main)

    def _carry(self) -> None:
        """Send and fetch heartbeats until the end; a store that is gone shows in the time since its last answer."""
        store: Any = self.store
        while True:
            over = self.over.is_set()
            with contextlib.suppress(RuntimeError):
                store.set(f"{self.key}/{self.mesh.rank}", self.heartbeat().encode())
                if over:
                    return
                self._fetch(store)
                self.answered_at = time.monotonic()
            if over:
                return
            self.over.wait(self.interval)

    def _fetch(self, store: Any) -> None:
        begun = [r for r, p in self.heartbeats.items() if p is not None or store.check([f"{self.key}/{r}"])]
        keys = [f"{self.key}/{rank}" for rank in begun]
        texts = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
        for rank, text in zip(begun, texts, strict=True):
            new, old = Heartbeat.decode(text), self.heartbeats[rank]
            if old is None or new.beat != old.beat:
                self.heartbeats[rank], self.heard_at[rank] = new, time.monotonic()

    def _watch(self) -> None:
        before = time.monotonic()
        while not self.over.wait(self.interval):
            now = time.monotonic()
            if now - before > 3 * self.interval + 1:  # this process itself was stopped, and knows nothing of the others
                self.heard_at, self.answered_at = dict.fromkeys(self.heard_at, now), now
            before = now
            if self.store is None:
                self.heartbeats[0], self.heard_at[0], self.answered_at = self.heartbeat(), now, now
            findings = self._findings(now)
            if findings and not self.over.is_set():
                self._end(findings)

    def _findings(self, now: float) -> tuple[HungRank, ...]:
        silence = now - self.answered_at
        if silence > self.limit:
            first = self.heartbeats[0]
            if first is not None and first.left:
                return ()  # the store went away with rank 0, which had finished
            holder, words = store_holder()
            place = f"{first.place}: " if first is not None and holder == 0 else ""
            return (HungRank(holder, f"{place}stopped ({words} does not answer for {silence:.0f} s)"),)
        return judge(self.heartbeats, {rank: now - at for rank, at in self.heard_at.items()}, self.limit)

    def _end(self, findings: tuple[HungRank, ...]) -> None:
        """Report, and end this process: there is no other way to end a wait of gloo or NCCL."""
        text = self.report(findings)
        sys.stderr.write(text)
        sys.stderr.flush()
        if any(finding.rank == self.mesh.rank for finding in findings):
            faulthandler.dump_traceback(file=2, all_threads=True)
        if self.on_hang is not None:
            with contextlib.suppress(Exception):
                self.on_hang(text)
        time.sleep(min(1.0, self.interval))  # the hung rank still writes its stack
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(HUNG)

    def report(self, findings: tuple[HungRank, ...]) -> str:
        """The ranks that hang, and what the others do."""
        guilty = {finding.rank for finding in findings}
        lines = [f"mural: rank {f.rank} hangs; {f.words}" if f.rank >= 0 else f"mural: {f.words}" for f in findings]
        others = [(rank, beat) for rank, beat in self.heartbeats.items() if beat is not None and rank not in guilty]
        lines += [f"mural: rank {rank}, {beat.place}: {beat.words()}" for rank, beat in others[:LISTED]]
        if len(others) > LISTED:
            lines.append(f"mural: and {len(others) - LISTED} more ranks")
        lines.append(f"mural: rank {self.mesh.rank} ends (the watchdog's limit is {self.limit:g} s)")
        return "\n".join(lines) + "\n"


def store_holder() -> tuple[int, str]:
    """The rank that holds the store (−1 if none does), and a description of the store."""
    if LOCAL_STORE in os.environ:
        return -1, "the store of the process that started the local ranks"
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        return -1, f"the store of torchrun's agent on {os.environ.get('MASTER_ADDR')}"
    address = os.environ.get("MASTER_ADDR")
    return 0, f"the store that it holds on {address}" if address else "the store that it holds"


_made: dict[int, int] = {}


def _numbered(mesh: MeshLike) -> int:
    """How many watchdogs this process group had before."""
    key = id(mesh.transport.group)
    _made[key] = _made.get(key, -1) + 1
    return _made[key]
