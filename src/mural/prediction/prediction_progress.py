"""How far a prediction is: a bar with the time that is left on a terminal, else a line for each image."""

from __future__ import annotations

import sys
import time
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn


class PredictionProgress:
    """Counts pixels, on the rank that speaks."""

    def __init__(self, pixels: int, images: int, speaks: bool):
        self.pixels, self.images, self.done, self.count = pixels, images, 0, 0
        self.begun, self.now = time.monotonic(), 0
        terminal = sys.stdout.isatty()  # which FORCE_COLOR, as notebooks set it, does not make
        self.console = Console(quiet=not speaks, force_terminal=terminal, highlight=False, soft_wrap=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=self.console, disable=not self.console.is_terminal or not speaks)
        self.task = self.bar.add_task("predict", total=pixels)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def begins(self, name: str, pixels: int) -> None:
        """Images of so many pixels are under way."""
        self.now = pixels
        self.bar.update(self.task, description=name)

    def tile(self, done: int, of: int, _: str) -> None:
        """Some tiles of a pass over them are done."""
        self.bar.update(self.task, completed=self.done + self.now * done // max(of, 1))

    def ends(self, name: str, images: int) -> None:
        """They are written."""
        self.done, self.count = self.done + self.now, self.count + images
        left = (time.monotonic() - self.begun) / max(self.done, 1) * (self.pixels - self.done)
        self.bar.update(self.task, completed=self.done)
        if not self.console.is_terminal:
            self.console.print(f"{self.count} of {self.images}: {name}; about {left:.0f} s left", markup=False)

    def __exit__(self, *error: Any) -> None:
        self.bar.stop()
