"""The demo from start to end: the plain process, then the ranks, a line per step, the comparison, the picture."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import torch.multiprocessing as mp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from mural.data import synthetic
from mural.demo.both_runs import IMAGE, MASK, PREDICTION, DemoStep, Run, Usage, build, plain_process, sharded_rank
from mural.demo.settings import Settings
from mural.errors import MuralError
from mural.ranks import RankError, run_local
from mural.report.demo_picture import draw
from mural.report.words import bytes_in_words

TOLERANCE = 1e-9


def run_demo(settings: Settings, out: Path, console: Console | None = None) -> Path:
    """The path of the picture; raises if any loss or gradient of the ranks is not that of the plain process."""
    console = console or Console(highlight=False, markup=False)
    sample = synthetic(settings.size, settings.seed)
    image = np.ascontiguousarray(sample.image.read().permute(1, 2, 0).numpy())
    mask = sample.target.read()[0].numpy() > 0  # small and large nuclei are one class here
    console.print(introduction(settings))
    with tempfile.TemporaryDirectory(prefix="mural-demo-") as name:
        folder = Path(name)
        np.save(folder / IMAGE, image)
        np.save(folder / MASK, mask)
        with progress(console) as bars:
            board = ProgressBoard(settings, bars)
            board.follow("plain", plain_process, 1, folder)
            board.follow("sharded", sharded_rank, settings.ranks, folder)
        prediction = np.load(folder / PREDICTION).astype(bool)
    worst = board.check()
    console.print(needs(board.usages))
    console.print(f"losses and gradients agree to {worst:.1e} (allowed: {TOLERANCE:.0e})")
    out.mkdir(parents=True, exist_ok=True)
    path = out / "demo.png"
    outcome, (grid, depth, steps) = facts(board, worst), (settings.grid, settings.depth, settings.steps)
    draw(image, mask, prediction, grid=grid, depth=depth, steps=steps, facts=outcome).save(path)
    console.print(f"wrote {path}", soft_wrap=True)
    return path


def introduction(settings: Settings) -> str:
    """What will be run."""
    parameters = sum(p.numel() for p in build(settings).parameters())
    return (
        f"A U-Net ({parameters:,} parameters, float64) learns {settings.size}×{settings.size} pixels of tissue:\n"
        f"in one plain process, then on {ranks_in_words(settings.ranks)}, "
        f"each with its piece of a {settings.grid_name} grid.\n"
    )


def progress(console: Console) -> Progress:
    """The bars; on a terminal they move, elsewhere their last state is printed."""
    return Progress(
        TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )


class ProgressBoard:
    """What the processes reported so far, shown as it comes in."""

    def __init__(self, settings: Settings, bars: Progress) -> None:
        self.settings, self.bars = settings, bars
        self.steps: dict[Run, dict[int, list[DemoStep]]] = {"plain": {}, "sharded": {}}
        self.usages: dict[Run, list[Usage]] = {"plain": [], "sharded": []}
        self.reports: Any = mp.get_context("spawn").SimpleQueue()
        self.names: dict[Run, str] = {"plain": "one process", "sharded": ranks_in_words(settings.ranks)}
        self.tasks: dict[Run, TaskID] = {}
        self.ranks: dict[Run, int] = {"plain": 1, "sharded": settings.ranks}

    def follow(self, run: Run, function: Callable[..., None], ranks: int, folder: Path) -> None:
        """Run the function on that many ranks, and show what they report until all have ended."""
        self.tasks[run] = self.bars.add_task(self.names[run], total=self.settings.steps)
        ended = threading.Event()
        listener = threading.Thread(target=self._listen, args=(ended,), daemon=True)
        listener.start()
        try:
            with no_process_left():
                run_local(function, ranks, self.settings, folder, self.reports)
        except RankError as error:
            if error.raised:
                raise
            raise MuralError(f"a process of the demo ended early ({error}): if memory ran out, lower --size") from error
        finally:
            ended.set()
            listener.join(timeout=5)  # a rank that was ended while it wrote leaves half a report, which never arrives

    def _listen(self, ended: threading.Event) -> None:
        while not (ended.is_set() and self.reports.empty()):
            if self.reports.empty():
                ended.wait(0.05)
            else:
                self._take(self.reports.get())

    def _take(self, report: DemoStep | Usage) -> None:
        if isinstance(report, Usage):
            self.usages[report.run].append(report)
            return
        arrived = self.steps[report.run].setdefault(report.number, [])
        arrived.append(report)
        if len(arrived) == self.ranks[report.run]:
            self.bars.advance(self.tasks[report.run])
            self._show(report.run, report.number)

    def _show(self, run: Run, number: int) -> None:
        if run == "plain":
            return
        if number == 1:
            ranks = f"loss, {self.names[run]}"
            self.bars.console.print(f"step  {'loss, one process':<20} {ranks:<20}  largest gradient difference")
        plain, sharded = self.steps["plain"][number][0], self.steps["sharded"][number]
        self.bars.console.print(
            f"{number:>4}  {plain.loss:<20.16f} {sharded[0].loss:<20.16f}  {max(s.difference for s in sharded):.1e}"
        )

    def check(self) -> float:
        """The largest relative difference of any loss or gradient; raises if it is above the tolerance."""
        worst = 0.0
        for number, (plain,) in self.steps["plain"].items():
            for step in self.steps["sharded"][number]:
                loss = abs(step.loss - plain.loss) / abs(plain.loss)
                for what, difference in (("loss", loss), ("gradients", step.difference)):
                    if not difference <= TOLERANCE:  # true for NaN as well
                        raise Disagreement(number, what, difference)
                    worst = max(worst, difference)
        return worst


class Disagreement(MuralError, ArithmeticError):
    """Ranks and plain process computed different numbers."""

    def __init__(self, step: int, what: str, difference: float) -> None:
        super().__init__(
            f"step {step}: {what} on the ranks and in the plain process differ by {difference:.1e} (relative), "
            f"more than {TOLERANCE:.0e}: this is a bug in mural, please report it with the options you gave"
        )


@contextlib.contextmanager
def no_process_left() -> Generator[None]:
    """End the processes that began inside the block and are still there at its end, as after Ctrl-C or SIGTERM."""
    before = set(multiprocessing.active_children())
    previous = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        for process in set(multiprocessing.active_children()) - before:
            process.kill()
            process.join()
        signal.signal(signal.SIGTERM, previous)


def ranks_in_words(ranks: int) -> str:
    """The number of ranks, for a label."""
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def largest(usages: list[Usage]) -> Usage:
    """The most that any of these processes needed, in each respect."""
    return Usage(
        usages[0].run,
        *(max(getattr(u, f) for u in usages) for f in ("resident", "activations", "messages", "sent")),
    )


def needs(usages: dict[Run, list[Usage]]) -> Table:
    """One process compared with the ranks: memory, and what was sent."""
    plain, ranks = largest(usages["plain"]), largest(usages["sharded"])
    table = Table("", "one process", "each rank (largest)", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_row("peak memory above the imports", bytes_in_words(plain.resident), bytes_in_words(ranks.resident))
    table.add_row("kept for backward", bytes_in_words(plain.activations), bytes_in_words(ranks.activations))
    table.add_row("messages sent per step", "–", f"{ranks.messages}")
    table.add_row("bytes sent per step", "–", bytes_in_words(ranks.sent))
    return table


def facts(board: ProgressBoard, worst: float) -> str:
    """The outcome in one line, for the picture."""
    plain, ranks = largest(board.usages["plain"]), largest(board.usages["sharded"])
    return (
        f"losses and gradients of {board.settings.steps} steps agree to {worst:.0e}  ·  kept for backward: "
        f"{bytes_in_words(plain.activations)} in one process, {bytes_in_words(ranks.activations)} on each rank"
    )
