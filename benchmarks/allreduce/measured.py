"""Every algorithm and the backend's own all-reduce, side by side: seconds against bytes and ranks, and predictions.

The calls take turns, so that whatever else the machine does meets all alike; a time is that of the slowest rank. The
prediction of an algorithm comes from rounds of other sizes that were measured before
(`mural.collectives.link_costs`), not from the algorithm itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mural.collectives import all_reduce
from mural.collectives.algorithms import ALGORITHMS
from mural.collectives.choose import BACKEND, rounds_of
from mural.collectives.link_costs import gauge, slowest, together
from mural.collectives.price import cost, working_memory
from mural.collectives.team import Team, team_of

LEAST, MOST = 5, 101
"""Repetitions of each call."""
GAUGINGS = 9
"""Repetitions of each sample of the gauge."""
LONG = 8
"""A call that would take more than this part of the time for a size is not repeated."""


def measure(rank: int, sizes: list[int], seconds: float, gauged: list[int]) -> dict[str, Any]:
    """All sizes on the ranks at hand; the same answer on every rank."""
    team = team_of(None)
    found = gauge(team, gauged, GAUGINGS)
    records: list[dict[str, Any]] = []
    for size in sizes:
        times = taken(team, size, seconds)
        for name, measured in times.items():
            record: dict[str, Any] = {"ranks": team.size, "bytes": size, "algorithm": name, "seconds": measured}
            if name != BACKEND:
                rounds = rounds_of(name, team.nodes, False)
                record["predicted"] = cost(rounds, size, found, team.nodes)
                record["memory"] = max(working_memory(rounds, size // 4, 4))
                record["memory_by_itself"] = max(working_memory(rounds, size // 4, 4, segmented=False))
            records.append(record)
        if rank == 0:
            base = median(times[BACKEND])
            words = ", ".join(f"{name} {median(t) / base:.2f}" for name, t in times.items() if name != BACKEND)
            print(
                f"{team.size} ranks, {size:>11,} bytes: {base * 1e6:>9,.0f} µs by {team.backend}; {words}", flush=True
            )
    wire = found.wire
    constants = {"latency": wire.latency, "per_byte": wire.per_byte, "start": wire.start, "gauge": asdict(found)}
    return {"records": records, "constants": constants}


def taken(
    team: Team,
    size: int,
    seconds: float,
    names: Iterable[str] = tuple(ALGORITHMS),
    more: Mapping[str, Callable[[Tensor], object]] | None = None,
    row: int = 1,
) -> dict[str, list[float]]:
    """The seconds of every call over so many bytes, one after the other and then again, in about that many seconds.

    `more` are other calls to measure. A time is the mean of a `row` of the same call.
    """
    data = torch.ones(size // 4)
    calls: dict[str, Callable[[], object]] = {BACKEND: lambda: dist.all_reduce(data, group=team.group)}
    # In a group, as gradients are averaged: without one, ranks ask each time whether all are there.
    calls |= {name: lambda name=name: all_reduce(data, name, team.group) for name in names}
    calls |= {name: lambda call=call: call(data) for name, call in (more or {}).items()}
    first = {name: min(timed(team, call, data, row) for _ in range(2)) for name, call in calls.items()}
    agreed = dict(zip(first, slowest(team, list(first.values())), strict=True))
    again = {name: call for name, call in calls.items() if agreed[name] < seconds / LONG}
    each = row * max(sum(agreed[name] for name in again), 1e-9)
    repeats = int(min(max(seconds / each, LEAST), MOST)) if again else 0
    found: dict[str, list[float]] = {name: [] for name in again}
    for number in range(repeats):
        for name in list(again) if number % 2 else reversed(again):
            found[name].append(timed(team, again[name], data, row))
    alone = {name: [agreed[name]] for name in calls if name not in again}
    return {name: alone.get(name) or slowest(team, found[name]) for name in calls}


def timed(team: Team, call: Callable[[], object], data: Tensor, row: int = 1) -> float:
    """The seconds of one call on this rank, the mean of some in a row."""
    data.fill_(1.0)
    together(team)
    begun = time.perf_counter()
    for _ in range(row):
        call()
    return (time.perf_counter() - begun) / row
