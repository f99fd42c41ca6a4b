"""Progress within a streamed step: a line below the bar, or one now and then; the watchdog hears of every tile."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from runs import run_config, write_images

from mural.engine import Parallel
from mural.prediction.prediction_progress import PredictionProgress
from mural.train import journal as journal_module
from mural.train.config import LogConfig
from mural.train.journal import Journal
from mural.train.loop import fit_rank
from mural.train.training_run import Run


def journal(folder: Path, *, terminal: bool, speaks: bool = True, width: int = 100) -> tuple[Journal, StringIO]:
    """A journal that writes what a person sees to a text."""
    shown = StringIO()
    made = Journal(folder, LogConfig(tensorboard="off"), 20, speaks)
    made.console = Console(file=shown, force_terminal=terminal, width=width, quiet=not speaks, soft_wrap=True)
    made.open(0)
    return made, shown


def test_without_a_terminal_there_is_a_line_at_most_every_30_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(journal_module.time, "monotonic", lambda: now[0])
    made, shown = journal(tmp_path, terminal=False)
    for tile in range(1, 101):
        now[0] += 1.0
        made.under_way(f"step 12: tile {tile} of 100 (forward)")
        if tile == 50:
            made.say("a word in between")
    made.close()
    assert shown.getvalue().splitlines() == [
        "step 12: tile 30 of 100 (forward)",
        "a word in between",
        "step 12: tile 80 of 100 (forward)",
    ]


def test_forced_colours_make_no_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of a notebook, which sets this variable, drew the bar again and again."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    made = Journal(tmp_path, LogConfig(tensorboard="off"), 20, speaks=True)
    made.open(0)
    made.close()
    assert made.bar is None
    assert PredictionProgress(10, 1, speaks=True).bar.disable


def test_without_a_terminal_the_first_step_has_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was said for `log.every` updates, ten by default."""
    now = [100.0]
    monkeypatch.setattr(journal_module.time, "monotonic", lambda: now[0])
    made, shown = journal(tmp_path, terminal=False)
    for step in range(1, 21):
        now[0] += 4.0
        made.advance(step)
        if step % 10 == 0:
            made.show(step, {"loss": "1.0"})
    made.close()
    assert shown.getvalue().splitlines() == [
        "step 1/20  left 76.0 s",
        "step 9/20  left 44.0 s",
        "step 10/20  loss 1.0  left 40.0 s",
        "step 18/20  left 8.00 s",
        "step 20/20  loss 1.0",
    ]


def test_at_80_columns_the_bar_the_step_and_the_time_are_there(tmp_path: Path) -> None:
    """They shared a line with the reading, and collapsed to «t… loss 1.0155 …»."""
    made, shown = journal(tmp_path, terminal=True, width=80)
    made.show(7, {"loss": "1.0155", "step": "60.0 ms", "img/s": "16.7", "Mpx/s": "0.0682", "memory": "388 MiB"})
    made.close()
    lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line).strip() for line in shown.getvalue().splitlines()]
    assert any(re.fullmatch(r"train ━+\S* *7/20 [-0-9:]+", line) for line in lines)
    assert "loss 1.0155  step 60.0 ms  img/s 16.7  Mpx/s 0.0682  memory 388 MiB" in lines


def test_other_ranks_say_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "PATIENCE", 0.0)
    made, shown = journal(tmp_path, terminal=False, speaks=False)
    made.under_way("step 12: tile 3 of 100 (forward)")
    made.close()
    assert shown.getvalue() == ""


def test_on_a_terminal_the_line_is_below_the_bar_until_the_step_is_over(tmp_path: Path) -> None:
    made, shown = journal(tmp_path, terminal=True)
    bar = made.bar
    assert bar is not None
    made.under_way("step 12: tile 37 of 256 (backward)")
    bar.refresh()
    assert "step 12: tile 37 of 256 (backward)" in shown.getvalue()
    made.advance(12)
    shown.truncate(0)
    bar.refresh()
    assert "tile" not in shown.getvalue()
    for tile in range(10_000):  # drawn a few times a second, however many tiles there are
        made.under_way(f"step 13: tile {tile} of 10000 (forward)")
    assert shown.getvalue().count("step 13") < 100
    made.close()


def test_the_watchdog_hears_of_every_tile() -> None:
    heard: list[str] = []
    said: list[str] = []
    run: Any = SimpleNamespace(
        watchdog=SimpleNamespace(progress=heard.append), journal=SimpleNamespace(under_way=said.append)
    )
    Run.begins(run, "step 12")
    Run.tile_done(run, 37, 256, "backward")
    assert heard == ["step 12", "step 12: tile 37 of 256 (backward)"]
    assert said == heard[1:]


def test_a_run_tells_of_the_tiles_of_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = Parallel.step

    def in_tiles(self: Parallel, *given: Any, **options: Any) -> Any:
        assert self.progress is not None
        self.progress(1, 2, "forward")
        return step(self, *given, **options)

    monkeypatch.setattr(Parallel, "step", in_tiles)
    monkeypatch.setattr(journal_module, "PATIENCE", 0.0)
    write_images(tmp_path, 4)
    fit_rank(0, run_config(tmp_path, train__steps=2))
    lines = [line for line in capsys.readouterr().out.splitlines() if ": tile " in line]
    assert lines == [f"step {n}: tile 1 of 2 (forward)" for n in (1, 2)]
