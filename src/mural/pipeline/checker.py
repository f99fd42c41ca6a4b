"""The proof that a program runs to its end: no deadlock, no message received by mistake, none left over.

What is assumed of channels: each direction between two seats is one queue without tags. Sends and receives are posted
in the order of the list and do not block. The n-th receive of a channel completes once it and the n-th send are
posted, and gets what that send carries. An action waits for its receives, one after the other. A seat ends when all of
its receives are complete; under `strict`, when its sends are too, and a send is complete once its receive is posted.

Under these rules seats never race: whether a wait ends does not depend on who runs first. So one run over the lists,
each seat as far as it gets, says for all runs where every seat ends. A seat that cannot go on is one of

    stuck      it waits for a send, or under `strict` at its end for a receive, that no seat comes to post
    wrong      its receive met a message that was meant for another
    unready    what a step needs is not there, and no receive for it was posted before
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import Literal

from mural.errors import PlanError
from mural.pipeline.schedule import Action
from mural.pipeline.transfers import Parcel, Program, Receive, Send, Step, needed_by

End = Literal["done", "stuck", "wrong", "unready"]
Channel = tuple[int, int]


@dataclass(frozen=True)
class SeatEnd:
    """How a seat ends: at which step of its list (its length: after the last), and what is missing."""

    end: End
    at: int
    parcel: Parcel | None = None
    """What it waits for ("stuck"), expected ("wrong") or does not have ("unready")."""
    peer: int | None = None
    """The seat that it waits for."""
    got: Parcel | None = None
    """What came instead."""


@dataclass(frozen=True)
class Verdict:
    """Whether a program runs to its end; if not, why."""

    program: Program = field(repr=False)
    outcomes: tuple[SeatEnd, ...]
    unreceived: tuple[tuple[Channel, Parcel], ...]
    """Messages that were sent and that nobody receives, and their channels (from seat, to seat)."""
    miscounted: tuple[Action, ...]
    """Actions that the lists do not have exactly once, on the seat of their stage."""

    @property
    def ok(self) -> bool:
        """Whether every seat comes to its end, and nothing is missing or left over."""
        done = all(outcome.end == "done" for outcome in self.outcomes)
        return done and not self.unreceived and not self.miscounted

    def __str__(self) -> str:
        if self.ok:
            return f"ok: {len(self.outcomes)} seats come to their end"
        lines = [f"{action} is not in the list of its seat exactly once" for action in self.miscounted[:3]]
        lines += [self.explain(seat) for seat, outcome in enumerate(self.outcomes) if outcome.end != "done"]
        lines += [f"seat {a} sends {parcel} to seat {b}, which never receives it" for (a, b), parcel in self.unreceived]
        circle = self.cycle()
        if circle:
            lines.append(f"a cycle: {' waits for '.join(f'seat {seat}' for seat in circle)}")
        return "\n".join(lines)

    def explain(self, seat: int) -> str:
        """A sentence that says how a seat ends."""
        outcome, row = self.outcomes[seat], self.program.seats[seat]
        where = f"before its {described(row[outcome.at])}" if outcome.at < len(row) else "at the end of its list"
        if outcome.end == "stuck" and outcome.parcel and outcome.peer is not None:
            peer = self.outcomes[outcome.peer]
            mine = self.program.schedule.seat_of[outcome.parcel.replica, outcome.parcel.source] == seat
            what = f"seat {outcome.peer} to receive" if mine else f"seat {outcome.peer} to send"
            return f"seat {seat} waits {where} for {what} {outcome.parcel}; that seat is {peer.end} at step {peer.at}"
        if outcome.end == "wrong":
            return f"seat {seat} {where} expects {outcome.parcel} from seat {outcome.peer} and gets {outcome.got}"
        if outcome.end == "unready":
            return f"seat {seat} cannot go on {where}: {outcome.parcel or 'its forward'} is not there, and not sent"
        return f"seat {seat} comes to its end"

    def cycle(self) -> tuple[int, ...]:
        """A cycle of seats each of which waits for the next, the first one again at the end; empty if there is none."""
        for start in range(len(self.outcomes)):
            path = [start]
            while (peer := self.outcomes[path[-1]].peer) is not None and self.outcomes[path[-1]].end == "stuck":
                if peer in path:
                    return (*path[path.index(peer) :], peer)
                path.append(peer)
        return ()

    def require(self) -> None:
        """Raise `PlanError` with the reasons unless the program is sound."""
        if not self.ok:
            raise PlanError(f"this pipeline program would not run to its end:\n{self}")


def check(program: Program, strict: bool = True) -> Verdict:
    """The verdict on a program: how each seat ends, and what is left over.

    >>> from mural.pipeline.transfers import Edge, with_messages
    >>> from mural.pipeline.schedule import one_f_one_b
    >>> edges = [Edge(("x", 0), 0, (1,)), Edge(("y", 0), 1, (2,)), Edge(("skip", 0), 0, (2,))]
    >>> print(check(with_messages(one_f_one_b(3, 4), edges)))
    ok: 3 seats come to their end
    """
    run = CheckedRun(program, strict)
    outcomes = run.outcomes()
    unreceived = tuple(
        (channel, parcel)
        for channel, sent in sorted(run.sent.items())
        for parcel in sent[len(run.posted.get(channel, ())) :]
    )
    return Verdict(program, outcomes, unreceived, miscounted(program))


def miscounted(program: Program) -> tuple[Action, ...]:
    """Actions that are not exactly once in the lists, on their seat; forwards alone are complete too."""
    schedule = program.schedule
    found = Counter((seat, step) for seat, row in enumerate(program.seats) for step in row if isinstance(step, Action))
    backward = any(action.kind == "backward" for row in schedule.seats for action in row)
    expected = Counter(
        (schedule.seat_of[action.replica, action.stage], action)
        for action in schedule.actions()
        if backward or action.kind == "forward"
    )
    differing = (found - expected) + (expected - found)
    return tuple(sorted({action for _, action in differing}))


def described(step: Step) -> str:
    """A step in words."""
    if isinstance(step, Action):
        return str(step)
    if isinstance(step, Send):
        return f"send of {step.parcel} to seat {step.peer}"
    return f"receive of {step.parcel} from seat {step.peer}"


class CheckedRun:
    """The one run over all lists: what each channel was given, and how far each seat has come."""

    def __init__(self, program: Program, strict: bool) -> None:
        self.sent: dict[Channel, list[Parcel]] = defaultdict(list)
        self.posted: dict[Channel, list[Parcel]] = defaultdict(list)
        self.seats = [Seat(self, program, number, strict) for number in range(len(program.seats))]

    def outcomes(self) -> tuple[SeatEnd, ...]:
        """Let every seat go as far as it gets, until none gets any further."""
        while True:
            before = [seat.outcome for seat in self.seats]
            for seat in self.seats:
                if seat.outcome.end == "stuck":
                    seat.outcome = seat.advance()
            if before == [seat.outcome for seat in self.seats]:
                return tuple(before)


class Seat:
    """One seat as it goes through its list."""

    def __init__(self, run: CheckedRun, program: Program, number: int, strict: bool) -> None:
        self.run, self.program, self.number, self.strict = run, program, number, strict
        self.row = program.seats[number]
        self.outcome = SeatEnd("stuck", 0)
        self.at = 0
        self.done: set[Action] = set()
        self.receives: list[tuple[Parcel, Channel, int]] = []
        self.awaited: dict[Parcel, tuple[Parcel, Channel, int]] = {}
        self.sends: list[tuple[Parcel, Channel, int]] = []

    def advance(self) -> SeatEnd:
        """Take steps until one has to wait, or fails, or the list ends."""
        while self.at < len(self.row):
            step = self.row[self.at]
            obstacle = self.compute(step) if isinstance(step, Action) else self.post(step)
            if obstacle is not None:
                return obstacle
            self.at += 1
        return self.finish() or SeatEnd("done", self.at)

    def post(self, step: Send | Receive) -> SeatEnd | None:
        """Give a message to its channel, or ask the channel for one."""
        if isinstance(step, Receive):
            channel = (step.peer, self.number)
            self.receives.append((step.parcel, channel, len(self.run.posted[channel])))
            self.awaited.setdefault(step.parcel, self.receives[-1])
            self.run.posted[channel].append(step.parcel)
            return None
        if step.parcel.made_by not in self.done:
            return SeatEnd("unready", self.at, step.parcel)
        channel = (self.number, step.peer)
        self.sends.append((step.parcel, channel, len(self.run.sent[channel])))
        self.run.sent[channel].append(step.parcel)
        return None

    def compute(self, action: Action) -> SeatEnd | None:
        """Wait for everything that an action needs, and run it."""
        if action.kind == "backward" and replace(action, kind="forward") not in self.done:
            return SeatEnd("unready", self.at)
        for parcel in needed_by(action, self.program.edges):
            if self.program.schedule.seat_of[parcel.replica, parcel.source] == self.number:
                if parcel.made_by not in self.done:
                    return SeatEnd("unready", self.at, parcel)
                continue
            entry = self.awaited.get(parcel)
            obstacle = SeatEnd("unready", self.at, parcel) if entry is None else self.wait(*entry)
            if obstacle is not None:
                return obstacle
        self.done.add(action)
        return None

    def wait(self, parcel: Parcel, channel: Channel, number: int) -> SeatEnd | None:
        """Wait for a receive, and look at what came."""
        sent = self.run.sent[channel]
        if number >= len(sent):
            return SeatEnd("stuck", self.at, parcel, channel[0])
        return None if sent[number] == parcel else SeatEnd("wrong", self.at, parcel, channel[0], sent[number])

    def finish(self) -> SeatEnd | None:
        """Wait for what is still open after the last step."""
        obstacles = (self.wait(*entry) for entry in self.receives)
        obstacle = next((o for o in obstacles if o is not None), None)
        if obstacle is None and self.strict:
            for parcel, channel, number in self.sends:
                if number >= len(self.run.posted[channel]):
                    return SeatEnd("stuck", self.at, parcel, channel[1])
        return obstacle
