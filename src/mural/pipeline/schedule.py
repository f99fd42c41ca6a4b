"""A schedule: for each seat, the list of forwards and backwards that it computes, in order.

A *stage* is a piece of the model. A *seat* is a position of the pipeline, 0 to P - 1: one rank, or all ranks of a
spatial grid. A replica of the model has one instance of each stage, and each instance has a seat. The functions here
place stage s on seat s; `interleaved` places several stages on a seat, `gems` two replicas in opposite order.

Every stage takes a replica's micro-batches in ascending order, forward and backward: gradients are added up, and
running statistics move, in the order of a loop over micro-batches on one device.

Tables have a row for each seat and a column for each unit of time. A forward takes one unit, a backward two: a digit
is the forward of that micro-batch, a letter (a for 0, b for 1, …) its backward, a dot is idle time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

from mural.errors import PlanError

Work = Literal["forward", "backward"]


@dataclass(frozen=True, order=True)
class Action:
    """One stage's work on one micro-batch, by one replica of the model.

    >>> print(Action("backward", stage=2, microbatch=5))
    backward of stage 2, micro-batch 5
    """

    kind: Work
    stage: int
    microbatch: int
    replica: int = 0

    def __str__(self) -> str:
        name = f"{self.kind} of stage {self.stage}, micro-batch {self.microbatch}"
        return f"{name}, replica {self.replica}" if self.replica else name


@dataclass(frozen=True)
class Schedule:
    """What each seat computes, in order, and where the stages sit.

    >>> print(one_f_one_b(stages=2, microbatches=3))
    seat 0: F0 F1 B0 F2 B1 B2
    seat 1: F0 B0 F1 B1 F2 B2
    """

    seats: tuple[tuple[Action, ...], ...]
    stages: int
    microbatches: int
    replicas: int
    seat_of: Mapping[tuple[int, int], int] = field(hash=False)
    """The seat of each (replica, stage)."""
    replica_of: tuple[int, ...] = field(default=())
    """The replica that each micro-batch goes through."""

    def __str__(self) -> str:
        return "\n".join(f"seat {seat}: {' '.join(map(self.word, row))}" for seat, row in enumerate(self.seats))

    def word(self, action: Action) -> str:
        """An action in short: F2 is the forward of micro-batch 2, F2@1 that of stage 1 where seats have several stages.

        Replicas need no mark: each micro-batch belongs to one.
        """
        short = f"{action.kind[0].upper()}{action.microbatch}"
        return short if len(self.seat_of) == len(self.seats) else f"{short}@{action.stage}"

    def holds(self, seat: int) -> tuple[tuple[int, int], ...]:
        """The (replica, stage) instances on a seat, in order."""
        return tuple(sorted(instance for instance, where in self.seat_of.items() if where == seat))

    def actions(self) -> tuple[Action, ...]:
        """All actions of a full step of training, whichever seat lists them: what a complete schedule has once each."""
        return tuple(
            Action(kind, stage, microbatch, replica)
            for microbatch, replica in enumerate(self.replica_of)
            for stage in range(self.stages)
            for kind in ("forward", "backward")
        )


def sequential(stages: int, microbatches: int, seats: int | Sequence[int] | None = None) -> Schedule:
    """One micro-batch after the other goes all the way forward and backward: layer parallelism.

    Each seat holds the activations of one micro-batch at most. Two micro-batches over four stages, 24 units:

        0.........aa1.........bb
        .0......aa...1......bb..
        ..0...aa......1...bb....
        ...0aa.........1bb......

    With fewer `seats` than stages, stage s sits on seat s % seats; or `seats` names the seat of each stage.

    >>> print(sequential(stages=2, microbatches=2))
    seat 0: F0 B0 F1 B1
    seat 1: F0 B0 F1 B1
    >>> print(sequential(stages=3, microbatches=1, seats=(0, 1, 0)))
    seat 0: F0@0 F0@2 B0@2 B0@0
    seat 1: F0@1 B0@1
    """
    if isinstance(seats, Sequence):
        places = tuple(seats)
        if len(places) != stages or set(places) != set(range(max(places, default=0) + 1)):
            raise PlanError(f"seats = {places} for {stages} stages: give each stage a seat, and leave none out")
    else:
        positive(stages=stages, microbatches=microbatches, seats=stages if seats is None else seats)
        places = tuple(stage % min(stages, seats or stages) for stage in range(stages))
    positive(stages=stages, microbatches=microbatches)
    rows: list[list[Action]] = [[] for _ in range(max(places) + 1)]
    for microbatch in range(microbatches):
        for stage in range(stages):
            rows[places[stage]].append(Action("forward", stage, microbatch))
        for stage in reversed(range(stages)):
            rows[places[stage]].append(Action("backward", stage, microbatch))
    return replace(in_line(rows, stages, microbatches), seat_of={(0, s): place for s, place in enumerate(places)})


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards: every seat holds the activations of all micro-batches.

    Four micro-batches over three stages, 18 units:

        0123......aabbccdd
        .0123...aabbccdd..
        ..0123aabbccdd....

    >>> print(gpipe(stages=2, microbatches=3))
    seat 0: F0 F1 F2 B0 B1 B2
    seat 1: F0 F1 F2 B0 B1 B2
    """
    positive(stages=stages, microbatches=microbatches)
    rows = [merged(*both(stage, range(microbatches)), ahead=microbatches) for stage in range(stages)]
    return in_line(rows, stages, microbatches)


