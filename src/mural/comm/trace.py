"""Records and traces: what this rank sent, when it had done its part of each message or collective, and when it waited.

    rank 0   ▒▒▒▒▒▒ post ├ wait ──────────────────┤
    rank 1   ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒ post ├── wait ────┤
                         └── idle ───┴─ under way ┘      as rank 0 sees it

A wait alone does not say whether a peer was late or the link slow. With the posts of all ranks it does: up to the
latest post of those it needs, a wait is idle; from then on, bytes are under way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Hashable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

import torch.distributed as dist

Post = tuple[Hashable, ...]
"""The name of one rank's part in something that ranks do together: the same on all of them."""


@dataclass(frozen=True)
class Wait:
    """A time in which this rank only waited, for the posts of some ranks."""

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


@dataclass(eq=False)
class Trace:
    """What one rank noted. Times are those of `time.perf_counter` on its machine."""

    posts: dict[Post, float] = field(default_factory=dict[Post, float])
    waits: list[Wait] = field(default_factory=list[Wait])
    flights: list[Flight] = field(default_factory=list[Flight])
    counts: Counter[Hashable] = field(default_factory=Counter[Hashable])

    def number(self, name: Hashable) -> int:
        """How often this rank has done something of that name, this time included."""
        self.counts[name] += 1
        return self.counts[name]


@dataclass(eq=False)
class Record:
    """What was sent and received inside a `record()` block, as seen from this rank."""

    messages: int = 0
    bytes: int = 0
    waited: float = 0.0
    """Seconds spent only waiting for messages."""
    events: list[tuple[str, float, float]] = field(default_factory=list[tuple[str, float, float]])
    named: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """Messages and bytes by name: the operation's, with the layer's if its channels are split."""

    def spans(self, kind: str) -> list[tuple[float, float]]:
        """Start and end of every event of one kind: "transfer" (posted until arrived) or "interior"."""
        return [(start, end) for name, start, end in self.events if name == kind]


class Observed:
    """Something whose messages and waits are counted in records and noted in traces, while any are open."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.traces: list[Trace] = []

    @contextmanager
    def record(self) -> Generator[Record]:
        """Count messages and bytes sent by this rank, and keep times, inside the block."""
        record = Record()
        self.records.append(record)
        try:
            yield record
        finally:
            self.records.remove(record)

    @contextmanager
    def trace(self) -> Generator[Trace]:
        """Note posts and waits of this rank inside the block."""
        trace = Trace()
        self.traces.append(trace)
        try:
            yield trace
        finally:
            self.traces.remove(trace)

    def note(self, name: str, part: Post, when: float, sent: Sequence[int]) -> None:
        """Count messages of a name, of so many bytes each, and note when this rank had done its part."""
        for record in self.records:
            record.messages += len(sent)
            record.bytes += sum(sent)
            if sent:
                messages, before = record.named.get(name, (0, 0))
                record.named[name] = (messages + sum(n > 0 for n in sent), before + sum(sent))
        for trace in self.traces:
            trace.posts[part] = when

    @contextmanager
    def blocked(self, kind: str, needs: Sequence[tuple[int, Post]] = ()) -> Generator[None]:
        """Count the time of a wait in the records, and note it in the traces."""
        if not self.records and not self.traces:
            yield
            return
        start = perf_counter()
        try:
            yield
        finally:
            end = perf_counter()
            for record in self.records:
                record.waited += end - start
            for trace in self.traces:
                trace.waits.append(Wait(kind, start, end, tuple(needs)))

    def appointment(self, kind: str, group: dist.ProcessGroup) -> list[tuple[int, Post]]:
        """What a wait for a collective needs from the other ranks; notes that this rank joins it."""
        ranks = tuple(dist.get_process_group_ranks(group))
        needs: list[tuple[int, Post]] = []
        for trace in self.traces:
            post: Post = (kind, ranks, trace.number((kind, ranks)))
            trace.posts[post] = perf_counter()
            needs = [(rank, post) for rank in ranks if rank != dist.get_rank()]
        return needs

    @contextmanager
    def span(self, kind: str) -> Generator[None]:
        """Mark a stretch of work in the records."""
        start = perf_counter()
        yield
        for record in self.records:
            record.events.append((kind, start, perf_counter()))
