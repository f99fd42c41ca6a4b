"""What modules keep besides tensors survives a run's checkpoints, whichever rank has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import run_config, write_images

from mural.checkpoint import open_snapshot
from mural.train import Config
from mural.train.loop import fit_rank
from ranks import run_on

HERE = Path(__file__).parent


def fit(config: Config) -> int:
    return fit_rank(0, config).step


def kept(config: Config) -> tuple[Any, torch.Tensor]:
    snapshot = open_snapshot(config.folder / "checkpoints")
    extra = snapshot.values["model"]["extra"]["3"]
    return extra["seen"], snapshot.tensor(extra["mean"]["$tensor"])


@pytest.mark.parametrize("plan", [{}, {"data": 2}, {"stage": 2, "cuts": ["2"]}], ids=str)
def test_extra_states_survive_checkpoints_on_every_plan(tmp_path: Path, plan: dict[str, Any]) -> None:
    """Under stages, a checkpoint held rank 0's, which never ran the module."""
    write_images(tmp_path)
    model = {"factory": f"{HERE / 'dropping.py'}:remembering", "dtype": "float64"}
    whole = run_config(tmp_path, tmp_path / "whole", model=model, train__steps=4)
    half = run_config(tmp_path, tmp_path / "half", model=model, train__steps=2, plan=plan)
    rest = run_config(tmp_path, tmp_path / "half", model=model, train__steps=4, checkpoint__resume="must")
    run_on(1, fit, whole)
    run_on(half.plan.devices, fit, half)
    run_on(1, fit, rest)
    (seen, mean), (known, wanted) = kept(rest), kept(whole)
    assert seen == known
    torch.testing.assert_close(mean, wanted)
