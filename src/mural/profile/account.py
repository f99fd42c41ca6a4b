"""The account of a step: compute, communication by kind, idle time and waiting for data, from what all ranks noted.

    rank 0   │data│▒▒▒ compute ▒▒▒│idle│comm.│▒▒▒▒▒▒│
    rank 1   │data│▒▒▒▒▒ compute ▒▒▒▒▒▒│comm.│▒▒▒▒▒▒│

Up to the latest post of the ranks that it needs, a wait is idle: those ranks were not ready. From then on it is
communication. What is left of the step is compute: on a GPU too, as the host waits for the device before it sends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from mural.comm.trace import Post, Trace, Wait


@dataclass(frozen=True)
class StepAccount:
    """One update: its number, its time, and the seconds of it in which images were waited for."""

    number: int
    begin: float
    end: float
    data: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.begin


@dataclass(frozen=True)
class Notes:
    """What one rank noted, in seconds of the first rank's clock once `shift` is added."""

    rank: int
    steps: tuple[StepAccount, ...]
    trace: Trace
    actions: tuple[tuple[str, float, float], ...] = ()
    """Forwards and backwards of stages: name, begin, end."""
    shift: float = 0.0


@dataclass(frozen=True)
class Shares:
    """Where the seconds of one step on one rank went."""

    rank: int
    step: int
    seconds: float
    data: float
    idle: float
    communication: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def communicating(self) -> float:
        """Communication of all kinds."""
        return sum(self.communication.values())

    @property
    def compute(self) -> float:
        """What is left."""
        return self.seconds - self.data - self.idle - self.communicating


@dataclass(frozen=True)
class Profile:
    """The notes of all ranks, and what they add up to."""

    title: str
    notes: tuple[Notes, ...]

    @cached_property
    def shares(self) -> tuple[Shares, ...]:
        """One for each rank and step."""
        return account(self.notes)

    @cached_property
    def by_rank(self) -> tuple[Shares, ...]:
        """The mean step of each rank; its number is that of the steps."""
        return tuple(mean([s for s in self.shares if s.rank == note.rank]) for note in self.notes)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of communication, by their time on all ranks."""
        total: dict[str, float] = {}
        for shares in self.by_rank:
            for kind, seconds in shares.communication.items():
                total[kind] = total.get(kind, 0.0) + seconds
        return tuple(sorted(total, key=lambda kind: -total[kind]))


def account(notes: Sequence[Notes]) -> tuple[Shares, ...]:
    """The shares of every step on every rank.

    >>> sent = Trace(posts={("halo", 1): 3.0})
    >>> met = Trace(posts={("halo", 1): 1.0}, waits=[Wait("halo", 1.0, 4.0, ((0, ("halo", 1)),))])
    >>> steps = [StepAccount(1, 0.0, 5.0, waited) for waited in (0.5, 0.0)]
    >>> found = account([Notes(0, (steps[0],), sent), Notes(1, (steps[1],), met)])
    >>> found[1].idle, found[1].communication, found[1].compute, found[0].compute
    (2.0, {'halo': 1.0}, 2.0, 4.5)
    """
    posts = {(note.rank, post): when + note.shift for note in notes for post, when in note.trace.posts.items()}
    return tuple(shares_of(note, step, posts) for note in notes for step in note.steps)


def shares_of(note: Notes, step: StepAccount, posts: Mapping[tuple[int, Post], float]) -> Shares:
    """The shares of one step on one rank."""
    idle, communication = 0.0, dict[str, float]()
    for wait in note.trace.waits:
        begin, end = max(wait.begin, step.begin), min(wait.end, step.end)
        if begin >= end:
            continue
        there = min(max(arrival(wait, posts) - note.shift, begin), end)
        idle += there - begin
        communication[wait.kind] = communication.get(wait.kind, 0.0) + end - there
    return Shares(note.rank, step.number, step.seconds, step.data, idle, communication)


def arrival(wait: Wait, posts: Mapping[tuple[int, Post], float]) -> float:
    """When the last of those that a wait needs was there; long ago where nobody noted it."""
    return max((posts.get(need, float("-inf")) for need in wait.needs), default=float("-inf"))


def mean(shares: Sequence[Shares]) -> Shares:
    """The mean of some steps of one rank; its number says how many they are."""
    count = len(shares)
    kinds = {kind for each in shares for kind in each.communication}

    def average(values: Iterable[float]) -> float:
        return sum(values) / max(count, 1)

    return Shares(
        shares[0].rank if shares else 0,
        count,
        average(s.seconds for s in shares),
        average(s.data for s in shares),
        average(s.idle for s in shares),
        {kind: average(s.communication.get(kind, 0.0) for s in shares) for kind in sorted(kinds)},
    )
