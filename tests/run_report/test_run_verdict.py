"""The headline of a report: how a run stands, how long it took, and what of it is the best."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from told import BEGIN, scored_line, started, train_line, write_run

from mural.errors import ConfigError
from mural.report.run_page import Headline
from mural.run_report.run_curves import charts
from mural.run_report.run_history import read_history
from mural.run_report.run_speed import tables
from mural.run_report.run_verdict import headline, sessions

HERE = {"host": socket.gethostname(), "time": "2027-01-15T08:02:00+00:00"}
STOPPED = {"state": "stopped", "by": "train.stop_after: no better mean_iou in 3 validations"}


def told(folder: Path, status: dict[str, Any] | None, **more: Any) -> Headline:
    lines = [train_line(10), scored_line(10, mean_iou=0.5), train_line(20, 0.25), scored_line(20, mean_iou=0.4)]
    return headline(read_history(write_run(folder / "run", lines, status, **more)))


@pytest.mark.parametrize(
    ("status", "mood", "words"),
    [
        ({"state": "finished"}, "good", "Finished: 20 steps"),
        (STOPPED, "good", "Stopped early, after step 20 of 100: no better mean_iou in 3 validations "
         "(train.stop_after)"),
        ({"state": "stopped", "by": "SIGTERM"}, "busy", "Stopped by SIGTERM, after step 20 of 100"),
        ({"state": "failed", "error": "TrainingError: the loss is nan"}, "bad", "Failed after step 20 of 100"),
        ({"state": "killed", "by": "SIGKILL"}, "bad", "Killed by SIGKILL, after step 20 of 100"),
        ({"state": "running", "pid": os.getpid()}, "busy", "Still running, at step 20 of 100; about 2 min 40 s left"),
        ({"state": "running", "pid": 2**22 + 1}, "bad", "Ended without a word after step 20 of 100: process 4194305 "
         "is gone"),
        (None, "busy", "At step 20 of 100; there is no status.json, which would say whether it goes on"),
    ],
)  # fmt: skip
def test_the_headline_says_how_the_run_stands(tmp_path: Path, status: Any, mood: str, words: str) -> None:
    found = told(tmp_path, status and {**HERE, **status}, starts=[started()])
    assert (found.mood, found.words) == (mood, words)
    if status and "error" in status:
        assert found.more == [status["error"], "Nothing was saved."]


def test_a_run_on_another_machine_is_taken_at_its_word(tmp_path: Path) -> None:
    found = told(tmp_path, {**HERE, "state": "running", "pid": 2**22 + 1, "host": "elsewhere"})
    assert found.words.startswith("Still running, at step 20")
    assert "process 4194305 on elsewhere" in found.more[0]


def test_the_best_is_that_of_the_watched_score_or_of_the_loss(tmp_path: Path) -> None:
    watched = {"checkpoint": {"best": "mean_iou"}}
    facts = told(tmp_path / "a", {"state": "finished"}, config=watched).facts
    assert facts[1] == ("Best mean_iou", "0.5", "after step 10; 1 validation since")
    assert told(tmp_path / "b", {"state": "finished"}).facts[1][0] == "Best loss"
    stars = {chart.title: chart.best for chart in charts(read_history(tmp_path / "a" / "run"))}
    assert stars == {"Loss": None, "Scores of validations": (10, 0.5)}


def test_time_counts_all_starts_and_not_the_pause_between_them(tmp_path: Path) -> None:
    ended = {"state": "stopped", "by": "SIGTERM", "time": "2027-01-15T08:00:30+00:00"}  # after 30 seconds
    starts = [started(), started(10, after=1000.0, before=ended)]
    lines = [train_line(10), train_line(20) | {"time": BEGIN + 1010}]
    run = read_history(write_run(tmp_path / "run", lines, {"state": "finished"}, starts))
    assert [round(end - begin) for begin, end in sessions(run)] == [30, 10]
    assert run.resumed == [10]
    assert headline(run).facts[0][1] == "40.0 s"


def test_an_old_run_without_a_record_of_starts_is_estimated(tmp_path: Path) -> None:
    (begin, end), *_ = sessions(read_history(write_run(tmp_path / "run", [train_line(10), train_line(20)])))
    assert (begin, end) == (BEGIN, BEGIN + 40)


def test_class_scores_have_a_chart_of_their_own_under_their_names(tmp_path: Path) -> None:
    named = {"data": {"classes": ["background", "tumour"]}}
    more = {"iou/background": 0.9, "iou/tumour": 0.4}
    lines = [scored_line(step, accuracy=0.8, iou=[0.9, 0.4], **more) for step in (5, 10)]
    run = read_history(write_run(tmp_path / "run", lines, config=named))
    found = {chart.title: [curve.name for curve in chart.curves] for chart in charts(run)}
    assert found == {
        "Loss": ["validation"],
        "Scores of validations": ["accuracy"],
        "iou of each class": ["background", "tumour"],
    }


def test_speed_is_that_since_the_last_start_without_its_first_reading(tmp_path: Path) -> None:
    seconds = {10: 9.0, 20: 7.0, 30: 1.0, 40: 2.0, 50: 3.0}
    lines = [train_line(step, seconds=value) for step, value in seconds.items()]
    run = read_history(write_run(tmp_path / "run", lines, starts=[started(), started(10)]))
    paces, memory = tables(run, None)
    assert paces.rows[0] == ["a step", "2.00 s", "1.00 s", "3.00 s"]
    assert paces.remarks[0].startswith("Of 3 readings since step 10, without the first.")
    assert memory.rows == [["0", "CPU, 2 cores (here)", "1.00 GiB", "3.00 GiB"]]


def test_damaged_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [train_line(10)])
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'[1]\n\xff\xfe\n{"kind": "train", "step": 3, "time": 1.0}\n{"kind": "tra')
    run = read_history(folder)
    assert (len(run.lines), run.damaged) == (1, 4)
    assert "Left out: 4 damaged lines of metrics.jsonl." in headline(run).more


def test_what_is_no_run_or_has_no_journal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not the folder of a run: there is no config\.toml"):
        read_history(tmp_path)
    failed = {"state": "failed", "error": "DataError: no such file\nand more"}
    folder = write_run(tmp_path / "run", [], failed)
    with pytest.raises(ConfigError, match=r"it has no lines yet.*The run failed: DataError: no such file$"):
        read_history(folder)
    (folder / "metrics.jsonl").write_text(json.dumps([1]))
    with pytest.raises(ConfigError, match=r"every line of it is damaged \(1\)"):
        read_history(folder)


@pytest.mark.parametrize("folder", ["runs/first", "/data/runs/first"])
def test_paths_are_relative_to_where_the_run_was_started(tmp_path: Path, folder: str) -> None:
    config = {"folder": folder}
    run = write_run(tmp_path / "runs" / "first", [train_line(1)], config=config)
    assert read_history(run).directory == (tmp_path if folder == "runs/first" else Path.cwd())
    noted = write_run(tmp_path / "moved", [train_line(1)], starts=[started(directory=str(tmp_path))], config=config)
    assert read_history(noted).directory == tmp_path
