"""Shared fate: a call that fails on one rank fails on all; if it failed on all alike, others can follow.

    rank 0   step ✗ after 7 transfers ── note «7» ──┐           next call: all notes say 7, and nobody had to be told
    rank 1   step ✗ after 7 transfers ── note «7» ──┴── store   of it by the alarm: the messages are in step, go on

Otherwise some rank is ahead, and its next message would be taken for another: all ranks give up the transport. Nothing
is sent or checked while no rank fails.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch.distributed as dist

from mural.comm.failure.alarm import Alarm
from mural.comm.failure.connections import aborted, ended, hang_up
from mural.comm.messages import Transport
from mural.errors import PeerError

PATIENCE_SECONDS, POLL_SECONDS = 30.0, 0.02
"""How long another rank may take to reach the point where this one failed, and how often to check."""

ANEW = "create the mesh and the model again (mural.init, mural.parallelize) on all ranks, or start the run again"


@dataclass
class Failure:
    """The latest failure of this rank: its number, how many transfers came before it, and its text."""

    number: int = 0
    serial: int = 0
    peer: bool = False
    """Whether it came from another rank, or from the end of one."""
    text: str = ""
    settled: bool = True

    def note(self) -> str:
        """The failure as others read it."""
        return f"{self.serial} {int(self.peer)}"


_failures: WeakKeyDictionary[Transport, Failure] = WeakKeyDictionary()


@contextmanager
def shared_fate(transport: Transport) -> Generator[None]:
    """A block of collective work and of the user's own code: if it raises, no rank waits for this one. Collective.

    A later block runs if this one raised on every rank alike; otherwise it raises, and says what to do.
    """
    settle(transport)
    try:
        yield
    except BaseException as error:
        fail(transport, error)
        raise


def fail(transport: Transport, error: BaseException) -> None:
    """Tell the others that this rank raised."""
    alarm = transport.alarm
    if alarm is None:
        return
    gone = ended(error, alarm.heard)
    transport.raised(error)
    if gone:
        hang_up(alarm.group)
    failure = _failures.setdefault(transport, Failure())
    failure.number, failure.settled = failure.number + 1, False
    failure.serial, failure.peer = transport.serial, isinstance(error, PeerError)
    failure.text = f"{type(error).__name__}: {error}".splitlines()[0]
    with suppress(RuntimeError):  # the store went away with the rank that held it
        alarm.store.set(_key(alarm, alarm.rank, failure.number), failure.note())


def settle(transport: Transport) -> None:
    """Raise if this rank failed at a different point than the others; waits for them, since they may be slower."""
    failure, alarm = _failures.get(transport), transport.alarm
    if failure is None or alarm is None or failure.settled:
        return
    if not alarm.heard and not failure.peer and _alike(transport, alarm, failure):
        failure.settled = True
        transport.count()  # the next failure has a number of its own
        return
    alarm.heard = alarm.heard or failure.text
    raise PeerError(f"an earlier step failed ({failure.text}), and not on all ranks alike: {ANEW}")


def given_up(transport: Transport) -> bool:
    """Whether the messages of this transport's ranks no longer match."""
    with suppress(PeerError):
        settle(transport)
    return transport.alarm is not None and bool(transport.alarm.heard or aborted())


def _alike(transport: Transport, alarm: Alarm, failure: Failure) -> bool:
    """Whether all other ranks failed equally often, after as many transfers, and by themselves."""
    waited = [rank for rank in dist.get_process_group_ranks(alarm.group) if rank != alarm.rank]
    until = time.monotonic() + min(PATIENCE_SECONDS, transport.timeout)
    try:
        while waited and not alarm.heard and time.monotonic() < until:
            key = _key(alarm, waited[0], failure.number)
            if not alarm.store.check([key]):
                time.sleep(POLL_SECONDS)
            elif alarm.store.get(key).decode() != failure.note():
                return False
            else:
                waited.pop(0)
    except RuntimeError:
        return False
    return not waited


def _key(alarm: Alarm, rank: int, number: int) -> str:
    return f"{alarm.key}/failed/{rank}/{number}"
