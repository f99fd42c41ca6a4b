"""Messages: what crosses between seats, put into each seat's list where it is sent and where its receive is posted.

A tensor goes straight from the stage that makes it to every stage that uses it; its gradient comes straight back from
each. Stages on one seat need no message. Channels have no tags (NCCL ignores them): between two seats, each direction
is one queue, and its n-th send meets its n-th receive. So the order of receives is part of the program:

    seat 0    F0 [send 1]  F1 [send 2]  F2 [send 3]         sends come right after what makes them:
                                                            that is the order of the channel from 0 to 1
    seat 1    [post 1]  A  [post 2, 3]  B  C  D  E          C needs 3, E needs 2: by itself, 2 would be posted before
                        1                  3     2          D; but 3 is wanted before B, and 2 comes before 3

Each receive is wanted `prefetch` actions ahead of the one that needs it (1: its bytes travel while the action before
runs), and no earlier, since its buffer exists from then on. Where a later message of the channel is wanted earlier, it
takes those before it along: a receive is posted at the earliest place that it or any later one of its channel wants.
So all receives of a channel are posted in the order of its sends, and before they are needed.

Why this cannot deadlock: posts do not block, so a seat stops only before an action, for a message whose receive it has
posted and whose send comes right after the action that makes it. The schedule orders all actions so that each comes
after those that it needs and after those before it in its list. If all seats stood still, take the first action in
that order that has not run: its seat has come to it, all that it needs has run and was sent, so it does not wait. The
argument needs a queue for each direction: NCCL runs all messages of two ranks in one group one after the other, so
there messages to higher seats and messages to lower ones go through two groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mural.errors import PlanError
from mural.pipeline.schedule import Action, Schedule, Work


@dataclass(frozen=True)
class Edge:
    """A tensor that one stage makes and later stages use; with `gradient`, each of them sends its gradient back."""

    value: tuple[int | str, int]
    """Who made it in the graph, and which of its outputs it is."""
    producer: int
    consumers: tuple[int, ...]
    gradient: bool = True
    bytes: int = 0
    """Of one micro-batch."""


@dataclass(frozen=True)
class Parcel:
    """What one message carries: an edge's value ("forward") or its gradient ("backward") for one micro-batch."""

    edge: Edge
    work: Work
    source: int
    """The stage that makes it: the producer of a value, the consumer for a gradient."""
    target: int
    """The stage that needs it."""
    microbatch: int
    replica: int = 0

    @property
    def made_by(self) -> Action:
        """The action after which it is sent."""
        return Action(self.work, self.source, self.microbatch, self.replica)

    @property
    def needed_by(self) -> Action:
        """The action that waits for it."""
        return Action(self.work, self.target, self.microbatch, self.replica)

    def __str__(self) -> str:
        what = "value" if self.work == "forward" else "gradient"
        source, pick = self.edge.value
        name = f"{what} {source}{f'[{pick}]' if pick else ''} of micro-batch {self.microbatch}"
        return f"{name} (stage {self.source} to {self.target})"


@dataclass(frozen=True)
class Send:
    """Begin to send; its bytes have to stay as they are until it is complete."""

    parcel: Parcel
    peer: int
    """The seat that receives it."""


@dataclass(frozen=True)
class Receive:
    """Make a buffer and begin to receive; the parcel's `needed_by` waits for it."""

    parcel: Parcel
    peer: int
    """The seat that sends it."""


Step = Action | Send | Receive


@dataclass(frozen=True)
class Program:
    """Each seat's full list: computing and messages, in order."""

    schedule: Schedule
    edges: tuple[Edge, ...]
    seats: tuple[tuple[Step, ...], ...]


