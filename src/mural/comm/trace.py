"""Traces: when this rank had done its part of each message or collective, and when it waited for others.

    rank 0   ▒▒▒▒▒▒ post ├ wait ──────────────────┤
    rank 1   ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒ post ├── wait ────┤
                         └── idle ───┴─ under way ┘      as rank 0 sees it

A wait alone does not say whether a peer was late or the link slow. With the posts of all ranks it does: up to the
latest post of those it needs, a wait is idle; from then on, bytes are under way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field

Post = tuple[Hashable, ...]
"""The name of one rank's part in something that ranks do together: the same on all of them."""


@dataclass(frozen=True)
class Wait:
    """A time in which this rank did nothing but wait, for the posts of some ranks."""

    kind: str
    begin: float
    end: float
    needs: tuple[tuple[int, Post], ...] = ()


@dataclass(frozen=True)
class Flight:
    """A time in which messages of this rank were under way, whether it waited or not."""

    kind: str
    begin: float
    end: float
    bytes: int


@dataclass
class Trace:
    """What one rank noted. Times are those of `time.perf_counter` on its machine."""

    posts: dict[Post, float] = field(default_factory=dict[Post, float])
    waits: list[Wait] = field(default_factory=list[Wait])
    flights: list[Flight] = field(default_factory=list[Flight])
    counts: Counter[Hashable] = field(default_factory=Counter[Hashable])

    def number(self, name: Hashable) -> int:
        """How often this rank did something of a name, this time included."""
        self.counts[name] += 1
        return self.counts[name]
