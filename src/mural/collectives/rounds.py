"""A collective as data: rounds, each a list of sends of one chunk from one rank to another.

    source   destination   chunk   reduce
    0      → 1             2       +        rank 1 adds rank 0's chunk 2 to its own
    0      → 1             2       =        rank 1 replaces its chunk 2 by rank 0's

All sends of a round read what their sources held when the round began. Where several reach the same chunk of a rank,
they are applied in the order in which their sources are first listed: that is the order of summation.

A buffer is divided into `chunks` parts as equal as possible. Places beyond these are spare: place `chunk + k * chunks`
is the k-th spare copy of a chunk, for collectives that keep partial sums apart. A send from a rank to itself adds or
copies without a message, after the round's messages have arrived, in the order of the list.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from zlib import crc32

from mural.errors import PlanError


@dataclass(frozen=True, order=True)
class ChunkSend:
    """One chunk that travels in one round.

    >>> print(
    ...     ChunkSend(0, 1, 2, reduce=True), ChunkSend(0, 1, 2, reduce=False), ChunkSend(0, 1, 2, reduce=False, into=5)
    ... )
    0→1 +2 0→1 =2 0→1 5=2
    """

    source: int
    destination: int
    chunk: int
    reduce: bool
    into: int = -1
    """The place at the destination; -1 for the same as at the source."""

    @property
    def place(self) -> int:
        """Where it goes."""
        return self.chunk if self.into < 0 else self.into

    @property
    def local(self) -> bool:
        """Whether it stays on its rank."""
        return self.source == self.destination

    def __str__(self) -> str:
        sign = "+" if self.reduce else "="
        return f"{self.source}→{self.destination} {'' if self.into < 0 else self.into}{sign}{self.chunk}"


Round = tuple[ChunkSend, ...]


@dataclass(frozen=True)
class Collective:
    """What travels between ranks 0 to P - 1, round by round.

    >>> print(Collective("swap", 2, 1, ((ChunkSend(0, 1, 0, True), ChunkSend(1, 0, 0, True)),)))
    swap: 2 ranks, 1 chunk
    round 1   0→1 +0   1→0 +0
    """

    name: str
    ranks: int
    chunks: int
    rounds: tuple[Round, ...]
    blocking: bool = False
    """Whether a rank must finish a round before it sends in the next; otherwise sends leave as early as they can."""

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.chunks < 1:
            raise PlanError(f"{self.name}: {self.ranks} ranks and {self.chunks} chunks; each is at least 1")
        for send in chain.from_iterable(self.rounds):
            if not (0 <= send.source < self.ranks and 0 <= send.destination < self.ranks and send.chunk >= 0):
                raise PlanError(f"{self.name}: {send} names a rank or chunk that is not there, of {self.ranks} ranks")
            if send.place % self.chunks != send.chunk % self.chunks:
                raise PlanError(f"{self.name}: {send} moves a chunk to another's place, of another extent")

    def __str__(self) -> str:
        head = f"{self.name}: {count(self.ranks, 'rank')}, {count(self.chunks, 'chunk')}"
        width = len(str(len(self.rounds)))
        rows = (f"round {n:<{width}}   {'   '.join(map(str, sends))}" for n, sends in enumerate(self.rounds, 1))
        return "\n".join([head, *rows])

    @cached_property
    def digest(self) -> str:
        """Eight digits that identify what travels, the same in every process.

        >>> Collective("ring", 2, 2, ()).digest == Collective("ring", 2, 2, (), blocking=True).digest
        False
        """
        return f"{crc32(f'{self} {self.blocking}'.encode()):08x}"

    @property
    def spares(self) -> int:
        """The most spare copies of chunks that any rank keeps."""
        return max((max(s.chunk, s.place) // self.chunks for s in chain.from_iterable(self.rounds)), default=0)

    def bounds(self, values: int) -> tuple[tuple[int, int], ...]:
        """The bounds of each chunk in a buffer of that many values; the first chunks have one more if need be.

        >>> Collective("ring", 3, 3, ()).bounds(8)
        ((0, 3), (3, 6), (6, 8))
        """
        return divided(values, self.chunks)


def by_pair(sends: Round) -> dict[tuple[int, int], list[ChunkSend]]:
    """The messages of a round for each pair of ranks, pairs and sends in the order of the list; without local ones."""
    found: dict[tuple[int, int], list[ChunkSend]] = {}
    for send in sends:
        if not send.local:
            found.setdefault((send.source, send.destination), []).append(send)
    return found


def count(number: int, noun: str) -> str:
    """A number of things as text."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def divided(values: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Half-open intervals that divide a number of values into parts as equal as possible.

    >>> divided(5, 2), divided(1, 2)
    (((0, 3), (3, 5)), ((0, 1), (1, 1)))
    """
    small, more = divmod(values, parts)
    starts = [small * part + min(part, more) for part in range(parts + 1)]
    return tuple(pairwise(starts))


def joined(name: str, *parts: Collective) -> Collective:
    """One collective after the other, over the same ranks and chunks."""
    if len({(part.ranks, part.chunks) for part in parts}) != 1:
        raise PlanError(f"{name}: its parts differ in ranks or chunks: {[(p.ranks, p.chunks) for p in parts]}")
    return Collective(name, parts[0].ranks, parts[0].chunks, tuple(chain.from_iterable(p.rounds for p in parts)))


def among(collective: Collective, members: Sequence[int], ranks: int) -> Collective:
    """The same collective among some ranks of a larger group, in their order.

    >>> print(among(Collective("pass on", 2, 1, ((ChunkSend(0, 1, 0, True),),)), (3, 1), 4))
    pass on: 4 ranks, 1 chunk
    round 1   3→1 +0
    """
    if len(set(members)) != collective.ranks:
        raise PlanError(f"{collective.name} has {collective.ranks} ranks, but {list(members)} were named")
    rounds = tuple(
        tuple(ChunkSend(members[s.source], members[s.destination], s.chunk, s.reduce, s.into) for s in sends)
        for sends in collective.rounds
    )
    return Collective(collective.name, ranks, collective.chunks, rounds)


def simultaneous(name: str, parts: Iterable[Collective]) -> Collective:
    """Collectives of disjoint ranks, run at the same time, round by round."""
    found = list(parts)
    most = max(len(part.rounds) for part in found)
    rounds = tuple(
        tuple(chain.from_iterable(part.rounds[n] for part in found if n < len(part.rounds))) for n in range(most)
    )
    return Collective(name, found[0].ranks, found[0].chunks, rounds)


def whole(collective: Collective, chunks: int) -> Collective:
    """A collective of one chunk, changed to move several chunks in the same rounds."""
    if collective.chunks != 1:
        raise PlanError(f"{collective.name} has {collective.chunks} chunks already: give one with a single chunk")
    rounds = tuple(
        tuple(ChunkSend(s.source, s.destination, chunk, s.reduce) for s in sends for chunk in range(chunks))
        for sends in collective.rounds
    )
    return Collective(collective.name, collective.ranks, chunks, rounds)


def pipelined(collective: Collective, chunks: int) -> Collective:
    """A collective of one chunk, changed to a pipeline of several chunks: chunk k starts k rounds after chunk 0.

    one chunk    round 1   0→1 =0          three chunks   round 1   0→1 =0
                 round 2   1→2 =0                         round 2   1→2 =0   0→1 =1
                                                          round 3   1→2 =1   0→1 =2
                                                          round 4   1→2 =2
    """
    if collective.chunks != 1:
        raise PlanError(f"{collective.name} has {collective.chunks} chunks already: give one with a single chunk")
    length = len(collective.rounds)
    rounds = tuple(
        tuple(
            ChunkSend(s.source, s.destination, chunk, s.reduce)
            for chunk in range(chunks)
            if 0 <= number - chunk < length
            for s in collective.rounds[number - chunk]
        )
        for number in range(length + chunks - 1 if length else 0)
    )
    return Collective(collective.name, collective.ranks, chunks, rounds)
