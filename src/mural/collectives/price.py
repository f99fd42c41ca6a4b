"""The price of a collective: seconds by latency and cost per byte, and bytes of working memory, from its rounds.

Let L be the latency of a message, G the seconds per byte, γ the bytes of a value and m the number of values. A round in
which every rank sends one message of c chunks takes L + (c / chunks) γ m G. The sum over rounds gives, if P is a power
of two:

    tree               2 log2 P (L + γ m G)
    butterfly            log2 P (L + γ m G)
    halving-doubling   2 log2 P L + 2 (P - 1) / P γ m G
    ring               2 (P - 1) (L + γ m G / P)

Where messages share a link, their bytes add up: a rank's messages share its port, in each direction; those that leave
a node share the node's; and all share a medium whose seconds per byte are given, such as the memory of one machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import Protocol

from mural.collectives.program import program, segments_of
from mural.collectives.rounds import Collective, Round, by_pair


@dataclass(frozen=True)
class Load:
    """The load of one round on the links, in bytes and messages."""

    messages: int
    """The most that one rank sends, or receives."""
    port: float
    """The most bytes that one rank sends, or receives."""
    outside: float
    """The most bytes that one node sends to others, or receives from them."""
    total: float
    """The bytes of all messages."""
    added: float
    """The most bytes that one rank adds up."""
    handled: int = 1
    """The most messages that one rank sends and receives together: two, where neighbours exchange."""


class RoundTimes(Protocol):
    """A model of how long a round takes."""

    def seconds(self, load: Load) -> float:
        """The time of a round."""
        ...

    @property
    def start(self) -> float:
        """What a call takes besides its rounds."""
        ...


@dataclass(frozen=True)
class Wire:
    """A link by its constants: latency L, seconds per byte G, and those of shared links.

    >>> Wire(1e-5, 1e-9).seconds(Load(1, 1e6, 0, 1e6, 0))
    0.00101
    """

    latency: float
    per_byte: float
    outside_latency: float = 0.0
    """Extra seconds for a message between nodes."""
    outside_per_byte: float = 0.0
    """Seconds per byte of the link by which all ranks of a node reach other nodes."""
    medium_per_byte: float = 0.0
    """Seconds per byte of the medium that all messages share."""
    added_per_byte: float = 0.0
    start: float = 0.0

    def seconds(self, load: Load) -> float:
        """The latency, plus the time of the slowest link."""
        busiest = max(
            load.port * self.per_byte, load.outside * self.outside_per_byte, load.total * self.medium_per_byte
        )
        return self.latency + (self.outside_latency if load.outside else 0) + busiest + load.added * self.added_per_byte


def loads(collective: Collective, size: float, nodes: Sequence[Sequence[int]] = ()) -> list[Load]:
    """The load of each round on the links, for a buffer of so many bytes, over ranks that share nodes."""
    node = {rank: number for number, ranks in enumerate(nodes) for rank in ranks}
    return [load_of(sends, size / collective.chunks, node) for sends in collective.rounds]


def load_of(sends: Round, chunk: float, node: dict[int, int]) -> Load:
    """The load of a round whose chunks have so many bytes."""
    leaving, arriving, out, into = Counter[int](), Counter[int](), Counter[int](), Counter[int]()
    sent, received, added = Counter[int](), Counter[int](), Counter[int]()
    for (source, destination), between in by_pair(sends).items():
        sent[source] += 1
        received[destination] += 1
        leaving[source] += len(between)
        arriving[destination] += len(between)
        if node.get(source) != node.get(destination):
            out[node[source]] += len(between)
            into[node[destination]] += len(between)
    for send in sends:
        added[send.destination] += send.reduce

    def most(*counters: Counter[int]) -> int:
        return max((n for counter in counters for n in counter.values()), default=0)

    return Load(
        messages=most(sent, received),
        port=chunk * most(leaving, arriving),
        outside=chunk * most(out, into),
        total=chunk * sum(leaving.values()),
        added=chunk * most(added),
        handled=most(sent + received),
    )


def cost(collective: Collective, size: float, link: RoundTimes, nodes: Sequence[Sequence[int]] = ()) -> float:
    """Seconds of a collective over a buffer of so many bytes.

    >>> from mural.collectives.algorithms import butterfly, tree
    >>> wire = Wire(latency=1.0, per_byte=0.001)
    >>> cost(tree(8), 1000, wire), cost(butterfly(8), 1000, wire)
    (12.0, 6.0)
    """
    return link.start + sum(link.seconds(load) for load in loads(collective, size, nodes))


def tree_formula(ranks: int, size: float, latency: float, per_byte: float) -> float:
    """T = 2 log2 P (L + γmG), of a reduction and a broadcast by trees; `size` is γm."""
    return 2 * log2(ranks) * (latency + size * per_byte)


def butterfly_formula(ranks: int, size: float, latency: float, per_byte: float) -> float:
    """T = log2 P (L + γmG), of recursive doubling with whole buffers; `size` is γm."""
    return log2(ranks) * (latency + size * per_byte)


def least_latency(ranks: int, latency: float) -> float:
    """No reduction is faster than L log2 P: in a round, a number can at most meet one other."""
    return latency * ceil(log2(ranks))


def least_transfer(size: float, per_byte: float) -> float:
    """No reduction is faster than γmG: every value is sent at least once."""
    return size * per_byte


def working_memory(collective: Collective, values: int, size: int, segmented: bool = True) -> tuple[int, ...]:
    """Bytes that each rank needs besides its buffer of so many values of that size in bytes.

    `segmented`: as it runs; otherwise as the plain algorithm would, with room for what one round brings.

    >>> from mural.collectives.algorithms import butterfly, ring
    >>> working_memory(butterfly(4), 1000, 4, segmented=False), working_memory(ring(4), 1000, 4, segmented=False)
    ((4000, 4000, 4000, 4000), (1000, 1000, 1000, 1000))
    """
    segments = segments_of(collective, values, size) if segmented else 1
    ahead = {} if segmented else {"ahead": 0}
    programs = (program(collective, rank, values, segments, **ahead) for rank in range(collective.ranks))
    return tuple((each.scratch + each.spares) * size for each in programs)