def one_f_one_b(stages: int, microbatches: int, eager: bool = False) -> Schedule:
    """One forward, one backward in turn, once the pipeline is full: 1F1B.

    Stage s runs S - 1 - s forwards ahead, then alternates: it holds the activations of S - s micro-batches at most,
    however many there are. Four micro-batches over three stages take the 18 units of `gpipe`:

        012....aa3bb.cc.dd      stage 0 holds 3
        .01..aa2bb3cc.dd..      stage 1 holds 2
        ..0aa1bb2cc3dd....      stage 2 holds 1

    In this order every message is waited for: a micro-batch has no slack on its way to the last stage and back. `eager`
    runs twice as many forwards ahead, which overlaps messages with computation, and holds 2 (S - s) - 1 at most.
    """
    positive(stages=stages, microbatches=microbatches)
    factor = 2 if eager else 1
    rows = [merged(*both(stage, range(microbatches)), factor * (stages - 1 - stage)) for stage in range(stages)]
    return in_line(rows, stages, microbatches)


def forward_only(schedule: Schedule) -> Schedule:
    """The same placement and order without backwards: inference.

    >>> print(forward_only(one_f_one_b(stages=2, microbatches=3)))
    seat 0: F0 F1 F2
    seat 1: F0 F1 F2
    """
    rows = tuple(tuple(action for action in row if action.kind == "forward") for row in schedule.seats)
    return replace(schedule, seats=rows)


# ------------------------------------------------------------------------------------------------------------ parts


def both(stage: int, microbatches: Iterable[int], replica: int = 0) -> tuple[list[Action], list[Action]]:
    """The forwards and the backwards of a stage, in order."""
    order = list(microbatches)
    forwards = [Action("forward", stage, microbatch, replica) for microbatch in order]
    return forwards, [Action("backward", stage, microbatch, replica) for microbatch in order]


def merged(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> list[Action]:
    """Two lists as one: some forwards ahead, then one forward and one backward in turn, then the other backwards."""
    ahead = min(ahead, len(forwards))
    row = list(forwards[:ahead])
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        row += (forward, backward)
    return row + list(backwards[len(forwards) - ahead :])


def in_line(rows: Iterable[Sequence[Action]], stages: int, microbatches: int) -> Schedule:
    """The schedule of one replica whose stage s sits on seat s % P."""
    seats = tuple(map(tuple, rows))
    places = {(0, stage): stage % len(seats) for stage in range(stages)}
    return Schedule(seats, stages, microbatches, 1, places, (0,) * microbatches)


def positive(**sizes: int) -> None:
    """Raise unless all sizes are at least 1."""
    for name, size in sizes.items():
        if size < 1:
            raise PlanError(f"{name} = {size}: a schedule needs at least one; give {name} = 1 or more")


# -- interleaved 1F1B --------------------------------------------------------------------------------------------------


def interleaved(seats: int, chunks: int, microbatches: int) -> Schedule:
    """A 1F1B order of `seats` × `chunks` stages, stage s on seat s % seats, for any number of micro-batches.

    Two seats and two chunks, for four micro-batches (two groups) and for three (one group):

        01012.aa3bb2aa3bb.cc.ddccdd        012012.aa.bb.ccaabbcc
        .010aa1bb2aa3bb2cc3ddccdd..        .0120aa1bb2ccaabbcc..

    >>> print(interleaved(seats=2, chunks=2, microbatches=3))
    seat 0: F0@0 F1@0 F2@0 F0@2 F1@2 F2@2 B0@2 B1@2 B2@2 B0@0 B1@0 B2@0
    seat 1: F0@1 F1@1 F2@1 F0@3 B0@3 F1@3 B1@3 F2@3 B2@3 B0@1 B1@1 B2@1
    """
    positive(seats=seats, chunks=chunks, microbatches=microbatches)
    groups = grouped(microbatches, seats)
    largest = max(map(len, groups))
    rows: list[list[Action]] = []
    for seat in range(seats):
        stages = range(seat, seats * chunks, seats)
        forwards = [Action("forward", s, m) for group in groups for s in stages for m in group]
        backwards = [Action("backward", s, m) for group in groups for s in reversed(stages) for m in group]
        rows.append(merged(forwards, backwards, ahead=2 * (seats - 1 - seat) + (chunks - 1) * largest))
    return in_line(rows, seats * chunks, microbatches)


def grouped(microbatches: int, size: int) -> list[range]:
    """Consecutive groups of near-equal size, as many as can have at least `size` members; one if there are fewer.

    >>> grouped(11, 4)
    [range(0, 5), range(5, 11)]
    """
    count = max(1, microbatches // size)
    bounds = [microbatches * i // count for i in range(count + 1)]
    return [range(a, b) for a, b in pairwise(bounds)]
