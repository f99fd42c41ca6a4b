"""The timeline of a program: when each seat computes, when messages travel, and how much memory it takes, priced.

An action begins when its seat is free and its receives are complete. A message begins to travel when it is sent, its
receive is posted and its channel (one direction between two seats) is free; it takes the latency plus its bytes over
the bandwidth, while both seats compute:

    seat 0     ├── F0 ──┤├── F1 ──┤
    channel    . . . . .├─ 0 ─┤. .├─ 1 ─┤
    seat 1     . . . . . . . .├── F0 ──┤├── F1 ──┤
                        ├─────────────┤   bytes of 0 on seat 1: from the post (or the beginning) to the end of F0
                                       ├────── … ──────┤   what F0 kept for its backward

A seat's memory is the fixed bytes of its stages; what each micro-batch keeps from the end of its forward to the end of
its backward; receive buffers from their posting to the end of the action that needs them; and what others still wait
for: values and gradients until they are delivered, or used on the same seat.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from mural.errors import PlanError
from mural.pipeline.checker import Channel, check
from mural.pipeline.schedule import Action, Schedule
from mural.pipeline.transfers import Edge, Parcel, Program, Receive, Send, made_by, needed_by


@dataclass(frozen=True)
class StageCosts:
    """What the stages of a program cost, one number for each; what is left out costs nothing.

    A stage that recomputes keeps its inputs alone, and runs its forward again before its backward.
    """

    forward: tuple[float, ...]
    """Seconds of a micro-batch."""
    backward: tuple[float, ...]
    kept: tuple[int, ...] = ()
    """Bytes that a micro-batch keeps for its backward."""
    fixed: tuple[int, ...] = ()
    """Bytes of weights, gradients and the optimizer's state."""
    working: tuple[int, ...] = ()
    """Bytes that exist while an action of the stage runs, and no longer."""
    recompute: tuple[bool, ...] = ()
    inputs: tuple[int, ...] = ()
    """Bytes of a micro-batch's inputs of the stage; left out, those of its edges."""
    sizes: tuple[float, ...] = ()
    """Sizes of the micro-batches, 1 being the one that the other numbers are about; a ragged last one has less."""
    latency: float = 0.0
    bandwidth: float = inf
    """Bytes a second, of each channel."""

    def size(self, microbatch: int) -> float:
        """The relative size of a micro-batch."""
        return self.sizes[microbatch] if self.sizes else 1.0

    def seconds(self, action: Action) -> float:
        """How long an action takes."""
        forward, backward = self.forward[action.stage], self.backward[action.stage]
        again = forward if at(self.recompute, action.stage) else 0.0
        return self.size(action.microbatch) * (forward if action.kind == "forward" else backward + again)

    def transfer(self, parcel: Parcel) -> float:
        """How long a message travels."""
        return self.latency + self.size(parcel.microbatch) * parcel.edge.bytes / self.bandwidth


def check_costs(costs: StageCosts, schedule: Schedule) -> None:
    """Raise unless there is a number for each stage, and for each micro-batch."""
    for name in ("forward", "backward", "kept", "fixed", "working", "recompute", "inputs", "sizes"):
        given = getattr(costs, name)
        count = schedule.microbatches if name == "sizes" else schedule.stages
        if len(given) != count and (given or name in ("forward", "backward")):
            what = "micro-batches" if name == "sizes" else "stages"
            raise PlanError(f"{name} has {len(given)} numbers for {count} {what}: give one for each")
    if costs.bandwidth <= 0 or costs.latency < 0:
        raise PlanError(f"latency {costs.latency} s, bandwidth {costs.bandwidth}: give 0 or more, and more than 0")


def at(numbers: Sequence[float], stage: int) -> float:
    """A stage's number, 0 where none are given."""
    return numbers[stage] if numbers else 0


