"""The roster: which clinics take part in a round, agreed on through a store that all can reach.

    clinic a   here! ─────────── leads: waits for the others, or for as long as patience lasts ── roster: a, c
    clinic c        here! ───────────────────────────────────────────────────────────────────── reads it
    clinic b   (is away)                        comes back: here! ── is not on it, waits for the next round

A *turn* is an attempt at a round. If an attempt fails because a member left, another attempt at the same round follows;
the store knows the latest turn, so clinics that come back find the others.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed.distributed_c10d import Store

from mural.errors import PeerError, PlanError
from mural.ranks.identity import LOOPBACK
from mural.ranks.store import client, host

LOOK = 0.05
"""Seconds between two reads of the store."""


class MemberGone(PeerError):
    """A member left in the middle of a turn; the others try again without it."""


class HostGone(PeerError):
    """The store does not answer: the clinic that holds it has left."""


@dataclass(frozen=True, order=True)
class RoundAttempt:
    """An attempt at a round, both counted from 0."""

    round: int = 0
    attempt: int = 0

    def __str__(self) -> str:
        return f"round {self.round}, attempt {self.attempt}" if self.attempt else f"round {self.round}"


@dataclass(frozen=True)
class ClinicTurn:
    """A clinic in a turn.

    `version` is the number of rounds in its model, `public` its public key (empty if it does not mask), `form` the
    digest of its model, and `masked` whether it masks its updates.
    """

    name: str
    version: int
    public: str
    form: str
    masked: bool = False


@dataclass(frozen=True)
class Patience:
    """How long the first clinic of a turn waits: until `expected` are present, or `seconds` if `quorum` are."""

    expected: int
    quorum: int = 1
    seconds: float = 10.0


@contextmanager
def asking() -> Generator[None]:
    """A block that uses the store; raises if it does not answer, since its host has left."""
    try:
        yield
    except PeerError:
        raise
    except RuntimeError as error:  # torch raises these for a store that is gone
        raise HostGone((str(error) or type(error).__name__).splitlines()[0]) from error


class Roster:
    """The store, as one clinic uses it."""

    def __init__(self, store: Store, patience: Patience):
        self.store, self.patience = store, patience

    @asking()
    def latest(self) -> RoundAttempt:
        """The latest turn that any clinic has begun."""
        if not self.store.check(["turn"]):
            return RoundAttempt()
        return RoundAttempt(*json.loads(self.store.get("turn")))

    @asking()
    def advance(self, turn: RoundAttempt) -> None:
        """Announce a later turn to all."""
        if turn > self.latest():  # two clinics may write at once: both then write the same or meet in the later one
            self.store.set("turn", json.dumps([turn.round, turn.attempt]))

    @asking()
    def meet(self, turn: RoundAttempt, me: ClinicTurn) -> tuple[ClinicTurn, ...] | None:
        """The members of a turn, in order of arrival; None if it continues without this clinic."""
        key = f"{turn.round}/{turn.attempt}"
        if self.store.check([f"{key}/roster"]):
            return None
        self.advance(turn)
        number = self.store.add(f"{key}/here", 1)
        self.store.set(f"{key}/{number}", json.dumps(asdict(me)))
        members = self._lead(key, turn) if number == 1 else self._follow(key, turn)
        return members if members is not None and me in members else None

    def _lead(self, key: str, turn: RoundAttempt) -> tuple[ClinicTurn, ...] | None:
        """Wait for the others, then publish the members; None if they have moved on to a later turn."""
        end = time.monotonic() + self.patience.seconds
        while True:
            if self.latest() > turn:
                return None
            there = self.store.add(f"{key}/here", 0)
            enough = there >= self.patience.quorum and time.monotonic() > end
            if there >= self.patience.expected or enough:
                break
            time.sleep(LOOK)
        found = [json.loads(self.store.get(f"{key}/{number}")) for number in range(1, there + 1)]
        self.store.set(f"{key}/roster", json.dumps(found))
        return members_of(found)

    def _follow(self, key: str, turn: RoundAttempt) -> tuple[ClinicTurn, ...] | None:
        """Wait for the first clinic to publish the members; None if the others have moved on to a later turn."""
        end = time.monotonic() + 2 * self.patience.seconds + 5
        while not self.store.check([f"{key}/roster"]):
            there = self.store.add(f"{key}/here", 0)
            if self.latest() > turn:
                return None
            if there >= self.patience.quorum and time.monotonic() > end:
                raise MemberGone(f"{turn}: the clinic that came first did not say who takes part; it has probably left")
            time.sleep(LOOK)
        return members_of(json.loads(self.store.get(f"{key}/roster")))

    def leave(self, turn: RoundAttempt, members: int, host: bool) -> None:
        """Leave permanently in this turn, or with all turns before it done.

        The clinic that holds the store stays until the other members have left, or as long as its patience lasts.
        """
        with suppress(RuntimeError):  # the store may be gone
            self.advance(turn)
            left = self.store.add("left", 1)
            end = time.monotonic() + self.patience.seconds
            while host and left < members and time.monotonic() < end:
                time.sleep(LOOK)
                left = self.store.add("left", 0)

    @asking()
    def await_later(self, turn: RoundAttempt) -> RoundAttempt:
        """The next turn that the others begin, for a clinic that came too late for this one."""
        while (latest := self.latest()) <= turn:
            time.sleep(LOOK)
        return latest


def members_of(found: list[dict[str, Any]]) -> tuple[ClinicTurn, ...]:
    """The members that were published."""
    return tuple(ClinicTurn(**each) for each in found)


def store_at(address: str, holds: bool, timeout: float) -> Any:
    """The store at "host:port", held by this process or by another; all clinics depend on its holder."""
    name, _, port = address.rpartition(":")
    if not name or not port.isdigit():
        raise PlanError(f"{address!r} is not an address: write host:port, such as 10.0.0.5:29400")
    try:
        if not holds:
            return client(name, int(port), timeout)
        return host(name, int(port), 0, timeout, loopback=name in (LOOPBACK, "localhost"))
    except RuntimeError as error:
        words = "cannot be opened here" if holds else "does not answer"
        raise PeerError(f"the meeting place {address} {words}: {str(error).splitlines()[0]}") from error
