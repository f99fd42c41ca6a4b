"""GEMS: two replicas of the model in opposite order on the same seats, so that one works where the other waits.

Replica 0 has stage s on seat s, replica 1 on seat S - 1 - s. The first half of the micro-batches goes through replica
0, the second through replica 1 (a single one leaves replica 1 without work). The gradients of the two are added up at
the end of the step. `replications` says how often the pair takes turns before that (GEMS-MASTER's factor, `--times` in
MPI4DL): each half is divided into that many turns, empty ones left out.

`order` says how closely the turns follow each other. For 4 stages and 2 images, image 0 (backward a) going down
through replica 0 and image 1 (backward b) up through replica 1; one direction alone, `sequential`, takes 24 units:

    "lean", 21 units             "interleaved", 12 units
    0.........aa1bb......        0..1bb....aa
    .0......aa1....bb....        .01...bbaa..
    ..0...aa1........bb..        .10...aabb..
    ...0aa1............bb        1..0aa....bb

For 4 images, 0 and 1 through replica 0, 2 and 3 through replica 1:

    "pipelined", 27 units              "interleaved", 16 units    with 2 replications, 24 units
    01........aa.bb2cc3dd......        01.2cc3dd.aa..bb           0..2cc....aa1..3dd....bb
    .01.....aa.bb23...cc.dd....        .0213.ccaaddbb..           .02...ccaa...13...ddbb..
    ..01..aa.bb23.......cc.dd..        .2031.aaccbbdd..           .20...aacc...31...bbdd..
    ...0aa1bb23...........cc.dd        23.0aa1bb.cc..dd           2..0aa....cc3..1bb....dd
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from mural.errors import PlanError
from mural.pipeline.schedule import Action, Schedule, both, merged, positive

Order = Literal["lean", "pipelined", "interleaved"]


def gems(stages: int, microbatches: int, replications: int = 1, order: Order = "interleaved") -> Schedule:
    """Two replicas in opposite order.

    - "lean": one replica at a time, and of it one micro-batch at a time, as in GEMS and in MPI4DL: a seat holds the
      activations of one micro-batch.
    - "pipelined": one replica at a time, the micro-batches of its turn as 1F1B (MPI4DL's `--parts`, which takes all
      forwards of a turn first: the same time for more memory).
    - "interleaved": every action of both replicas as soon as it can run. An instance of stage s holds S - s
      micro-batches at most, as under 1F1B, and no more than one turn's; a seat S + 1.

    >>> print(gems(stages=4, microbatches=2, order="lean"))
    seat 0: F0@0 B0@0 F1@3 B1@3
    seat 1: F0@1 B0@1 F1@2 B1@2
    seat 2: F0@2 B0@2 F1@1 B1@1
    seat 3: F0@3 B0@3 F1@0 B1@0
    >>> print(gems(stages=4, microbatches=2, order="interleaved"))
    seat 0: F0@0 F1@3 B1@3 B0@0
    seat 1: F0@1 F1@2 B1@2 B0@1
    seat 2: F1@1 F0@2 B0@2 B1@1
    seat 3: F1@0 F0@3 B0@3 B1@0
    """
    positive(stages=stages, microbatches=microbatches, replications=replications)
    if order not in ("lean", "pipelined", "interleaved"):
        raise PlanError(f'order = {order!r}: GEMS runs "lean", "pipelined" or "interleaved"')
    half = (microbatches + 1) // 2
    halves = (range(half), range(half, microbatches))
    if order == "interleaved":
        most = -(-half // min(replications, half))
        rows = greedy([[Lane(both(s, halves[r], r), min(stages - s, most)) for r, s in two] for two in pairs(stages)])
    else:
        each = [turns(half, replications) for half in halves]
        rows = [one_by_one(two, each, stages if order == "pipelined" else 0) for two in pairs(stages)]
    places = {instance: seat for seat, two in enumerate(pairs(stages)) for instance in two}
    owners = tuple(int(m >= half) for m in range(microbatches))
    return Schedule(tuple(map(tuple, rows)), stages, microbatches, 2, places, owners)


def pairs(stages: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """The two (replica, stage) instances of each seat."""
    return [((0, seat), (1, stages - 1 - seat)) for seat in range(stages)]


def turns(microbatches: range, replications: int) -> list[range]:
    """A replica's micro-batches, divided into turns of near-equal size; some are empty where there are too few.

    >>> turns(range(5, 10), 2)
    [range(5, 8), range(8, 10)]
    """
    bounds = [-(-len(microbatches) * i // replications) for i in range(replications + 1)]
    return [microbatches[a:b] for a, b in pairwise(bounds)]


def one_by_one(two: Sequence[tuple[int, int]], each: Sequence[Sequence[range]], depth: int) -> list[Action]:
    """A seat's actions when turns follow each other: replica 0's first, replica 1's first, replica 0's second, …

    In a turn, stage s runs `depth` - 1 - s forwards ahead. All seats take the turns in this order, so no turn waits for
    a later one.
    """
    row: list[Action] = []
    for parts in zip(*each, strict=True):
        for (replica, stage), part in zip(two, parts, strict=True):
            row += merged(*both(stage, part, replica), ahead=max(0, depth - 1 - stage))
    return row


class Lane:
    """What one instance still has to do, and how many micro-batches it may hold."""

    def __init__(self, work: tuple[list[Action], list[Action]], limit: int) -> None:
        self.forwards, self.backwards = work
        self.limit, self.forward, self.backward = limit, 0, 0

    def candidates(self) -> list[tuple[tuple[int, int, int], Action, Lane]]:
        """What may come next, by urgency: forwards (within the limit) first, the older micro-batch, the later stage."""
        found: list[tuple[tuple[int, int, int], Action, Lane]] = []
        if self.forward < len(self.forwards) and self.forward - self.backward < self.limit:
            action = self.forwards[self.forward]
            found.append(((0, self.forward, -action.stage), action, self))
        if self.backward < self.forward:
            action = self.backwards[self.backward]
            found.append(((1, self.backward, -action.stage), action, self))
        return found

    def take(self, action: Action) -> None:
        """Count it as begun."""
        if action.kind == "forward":
            self.forward += 1
        else:
            self.backward += 1


def greedy(lanes: Sequence[Sequence[Lane]]) -> list[list[Action]]:
    """Each seat's actions when it always begins the most urgent one that can run (forward 1 unit, backward 2).

    It cannot stall: the oldest unfinished micro-batch of a replica finds every instance within its limit, since an
    instance holds only older ones, and there are none.
    """
    stages, left = len(lanes), sum(len(lane.forwards) + len(lane.backwards) for seat in lanes for lane in seat)
    rows: list[list[Action]] = [[] for _ in lanes]
    finished: dict[Action, int] = {}
    free, now = [0] * stages, 0
    while left:
        for seat, two in enumerate(lanes):
            options = sorted((c for lane in two for c in lane.candidates()), key=lambda option: option[0])
            able = [o for o in options if all(finished.get(d, now + 1) <= now for d in before(o[1], stages))]
            if free[seat] <= now and able:
                _, action, lane = able[0]
                lane.take(action)
                rows[seat].append(action)
                free[seat] = finished[action] = now + (1 if action.kind == "forward" else 2)
                left -= 1
        now = min((t for t in free if t > now), default=now)
    return rows


def before(action: Action, stages: int) -> list[Action]:
    """The actions whose results an action needs, in a chain of stages."""
    stage, microbatch, replica = action.stage, action.microbatch, action.replica
    if action.kind == "forward":
        return [Action("forward", stage - 1, microbatch, replica)] if stage else []
    needed = [Action("forward", stage, microbatch, replica)]
    return needed + ([Action("backward", stage + 1, microbatch, replica)] if stage + 1 < stages else [])
