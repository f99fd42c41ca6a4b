"""What really happens to a program: one thread a seat, over channels that match sends and receives by their number.

Whether a thread is stuck for good needs no patience: once every thread that lives is waiting and none of their waits can
end, none ever will.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

from mural.pipeline.messages import Parcel, Program, Receive, Send, needed_by
from mural.pipeline.schedule import Action


@dataclass(frozen=True)
class Happened:
    """How a seat ended: "done", "stuck", "wrong" or "unready", and at which step of its list."""

    end: str
    at: int


class Stopped(Exception):
    """A seat cannot go on."""


class Channels:
    """Queues without tags between seats, for threads; strict ones hold a sender until the receiver has come."""

    def __init__(self, seats: int) -> None:
        self.news = threading.Condition()
        self.sent: dict[tuple[int, int], list[Parcel]] = defaultdict(list)
        self.posted: dict[tuple[int, int], int] = defaultdict(int)
        self.alive, self.waits = seats, dict[int, Callable[[], bool]]()

    def send(self, parcel: Parcel, channel: tuple[int, int]) -> int:
        """The number of the send."""
        with self.news:
            self.sent[channel].append(parcel)
            self.news.notify_all()
            return len(self.sent[channel]) - 1

    def post(self, channel: tuple[int, int]) -> int:
        """The number of the receive."""
        with self.news:
            self.posted[channel] += 1
            self.news.notify_all()
            return self.posted[channel] - 1

    def wait(self, true: Callable[[], bool]) -> None:
        """Wait for something to become true; raise once nothing can make it so."""
        with self.news:
            me = threading.get_ident()
            self.waits[me] = true
            self.news.notify_all()
            while not true():
                if len(self.waits) == self.alive and not any(other() for other in self.waits.values()):
                    raise Stopped("stuck")
                self.news.wait(10)
            del self.waits[me]

    def leave(self) -> None:
        """This thread is over."""
        with self.news:
            if self.waits.pop(threading.get_ident(), None) is None or True:
                self.alive -= 1
            self.news.notify_all()
