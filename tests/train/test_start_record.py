"""The record of a run's starts: what was started, where, and how the start before ended."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from runs import run_config, write_images

from mural.train import Config
from mural.train.loop import fit_rank
from mural.train.start_record import StartRecord, command, starts_in
from ranks import run_on


def fit(config: Config) -> list[StartRecord]:
    fit_rank(0, config)
    return starts_in(config.folder)


def test_each_start_has_a_line_until_the_run_begins_anew(tmp_path: Path) -> None:
    write_images(tmp_path, 4)
    (first,) = fit(run_config(tmp_path, train__steps=2, validation={"fraction": 0.5}))
    assert (first.step, first.total, first.plan, first.weights, first.before) == (0, 2, "one rank", 7554, {})
    facts = {"samples": 2, "held_out": 2, "channels": 3, "dtype": "uint8", "smallest": [48, 48], "largest": [48, 48]}
    assert first.images == {"": facts}
    assert first.directory == str(Path.cwd())
    before, second = fit(run_config(tmp_path, train__steps=4, validation={"fraction": 0.5}))
    assert before == first
    assert (second.step, second.total, second.before["state"]) == (2, 4, "finished")
    (anew,) = fit(run_config(tmp_path, "other", train__steps=1))
    assert (anew.step, anew.total) == (0, 1)


def test_every_rank_is_in_it(tmp_path: Path) -> None:
    write_images(tmp_path, 2)
    found, _ = run_on(2, fit, run_config(tmp_path, train__steps=1, plan={"spatial": [2, 1]}))
    assert [len(each) for each in (found[0].hosts, found[0].devices, found[0].memory)] == [2, 2, 2]
    assert min(found[0].memory) > 0


def test_lines_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "starts.jsonl").write_text('{"step": 0}\n[1]\n{"st')
    assert starts_in(tmp_path) == []


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["/bin/mural", "train", "my run.toml"], "mural train 'my run.toml'"),
        (["/lib/mural/__main__.py", "train"], "mural train"),
        (["/home/a/fit.py", "--fast"], "python fit.py --fast"),
    ],
)
def test_the_command_is_what_was_typed(monkeypatch: pytest.MonkeyPatch, given: list[str], told: str) -> None:
    monkeypatch.setattr(sys, "argv", given)
    assert command() == told
