"""The best checkpoint by a score, which is kept, and runs that end when nothing gets better."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from runs import run_config, write_images

from mural.checkpoint.folder import steps_in
from mural.errors import ConfigError
from mural.train import Config, Result
from mural.train.best import best_of
from mural.train.loop import fit_rank
from ranks import run_on


def described(folder: Path, **more: Any) -> Config:
    """Six updates with a validation after each, of which only the newest checkpoint is kept."""
    held = {"fraction": 0.4, "every": 1}
    return run_config(folder, validation=held, checkpoint__every=0, checkpoint__keep=1, **more)


def fit(config: Config) -> Result:
    return fit_rank(0, config)


def losses(config: Config) -> dict[int, float]:
    lines = map(json.loads, (config.folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "validation"}


def test_the_best_of_validations() -> None:
    seen = [(1, {"accuracy": 0.5, "loss": 2.0}), (2, {"accuracy": 0.7, "loss": float("nan")}), (3, {"accuracy": 0.7})]
    accuracy = Config.of({"checkpoint": {"best": "validation/accuracy"}})
    best = best_of(seen, accuracy)
    assert best is not None
    assert (best.step, best.value, best.since) == (2, 0.7, 1)
    low = best_of(seen, Config.of({"checkpoint": {"best": "accuracy", "best_is": "min"}}))
    assert low is not None
    assert low.step == 1
    least = best_of(seen[:2], Config.of({"train": {"stop_after": 2}}))
    assert least is not None
    assert (least.score, least.step) == ("loss", 1)
    assert best_of(seen, Config()) is None
    with pytest.raises(ConfigError, match=r"after step 1 has no such score: choose one of accuracy, loss"):
        best_of(seen, Config.of({"checkpoint": {"best": "acuracy"}}))


def test_the_best_checkpoint_stays_and_the_run_ends_where_nothing_gets_better(tmp_path: Path) -> None:
    write_images(tmp_path, 5)
    best = {"checkpoint__best": "loss", "checkpoint__best_is": "max", "train__stop_after": 3}
    config = described(tmp_path, optimizer__lr=0.01, **best)
    result = fit_rank(0, config)
    found = losses(config)
    peak = max(found, key=found.__getitem__)
    assert result.step == max(found) == peak + 3 < 6
    assert "no better loss in 3 validations" in result.stopped
    assert steps_in(config.folder / "checkpoints") == [peak, result.step]
    assert fit_rank(0, config).step == result.step  # there is still nothing to gain


def test_ranks_agree_on_the_best_while_a_save_is_under_way(tmp_path: Path) -> None:
    """They did so over the messages of the thread that saves, which mixed both up."""
    write_images(tmp_path, 5)
    config = described(tmp_path, checkpoint__best="loss", plan={"spatial": [2, 1]})
    assert [result.step for result in run_on(2, fit, config)] == [6, 6]
    found = losses(config)
    assert {min(found, key=found.__getitem__), 6} <= set(steps_in(config.folder / "checkpoints"))


def test_a_best_score_needs_held_out_images(tmp_path: Path) -> None:
    write_images(tmp_path, 2)
    with pytest.raises(ConfigError, match="nothing is held out"):
        fit_rank(0, run_config(tmp_path, checkpoint__best="loss"))
