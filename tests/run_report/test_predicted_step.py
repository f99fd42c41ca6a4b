"""What is predicted for a step of a run: under its plan, on one device, or not at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runs import run_config, write_images
from told import started, train_line, write_run

from mural.run_report.predicted_step import Prediction, predicted_step
from mural.run_report.run_history import read_history
from mural.run_report.run_speed import tables
from mural.train.configured_samples import datasets

IMAGES = {"": {"samples": 2, "held_out": 0, "channels": 3, "dtype": "uint8", "smallest": [48, 48], "largest": [48, 48]}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("predicted")
    write_images(made, 2)
    return made


def predicted(folder: Path, tmp_path: Path, device: str, **changes: Any) -> tuple[Prediction | None, list[list[str]]]:
    """The prediction for a run, and the rows of the table of paces."""
    config = run_config(folder, model__arguments={"classes": 2, "width": 4, "depth": 2}, **changes)
    start = started(images=IMAGES, devices=(device,))
    run = read_history(write_run(tmp_path / "run", [train_line(1)], starts=[start]))
    run = replace(run, config=config)
    found = predicted_step(run, datasets(config))
    return found, [list(row) for row in tables(run, found)[0].rows]


def test_a_step_on_a_known_gpu_has_a_time_and_a_peak(folder: Path, tmp_path: Path) -> None:
    found, rows = predicted(folder, tmp_path, "NVIDIA H200")
    assert found is not None
    assert found.seconds is not None
    assert 0 < found.seconds < 1
    assert 2**20 < found.peak < 2**30
    assert rows[0][-1].endswith("ms")


@pytest.mark.parametrize("device", ["CPU, 2 cores", "NVIDIA A100"])
def test_on_other_devices_the_peak_alone_is_predicted(folder: Path, tmp_path: Path, device: str) -> None:
    found, rows = predicted(folder, tmp_path, device)
    assert found is not None
    assert found.seconds is None
    assert len(rows[0]) == 4


@pytest.mark.slow
def test_larger_batches_need_more_and_streaming_less(folder: Path, tmp_path: Path) -> None:
    plans: list[dict[str, Any]] = [{"data__batch": 16}, {}, {"plan": {"stream": [24, 24]}}]
    found = [predicted(folder, tmp_path / str(n), "CPU, 2 cores", **plan)[0] for n, plan in enumerate(plans)]
    large, plain, streamed = (one.peak if one is not None else 0 for one in found)
    assert large > plain > streamed > 0


@pytest.mark.parametrize(
    "changes",
    [{"plan": {"spatial": [2, 1]}}, {"plan": {"offload": ["activations"]}}, {"model": {"factory": "no.such:model"}}],
)
def test_what_cannot_be_predicted_is_left_out(folder: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    config = run_config(folder, **changes)
    run = read_history(write_run(tmp_path / "run", [train_line(1)], starts=[started(images=IMAGES)]))
    assert predicted_step(replace(run, config=config), datasets(config)) is None