@dataclass(frozen=True)
class ActionSpan:
    """An action on a seat, and when it ran."""

    seat: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class MessageSpan:
    """A message on its way from one seat to another."""

    source: int
    target: int
    parcel: Parcel
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When everything happens, and what it takes."""

    spans: tuple[ActionSpan, ...]
    transfers: tuple[MessageSpan, ...]
    makespan: float
    idle: tuple[float, ...]
    """For each seat, the share of the makespan in which it does not compute: its bubble."""
    peak: tuple[int, ...]
    """For each seat, the largest number of bytes at a time."""
    memory: tuple[tuple[tuple[float, int], ...], ...]
    """For each seat, the bytes from each moment on at which they change."""


def simulate(program: Program, costs: StageCosts) -> Timeline:
    """The timeline of a program at these costs.

    >>> from mural.pipeline.transfers import with_messages
    >>> from mural.pipeline.schedule import one_f_one_b
    >>> edges = [Edge(("x", 0), 0, (1,), bytes=10)]
    >>> found = simulate(with_messages(one_f_one_b(2, 3), edges), StageCosts((1, 1), (2, 2), kept=(100, 100)))
    >>> found.makespan, found.idle, found.peak
    (12.0, (0.25, 0.25), (220, 110))
    """
    check_costs(costs, program.schedule)
    run = PlayedRun(program, costs)
    run.play()
    spans, transfers = tuple(run.spans.values()), tuple(run.transfers.values())
    makespan = max((piece.end for piece in (*spans, *transfers)), default=0.0)
    seats = range(len(program.seats))
    busy = [sum(span.end - span.start for span in spans if span.seat == seat) for seat in seats]
    curves = tuple(map(curve, changes(run)))
    return Timeline(
        tuple(sorted(spans, key=lambda span: (span.start, span.seat, span.end))),
        tuple(sorted(transfers, key=lambda transfer: (transfer.start, transfer.source, transfer.target))),
        makespan,
        tuple(1 - b / makespan if makespan else 0.0 for b in busy),
        tuple(max((size for _, size in line), default=0) for line in curves),
        curves,
    )


class PlayedRun:
    """A program as it is simulated: each seat as far as it gets, in turn, with the times of everything."""

    def __init__(self, program: Program, costs: StageCosts) -> None:
        self.program, self.costs = program, costs
        self.spans: dict[Action, ActionSpan] = {}
        self.transfers: dict[Parcel, MessageSpan] = {}
        self.posted: dict[Parcel, float] = {}
        self.sent: dict[Parcel, float] = {}
        self.queues: dict[Channel, list[Parcel]] = defaultdict(list)
        self.free: dict[Channel, float] = defaultdict(float)
        self.clock = [0.0] * len(program.seats)
        self.place = [0] * len(program.seats)

    def play(self) -> None:
        """Simulate all lists to their end; raise where they do not end."""
        check(self.program, strict=False).require()
        while any(place < len(row) for place, row in zip(self.place, self.program.seats, strict=True)):
            for seat, row in enumerate(self.program.seats):
                while self.place[seat] < len(row) and self.step(seat, row[self.place[seat]]):
                    self.place[seat] += 1

    def step(self, seat: int, step: Action | Send | Receive) -> bool:
        """Take a step, unless what it waits for has no time yet."""
        if isinstance(step, Receive):
            self.posted[step.parcel] = self.clock[seat]
            self.travel((step.peer, seat))
        elif isinstance(step, Send):
            self.sent[step.parcel] = self.clock[seat]
            self.queues[seat, step.peer].append(step.parcel)
            self.travel((seat, step.peer))
        else:
            arrivals = [self.clock[seat]]
            for parcel in needed_by(step, self.program.edges):
                if self.program.schedule.seat_of[parcel.replica, parcel.source] != seat:
                    if parcel not in self.transfers:
                        return False
                    arrivals.append(self.transfers[parcel].end)
            start = max(arrivals)
            self.clock[seat] = start + self.costs.seconds(step)
            self.spans[step] = ActionSpan(seat, step, start, self.clock[seat])
        return True

    def travel(self, channel: Channel) -> None:
        """Give times to the messages at the head of a channel that are both sent and awaited."""
        queue = self.queues[channel]
        while queue and queue[0] in self.posted:
            parcel = queue.pop(0)
            start = max(self.sent[parcel], self.posted[parcel], self.free[channel])
            self.free[channel] = start + self.costs.transfer(parcel)
            self.transfers[parcel] = MessageSpan(*channel, parcel, start, self.free[channel])


# ----------------------------------------------------------------------------------------------------------- memory

Hold = Callable[[int, float, float, float], None]
"""Notes that a seat holds some bytes from one moment to another."""


def changes(run: PlayedRun) -> list[list[tuple[float, int]]]:
    """For each seat, when its memory grows and shrinks, and by how much."""
    found: list[list[tuple[float, int]]] = [[] for _ in run.program.seats]

    def hold(seat: int, size: float, start: float, end: float) -> None:
        if size and end > start:
            found[seat] += ((start, round(size)), (end, -round(size)))

    for (_, stage), seat in run.program.schedule.seat_of.items():
        found[seat].append((0.0, round(at(run.costs.fixed, stage))))
    for span in run.spans.values():
        keep(run, span, hold)
        deliver(run, span, hold)
    for transfer in run.transfers.values():
        end = run.spans[transfer.parcel.needed_by].end
        size = run.costs.size(transfer.parcel.microbatch) * transfer.parcel.edge.bytes
        hold(transfer.target, size, run.posted[transfer.parcel], end)
    return found


def keep(run: PlayedRun, span: ActionSpan, hold: Hold) -> None:
    """What an action keeps, while it runs and until its backward is over."""
    costs, stage = run.costs, span.action.stage
    size = costs.size(span.action.microbatch)
    hold(span.seat, size * at(costs.working, stage), span.start, span.end)
    again, kept = bool(at(costs.recompute, stage)), at(costs.kept, stage)
    if span.action.kind == "backward":
        hold(span.seat, size * kept if again else 0, span.start, span.end)
        return
    back = run.spans.get(Action("backward", stage, span.action.microbatch, span.action.replica))
    if back is not None:
        inputs = sum(e.bytes for e in run.program.edges if stage in e.consumers)
        lean = at(costs.inputs, stage) if costs.inputs else inputs
        hold(span.seat, size * (lean if again else kept), span.end, back.end)


def deliver(run: PlayedRun, span: ActionSpan, hold: Hold) -> None:
    """What an action makes for others, until the last of them has it: a value once, however many wait for it."""
    until: dict[Edge, float] = {}
    for parcel in made_by(span.action, run.program.edges):
        sent = run.transfers.get(parcel)
        end = sent.end if sent else run.spans[parcel.needed_by].end
        until[parcel.edge] = max(until.get(parcel.edge, 0.0), end)
    for edge, end in until.items():
        hold(span.seat, run.costs.size(span.action.microbatch) * edge.bytes, span.end, end)


def curve(given: Sequence[tuple[float, int]]) -> tuple[tuple[float, int], ...]:
    """The sum of changes from each moment on; at one moment, what ends makes room for what begins.

    >>> curve([(0, 5), (2, -5), (2, 3)])
    ((0, 5), (2, 3))
    """
    total, line = 0, dict[float, int]()
    for moment, change in sorted(given):
        total += change
        line[moment] = total
    return tuple(line.items())
