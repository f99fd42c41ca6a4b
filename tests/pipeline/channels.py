"""What really happens to a program: `execute` runs one seat's list over channels, here between threads.

Whether a thread is stuck for good needs no patience: once every thread that lives is waiting and none of their waits
can end, none ever will.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from mural.pipeline.schedule import Action
from mural.pipeline.transfers import Parcel, Program, Receive, Send, needed_by

Happened = tuple[str, int]
"""How a seat ended ("done", "stuck", "wrong" or "unready"), and at which step of its list."""


class Stuck(Exception):
    """A wait that does not end."""


class Mail(Protocol):
    """One seat's view of the channels; what is posted gets a ticket to wait with."""

    def send(self, parcel: Parcel, peer: int) -> Any: ...
    def post(self, peer: int) -> Any: ...
    def received(self, ticket: Any) -> Parcel: ...
    def delivered(self, ticket: Any) -> None: ...


def execute(program: Program, seat: int, mail: Mail, strict: bool) -> Happened:
    """Run a seat's list, as a runner would; values are the parcels themselves."""
    made: set[Action] = set()
    receives: dict[Parcel, Any] = {}
    tickets: list[tuple[Parcel, Any]] = []
    sends: list[Any] = []
    row, at = program.seats[seat], 0
    try:
        for at, step in enumerate(row):
            if isinstance(step, Receive):
                tickets.append((step.parcel, mail.post(step.peer)))
                receives.setdefault(*tickets[-1])
            elif isinstance(step, Send):
                if step.parcel.made_by not in made:
                    return "unready", at
                sends.append(mail.send(step.parcel, step.peer))
            else:
                if step.kind == "backward" and replace(step, kind="forward") not in made:
                    return "unready", at
                for parcel in needed_by(step, program.edges):
                    if program.schedule.seat_of[parcel.replica, parcel.source] == seat:
                        if parcel.made_by not in made:
                            return "unready", at
                    elif parcel not in receives:
                        return "unready", at
                    elif mail.received(receives[parcel]) != parcel:
                        return "wrong", at
                made.add(step)
        at = len(row)
        for parcel, ticket in tickets:
            if mail.received(ticket) != parcel:
                return "wrong", at
        for ticket in sends if strict else ():
            mail.delivered(ticket)
    except Stuck:
        return "stuck", at
    return "done", at


class Channels:
    """Queues without tags between threads: the n-th send meets the n-th receive."""

    def __init__(self, seats: int) -> None:
        self.news = threading.Condition()
        self.sent: dict[tuple[int, int], list[Parcel]] = defaultdict(list)
        self.posted: dict[tuple[int, int], int] = defaultdict(int)
        self.alive = seats
        self.waits: dict[int, Callable[[], bool]] = {}

    def wait(self, true: Callable[[], bool]) -> None:
        """Wait for something to become true; raise once nothing can make it so."""
        with self.news:
            me = threading.get_ident()
            self.waits[me] = true
            self.news.notify_all()
            while not true():
                if len(self.waits) == self.alive and not any(other() for other in self.waits.values()):
                    raise Stuck
                self.news.wait(30)
            del self.waits[me]

    def leave(self) -> None:
        """This thread is over."""
        with self.news:
            self.waits.pop(threading.get_ident(), None)
            self.alive -= 1
            self.news.notify_all()


class ThreadMail:
    """A seat's end of the channels between threads."""

    def __init__(self, channels: Channels, seat: int) -> None:
        self.channels, self.seat = channels, seat

    def send(self, parcel: Parcel, peer: int) -> tuple[tuple[int, int], int]:
        channel = (self.seat, peer)
        with self.channels.news:
            self.channels.sent[channel].append(parcel)
            self.channels.news.notify_all()
            return channel, len(self.channels.sent[channel]) - 1

    def post(self, peer: int) -> tuple[tuple[int, int], int]:
        channel = (peer, self.seat)
        with self.channels.news:
            self.channels.posted[channel] += 1
            self.channels.news.notify_all()
            return channel, self.channels.posted[channel] - 1

    def received(self, ticket: tuple[tuple[int, int], int]) -> Parcel:
        channel, number = ticket
        self.channels.wait(lambda: len(self.channels.sent[channel]) > number)
        return self.channels.sent[channel][number]

    def delivered(self, ticket: tuple[tuple[int, int], int]) -> None:
        channel, number = ticket
        self.channels.wait(lambda: self.channels.posted[channel] > number)


def on_threads(program: Program, strict: bool) -> tuple[list[Happened], dict[tuple[int, int], list[Parcel]]]:
    """How every seat ends when each is a thread, and what nobody received."""
    channels = Channels(len(program.seats))
    ends: list[Happened] = [("died", -1)] * len(program.seats)

    def run(seat: int) -> None:
        try:
            ends[seat] = execute(program, seat, ThreadMail(channels, seat), strict)
        finally:
            channels.leave()

    threads = [threading.Thread(target=run, args=(seat,), daemon=True) for seat in range(len(program.seats))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    left = {channel: sent[channels.posted[channel] :] for channel, sent in sorted(channels.sent.items())}
    return ends, {channel: parcels for channel, parcels in left.items() if parcels}