def with_messages(schedule: Schedule, edges: Iterable[Edge], prefetch: int = 1) -> Program:
    """The program of a schedule: its actions, with a send after what makes each parcel and its receive posted in time.

    >>> from mural.pipeline.schedule import gpipe
    >>> program = with_messages(gpipe(stages=2, microbatches=1), [Edge(("x", 0), 0, (1,))])
    >>> for seat in program.seats:
    ...     print(", ".join(type(step).__name__ if not isinstance(step, Action) else step.kind for step in seat))
    Receive, forward, Send, backward
    Receive, forward, backward, Send
    """
    edges = tuple(edges)
    check_edges(edges, schedule.stages)
    if prefetch < 0:
        raise PlanError(f"prefetch = {prefetch}: give the number of actions a receive is posted ahead, 0 or more")
    sends = {(seat, i): [] for seat, row in enumerate(schedule.seats) for i in range(len(row))}
    channels: dict[tuple[int, int], list[Parcel]] = {}
    for seat, row in enumerate(schedule.seats):
        for index, action in enumerate(row):
            for parcel in made_by(action, edges):
                peer = schedule.seat_of[parcel.replica, parcel.target]
                if peer != seat:
                    sends[seat, index].append(Send(parcel, peer))
                    channels.setdefault((seat, peer), []).append(parcel)
    places = [{action: index for index, action in enumerate(row)} for row in schedule.seats]
    posts: dict[tuple[int, int], list[Receive]] = {}
    for (source, seat), parcels in sorted(channels.items()):
        for index, parcel in zip(posting(parcels, places[seat], prefetch), parcels, strict=True):
            posts.setdefault((seat, index), []).append(Receive(parcel, source))
    rows: list[tuple[Step, ...]] = []
    for seat, row in enumerate(schedule.seats):
        steps = [(*posts.get((seat, i), ()), action, *sends[seat, i]) for i, action in enumerate(row)]
        rows.append(tuple(step for group in steps for step in group))
    return Program(schedule, edges, tuple(rows))


def posting(parcels: Sequence[Parcel], places: Mapping[Action, int], prefetch: int) -> list[int]:
    """Before which action of a seat each receive of one channel is posted: in order, and as late as that allows."""
    found: list[int] = []
    for parcel in reversed(parcels):
        wanted = max(0, places[parcel.needed_by] - prefetch)
        found.append(min(wanted, found[-1]) if found else wanted)
    return found[::-1]


def made_by(action: Action, edges: Iterable[Edge]) -> list[Parcel]:
    """What an action makes for other stages, those first that need it first."""
    return sorted(crossing(action, edges, outward=True), key=lambda parcel: abs(parcel.source - parcel.target))


def needed_by(action: Action, edges: Iterable[Edge]) -> list[Parcel]:
    """What an action needs from other stages, in the order in which a runner waits for it: that of the edges."""
    return list(crossing(action, edges, outward=False))


def crossing(action: Action, edges: Iterable[Edge], outward: bool) -> Iterator[Parcel]:
    """What comes out of an action or into it: values go from producers to consumers, gradients back from each."""
    work, stage = action.kind, action.stage
    from_producer = (work == "forward") == outward
    for edge in edges:
        if work == "backward" and not edge.gradient:
            continue
        others: tuple[int, ...] = ()
        if from_producer and edge.producer == stage:
            others = edge.consumers
        elif not from_producer and stage in edge.consumers:
            others = (edge.producer,)
        for other in others:
            source, target = (stage, other) if outward else (other, stage)
            yield Parcel(edge, work, source, target, action.microbatch, action.replica)


def check_edges(edges: Sequence[Edge], stages: int) -> None:
    """Raise unless every edge leads from a stage to later ones."""
    for edge in edges:
        later = all(edge.producer < consumer < stages for consumer in edge.consumers)
        if edge.producer < 0 or not later or len(set(edge.consumers)) < len(edge.consumers) or edge.bytes < 0:
            raise PlanError(f"{edge}: an edge leads from one of {stages} stages to later ones, each named once")
    if len({edge.value for edge in edges}) < len(edges):
        raise PlanError("two edges carry the same value: name all of its consumers in one edge")
