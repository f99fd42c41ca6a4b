"""Signals: SIGTERM, SIGUSR1 and Ctrl-C ask a run to save and leave; a second Ctrl-C ends it at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

WATCHED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """Whether this process was asked to stop, and by which signal; inside the block alone."""

    def __init__(self) -> None:
        self.name = ""
        self.before: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return bool(self.name)

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in WATCHED:
                self.before[number] = signal.signal(number, self.ask)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def ask(self, number: int, _: FrameType | None) -> None:
        """Remember the signal; the run looks at it between two updates."""
        if number == signal.SIGINT and self.name == "SIGINT":
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name
