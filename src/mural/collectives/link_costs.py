"""The gauge: what rounds cost over the actual link, as a few constants fitted to measured rounds.

A call takes `start` seconds, and each of its rounds the sum of

    latency                     once
    message                     for each message that the busiest rank sends or receives, but the first
    per_byte                    for each byte of the busiest rank
    first_per_byte              for each byte of its messages' first segments: nothing overlaps with these
    medium_per_byte             for each byte of all ranks, who share the memory of a machine
    added_per_byte              for each byte that the busiest rank adds
    outside, outside_per_byte   where messages leave a node, and for each byte of the busiest node

These are L and G of the formulas, plus what the formulas leave out. The samples are rounds in a ring, between two
ranks, in pairs and around one rank, once and three times in succession, so that the start and the rounds can be told
apart. In each, ranks forward what they have just received: otherwise sends would leave ahead of their rounds. The
samples take turns, since a call that follows others of its kind is faster than one in a program that does other things
in between.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from mural.collectives.execute import run
from mural.collectives.price import Load, Wire, loads
from mural.collectives.program import SEGMENT_BYTES
from mural.collectives.rounds import ChunkSend, Collective, Round
from mural.collectives.team import Team
from mural.errors import PlanError

SIZES = (2**10, 2**14, 2**17, 2**20, 2**22)
REPEATS, LONGER = 5, 3
REFITS, SURE = 20, 0.05
"""How often samples are reweighted: those that are far off count less, and none counts more than those within 5%."""

Table = NDArray[np.float64]


@dataclass(frozen=True)
class Gauge:
    """What a call takes, in seconds.

    >>> Gauge(latency=1.0, per_byte=0.5).seconds(Load(1, 10, 0, 10, 0))
    6.0
    """

    start: float = 0.0
    latency: float = 0.0
    message: float = 0.0
    per_byte: float = 0.0
    first_per_byte: float = 0.0
    medium_per_byte: float = 0.0
    added_per_byte: float = 0.0
    outside: float = 0.0
    outside_per_byte: float = 0.0

    def seconds(self, load: Load) -> float:
        """The time of a round."""
        return sum(constant * times for constant, times in zip(astuple(self)[1:], asked(load), strict=True))

    @property
    def wire(self) -> Wire:
        """The same as latency and cost per byte of a single message."""
        alone = self.per_byte + self.first_per_byte + self.medium_per_byte
        return Wire(self.latency, alone, self.outside, self.outside_per_byte, start=self.start)


def asked(load: Load) -> tuple[float, ...]:
    """How often a round needs each constant but the start."""
    first = min(load.port, max(load.messages, 1) * SEGMENT_BYTES)
    left = float(load.outside > 0)
    return 1.0, max(load.handled, 1) - 1, load.port, first, load.total, load.added, left, load.outside


def gauge(team: Team, sizes: Sequence[int] = SIZES, repeats: int = REPEATS) -> Gauge:
    """What calls take in this team, fitted to messages of these bytes; the same on every rank. Collective."""
    if team.size < 2:
        raise PlanError("a gauge needs two ranks: one rank has nothing to send")
    rows: list[list[float]] = []
    taken: list[float] = []
    for size in sizes:
        cases = {each: size * each.chunks for each in samples(team.size)}
        needs = ([asked(load) for load in loads(each, whole, team.nodes)] for each, whole in cases.items())
        rows += [[1.0, *map(sum, zip(*need, strict=True))] for need in needs]
        taken += timed(team, cases, repeats)
    found = torch.from_numpy(fitted(np.array(rows), np.array(taken)))
    return Gauge(*agreed(team, found))


def samples(ranks: int) -> Iterator[Collective]:
    """Rounds of each kind, once and several times in succession."""
    neighbours = [(rank, rank ^ 1) for rank in range(ranks) if rank ^ 1 < ranks]
    around = [(other, 0) for other in range(1, ranks)]
    for times in (1, LONGER):
        for reduce in (True, False):
            yield Collective("gauged ring", ranks, ranks, circling(ranks, times * (ranks - 1), reduce))
            yield sample("gauged echo", ranks, [([(0, 1)], reduce), ([(1, 0)], reduce)] * times)
            yield sample("gauged pairs", ranks, [(neighbours, reduce)] * times)
        yield sample("gauged star", ranks, [(around, True), ([(b, a) for a, b in around], False)] * times)


def circling(ranks: int, rounds: int, reduce: bool) -> tuple[Round, ...]:
    """Rounds of a ring, in each of which every rank forwards the chunk that it has just received."""
    return tuple(
        tuple(ChunkSend(rank, (rank + 1) % ranks, (rank - 1 - n) % ranks, reduce) for rank in range(ranks))
        for n in range(rounds)
    )


def sample(name: str, ranks: int, rounds: Sequence[tuple[Sequence[tuple[int, int]], bool]]) -> Collective:
    """Rounds of whole buffers between some ranks, which are added or replace what was there."""
    sends = (tuple(ChunkSend(a, b, 0, reduce) for a, b in between) for between, reduce in rounds)
    return Collective(name, ranks, 1, tuple(sends))


def fitted(rows: Table, seconds: Table) -> Table:
    """The constants, none below zero, that explain the seconds with the least relative error."""
    scaled = rows / seconds[:, None]
    units = np.maximum(scaled.max(0), np.finfo(float).tiny)
    weights = np.ones(len(seconds))
    found = np.zeros(rows.shape[1])
    for _ in range(REFITS):
        found = none_negative(scaled / units * weights[:, None], weights)
        weights = 1 / np.sqrt(np.maximum(np.abs(scaled / units @ found - 1), SURE))
    return found / units


def none_negative(rows: Table, wanted: Table) -> Table:
    """The least-squares weights of columns; columns whose weight would be negative are dropped one by one."""
    kept = [column for column in range(rows.shape[1]) if rows[:, column].any()]
    found = np.zeros(rows.shape[1])
    while kept:
        some = np.linalg.lstsq(rows[:, kept], wanted, rcond=None)[0]
        if some.min() >= 0:
            found[kept] = some
            break
        kept.pop(int(some.argmin()))
    return found


def timed(team: Team, cases: Mapping[Collective, int], repeats: int) -> list[float]:
    """The median seconds of collectives of so many bytes, timed in turn on the slowest rank. Collective."""
    data = torch.zeros(max(*cases.values(), 4) // 4, dtype=torch.float32, device="cpu")
    seconds: list[list[float]] = [[] for _ in cases]
    for _ in range(1 + repeats):
        for mine, (collective, size) in zip(seconds, cases.items(), strict=True):
            part = data[: max(size // 4, 1)].zero_()
            together(team)
            begun = time.perf_counter()
            run(collective, part, team)
            mine.append(time.perf_counter() - begun)
    return [median(slowest(team, mine[1:])) for mine in seconds]


def together(team: Team, words: str = "a meeting before a measured call") -> None:
    """Wait until all ranks are here."""
    with team.calling(words):
        dist.barrier(group=team.group)


def slowest(team: Team, seconds: Sequence[float]) -> list[float]:
    """The seconds of the slowest rank for each entry, the same on every rank. Collective."""
    return agreed(team, torch.tensor(seconds, dtype=torch.float64, device="cpu"))


def agreed(team: Team, numbers: torch.Tensor) -> list[float]:
    """The elementwise maximum of all ranks' numbers, the same bits on every rank. Collective."""
    with team.calling(f"an agreement on {len(numbers)} measured numbers"):
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=team.group)
    return numbers.tolist()
