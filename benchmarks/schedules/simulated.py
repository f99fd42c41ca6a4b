"""Every schedule on the timeline, in units: a seat's share of the model takes 1 forward and 2 backward, and keeps 1.

So schedules of one row do the same work on the same seats: P seats and M micro-batches take one device 3 P M units.
Where a seat has two chunks, each is half of its share. «Peak» is the most that a seat keeps for backward, in
activations of one micro-batch on one seat. The second makespan has messages that take 0.2 units each and travel while
seats compute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mural.pipeline.gems import gems
from mural.pipeline.schedule import Schedule, gpipe, interleaved, one_f_one_b, sequential
from mural.pipeline.timeline import StageCosts, Timeline, simulate
from mural.pipeline.transfers import Edge, with_messages

SEATS = (2, 3, 4, 6, 8, 12, 16)
MICROBATCHES = (1, 2, 4, 8, 16, 32)
CHUNKS = 2
MESSAGE = 0.2
KEPT = 1000
"""Bytes that stand for 1."""

SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "sequential": sequential,
    "GPipe": gpipe,
    "1F1B": one_f_one_b,
    "1F1B eager": lambda seats, microbatches: one_f_one_b(seats, microbatches, eager=True),
    "interleaved": lambda seats, microbatches: interleaved(seats, CHUNKS, microbatches),
    "GEMS lean": lambda seats, microbatches: gems(seats, microbatches, max(1, microbatches // 2), "lean"),
    "GEMS pipelined": lambda seats, microbatches: gems(seats, microbatches, 1, "pipelined"),
    "GEMS interleaved": lambda seats, microbatches: gems(seats, microbatches),
}
EXAMPLE = {
    "sequential: one direction alone": lambda: sequential(4, 2),
    "GEMS lean: one replica at a time, the order of MPI4DL": lambda: gems(4, 2, order="lean"),
    "GEMS interleaved": lambda: gems(4, 2),
}
"""Four stages and two images."""


def played(schedule: Schedule, latency: float = 0.0) -> Timeline:
    """The timeline of a schedule whose stages pass one value on to the next."""
    program = with_messages(schedule, [Edge((s, 0), s, (s + 1,)) for s in range(schedule.stages - 1)])
    share = len(schedule.seats) / schedule.stages
    costs = StageCosts(
        forward=(share,) * schedule.stages,
        backward=(2 * share,) * schedule.stages,
        kept=(round(KEPT * share),) * schedule.stages,
        latency=latency,
    )
    return simulate(program, costs)


def case(name: str, seats: int, microbatches: int) -> dict[str, Any]:
    """What one schedule takes."""
    schedule = SCHEDULES[name](seats, microbatches)
    free = played(schedule)
    return {
        "schedule": name,
        "seats": seats,
        "microbatches": microbatches,
        "makespan": free.makespan,
        "bubble": sum(free.idle) / seats,
        "peak": max(free.peak) / KEPT,
        "replicas": schedule.replicas,
        "makespan_with_messages": played(schedule, MESSAGE).makespan,
    }


def measure(quick: bool) -> list[dict[str, Any]]:
    """All cases."""
    seats, microbatches = (SEATS[1:3], MICROBATCHES[1:3]) if quick else (SEATS, MICROBATCHES)
    return [case(name, p, m) for p in seats for m in microbatches for name in SCHEDULES]


def example() -> dict[str, Timeline]:
    """The timelines of four stages and two images."""
    return {name: played(make()) for name, make in EXAMPLE.items()}
