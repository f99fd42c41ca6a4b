"""The journal of a run, on rank 0: lines of JSON, TensorBoard files, a progress bar or plain lines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from mural.errors import DISTRIBUTION, ConfigError, cannot_write
from mural.report.words import seconds_in_words
from mural.text_files import write_whole
from mural.train.run_tables import LogConfig

METRICS = "metrics.jsonl"
ABOUT = ("kind", "step", "time")
"""What every line says of itself."""
PATIENCE = 30.0
"""Seconds without a word before a step that is under way has a line of its own, where there is no bar."""
PER_SECOND = 4
"""How often the bar is drawn."""


class Journal:
    """What a run says about itself; on ranks other than the first it says nothing."""

    def __init__(self, folder: Path, config: LogConfig, total: int, speaks: bool):
        self.folder, self.config, self.total, self.speaks = folder, config, total, speaks
        # FORCE_COLOR makes no terminal: notebooks and build servers set it, and would keep every drawing of the bar.
        terminal = sys.stdout.isatty()
        self.console = Console(quiet=not speaks, force_terminal=terminal, highlight=False, soft_wrap=True)
        self.file: TextIO | None = None
        self.board: Any = None
        self.bar: StepBar | None = None
        self.spoke = self.began = time.monotonic()
        self.first = 0

    def open(self, step: int) -> None:
        """Write from here on; lines of steps that will be taken again are dropped, so that each is there once."""
        if not self.speaks:
            return
        self.began, self.first = time.monotonic(), step
        path = self.folder / METRICS
        if path.exists():
            kept = [line for line in path.read_text(encoding="utf-8").splitlines() if step_of(line) <= step]
            write_whole(path, "".join(line + "\n" for line in kept))
        self.file = path.open("a", encoding="utf-8")
        self.board = board(self.folder, self.config)
        if self.config.progress and self.console.is_terminal:
            self.bar = StepBar(self.console)
            self.task = self.bar.add_task("train", total=self.total, completed=step)
            self.bar.start()

    def validated(self, step: int) -> tuple[int, dict[str, Any]]:
        """The last step up to this one whose validation is in the journal, and its scores; −1 where none does."""
        found = validations(self.folder, step)
        return found[-1] if found else (-1, {})

    def say(self, text: str) -> None:
        """One line for a person."""
        self.spoke = time.monotonic()
        self.console.print(text, markup=False)

    def note(self, kind: str, step: int, values: Mapping[str, Any], scalars: Mapping[str, float]) -> None:
        """Keep numbers under a kind ("train", "validation"), and draw them."""
        if self.file is None:
            return
        try:
            self.file.write(json.dumps({"kind": kind, "step": step, "time": round(time.time(), 3), **values}) + "\n")
            self.file.flush()
        except OSError as error:
            raise cannot_write(str(self.folder / METRICS), error) from error
        if self.board is not None:
            for name, value in scalars.items():
                self.board.add_scalar(f"{kind}/{name}", value, step)

    def show(self, step: int, words: Mapping[str, str]) -> None:
        """Say where training stands."""
        text = "  ".join(f"{name} {value}" for name, value in words.items())
        if self.bar is not None:
            self.bar.words = text
            self.bar.update(self.task, completed=step)
        elif self.speaks:
            self.say(f"step {step}/{self.total}  {text}{self.left(step)}")

    def advance(self, step: int) -> None:
        """Move the bar alone; without one, say that the first step is done, and others after a long silence."""
        if self.bar is not None:
            self.bar.below = ""
            self.bar.update(self.task, completed=step)
            return
        silent = step == self.first + 1 or time.monotonic() - self.spoke >= PATIENCE
        if self.speaks and silent and step % self.config.every and step != self.total:
            self.say(f"step {step}/{self.total}{self.left(step)}")

    def left(self, step: int) -> str:
        """How long the steps after this one will take, if they go on like those before it; nothing at the end."""
        rest = (time.monotonic() - self.began) / max(1, step - self.first) * (self.total - step)
        return f"  left {seconds_in_words(rest)}" if rest > 0 else ""

    def under_way(self, text: str) -> None:
        """Say how far a long step is: below the bar; without one, only where nothing was said for a while."""
        if self.bar is not None:
            self.bar.below = text
        elif self.speaks and time.monotonic() - self.spoke >= PATIENCE:
            self.say(text)

    def close(self) -> None:
        """Write what is left."""
        if self.bar is not None:
            self.bar.stop()
        if self.board is not None:
            self.board.close()
        if self.file is not None:
            self.file.close()
        sys.stdout.flush()


def validations(folder: Path, step: int = sys.maxsize - 1) -> list[tuple[int, dict[str, Any]]]:
    """The step and the scores of every validation up to a step that is in the journal of a run's folder."""
    found, _ = read_journal(folder)
    scored = [line for line in found if line["kind"] == "validation" and line["step"] <= step]
    return [(line["step"], {key: value for key, value in line.items() if key not in ABOUT}) for line in scored]


def read_journal(folder: Path) -> tuple[list[dict[str, Any]], int]:
    """The lines of the journal in a run's folder, and how many others are damaged: a crash may have cut one off."""
    path = folder / METRICS
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    good = [line for line in lines if step_of(line) < sys.maxsize]
    return [json.loads(line) for line in good], len(lines) - len(good)


def step_of(line: str) -> int:
    """The step of a journal's line; a line that a crash cut off counts as never."""
    try:
        found = json.loads(line)
        return found["step"] if set(ABOUT) <= found.keys() and type(found["step"]) is int else sys.maxsize
    except (ValueError, AttributeError):
        return sys.maxsize


class StepBar(Progress):
    """The bar: steps and time left; below it what the last reading said, and how far a long step under way is.

    train ━━━━━━━━━━╸━━━━━━━━━ 52/100 0:01:13
    loss 1.0155  step 60.0 ms  img/s 16.7  …
    step 53: tile 37 of 256 (backward)
    """

    words = ""
    below = ""

    def __init__(self, console: Console):
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=PER_SECOND,
        )

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        for line in (self.words, self.below):
            if line:
                yield Text(line)


def board(folder: Path, config: LogConfig) -> Any:
    """A TensorBoard writer, or None."""
    if config.tensorboard == "off":
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415
    except ImportError as error:
        if config.tensorboard == "on":
            raise ConfigError(
                f'log.tensorboard = "on" needs TensorBoard: pip install "{DISTRIBUTION}[tensorboard]"'
            ) from error
        return None
    return SummaryWriter(str(folder / "tensorboard"))  # type: ignore[no-untyped-call]
