"""The gauge: how long a round takes over the link at hand, measured by rounds of several sizes that the runner runs.

Six kinds of rounds make the curves: every rank sends at once, or one does, or one exchanges with all others; and what
arrives is added, or replaces. They hold all that a round takes here: latency, Python's part, copies, additions, and
what ranks take from each other.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from mural.comm.algorithms import gather_ring, scatter_ring
from mural.comm.price import Load, Wire
from mural.comm.rounds import Collective, Round, Send
from mural.comm.run import run
from mural.comm.team import Team
from mural.errors import PlanError

SIZES = (2**10, 2**14, 2**17, 2**20, 2**22)
REPEATS, LONGER = 5, 3


@dataclass(frozen=True)
class Curve:
    """Seconds of a round at some sizes of its messages in bytes; straight between them, and beyond the last.

    >>> Curve((1000, 2000), (1.0, 3.0)).at(1500), Curve((1000, 2000), (1.0, 3.0)).at(3000)
    (2.0, 5.0)
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, size: float) -> float:
        """The seconds at a size."""
        if size <= self.sizes[0]:
            return self.seconds[0]
        right = min(bisect_right(self.sizes, size), len(self.sizes) - 1)
        (a, b), (s, t) = self.sizes[right - 1 : right + 1], self.seconds[right - 1 : right + 1]
        return s + (size - a) / (b - a) * max(t - s, 0.0)


@dataclass(frozen=True)
class Kind:
    """Rounds in which what arrives is treated alike, by who sends: every rank, one, or one to or from all others."""

    every: Curve
    one: Curve
    star: Curve

    def at(self, load: Load, ranks: int) -> float:
        """The seconds of a round: between the curves, by how many ranks send and how many messages one rank has."""
        each, others = load.port / max(load.messages, 1), ranks - 1
        alone = self.one.at(each)
        sending = (load.senders / max(load.messages, 1) - 1) / others * (self.every.at(each) - alone)
        crowding = (load.messages - 1) / max(others - 1, 1) * (self.star.at(each) - alone)
        return alone + max(sending, 0.0) + max(crowding, 0.0)


@dataclass(frozen=True)
class Gauge:
    """What rounds take among so many ranks."""

    ranks: int
    added: Kind
    replaced: Kind
    start: float
    """What a call takes besides its rounds."""

    def seconds(self, load: Load) -> float:
        """The time of a round."""
        return (self.added if load.added else self.replaced).at(load, self.ranks)

    @property
    def wire(self) -> Wire:
        """The same as latency and cost per byte, from the smallest and the largest message of one sender."""
        curve = self.replaced.one
        each = max(curve.seconds[-1] - curve.seconds[0], 0.0) / (curve.sizes[-1] - curve.sizes[0])
        return Wire(curve.seconds[0], each, start=self.start)


def gauge(team: Team, sizes: Sequence[int] = SIZES, repeats: int = REPEATS) -> Gauge:
    """What rounds take in this team; the same on every rank. Collective."""
    if team.size < 2:
        raise PlanError("a gauge needs two ranks: one rank has nothing to send")
    found: list[Kind] = []
    starts: list[float] = []
    for reduce, once in ((True, scatter_ring(team.size)), (False, gather_ring(team.size))):
        curves: list[Curve] = []
        for rounds in (once.rounds, echo(reduce), star(team.size, reduce)):
            seconds: list[float] = []
            for size in sizes:
                chunks = once.chunks if rounds is once.rounds else 1
                short, long = (
                    timed(team, Collective("gauge", team.size, chunks, rounds * times), size * chunks, repeats)
                    for times in (1, LONGER)
                )
                seconds.append(max(long - short, long / LONGER / 2) / len(rounds) / (LONGER - 1))
                starts.append(max(short - len(rounds) * seconds[-1], 0.0))
            curves.append(Curve(tuple(map(float, sizes)), tuple(seconds)))
        found.append(Kind(*curves))
    return Gauge(team.size, *found, start=median(starts[:: len(sizes)]))


def echo(reduce: bool) -> tuple[Round, ...]:
    """Two ranks that send to each other in turn."""
    return (Send(0, 1, 0, reduce),), (Send(1, 0, 0, reduce),)


def star(ranks: int, reduce: bool) -> tuple[Round, ...]:
    """One rank to which all others send, or that sends to all others."""
    pairs = [(other, 0) if reduce else (0, other) for other in range(1, ranks)]
    return (tuple(Send(source, destination, 0, reduce) for source, destination in pairs),)


def timed(team: Team, collective: Collective, size: int, repeats: int) -> float:
    """The least seconds of a collective over so many bytes, of the slowest rank each time. Collective."""
    data = torch.zeros(max(size // 4, 1), dtype=torch.float32, device="cpu")
    seconds: list[float] = []
    for _ in range(1 + repeats):
        together(team)
        begun = time.perf_counter()
        run(collective, data, team)
        seconds.append(time.perf_counter() - begun)
    return min(slowest(team, seconds[1:]))


def together(team: Team) -> None:
    """Wait until all ranks have come here."""
    dist.barrier(group=team.group)


def slowest(team: Team, seconds: Sequence[float]) -> list[float]:
    """The seconds of the slowest rank, place by place, the same on every rank. Collective."""
    times = torch.tensor(seconds, dtype=torch.float64, device="cpu")
    if team.backend == "nccl":
        times = times.cuda()
    dist.all_reduce(times, op=dist.ReduceOp.MAX, group=team.group)
    return times.tolist()
