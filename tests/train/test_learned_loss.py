"""Runs whose loss has parameters: the same curve under every plan, saved and resumed with them, exported without."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import run_config, write_images
from safetensors.torch import load_file

from mural.checkpoint import export, open_snapshot
from mural.errors import CheckpointError
from mural.train import Config
from mural.train.loop import fit_rank
from mural.train.run_check import compare
from ranks import run_on

FILE = Path(__file__).with_name("learned_loss.py")


def fit(config: Config) -> float:
    forget()
    return fit_rank(0, config).loss


def forget() -> None:
    """A rank of the pool serves many runs; each reads the file of the loss anew."""
    for name in [name for name in sys.modules if name.startswith("mural_user_learned_loss")]:
        del sys.modules[name]


def refused(config: Config) -> str:
    try:
        fit(config)
    except CheckpointError as error:
        return str(error)
    return ""


def kept(config: Config) -> dict[str, torch.Tensor]:
    snapshot = open_snapshot(config.folder / "checkpoints")
    return {name: snapshot.tensor(name) for name in snapshot.tensors if name != "random.cpu"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tempered", "loss"])
def test_a_run_resumes_with_its_loss_under_other_plans(tmp_path: Path, name: str) -> None:
    write_images(tmp_path)
    common: dict[str, Any] = {"loss__name": f"{FILE}:{name}", "model__dtype": "float64"}
    whole = run_config(tmp_path, tmp_path / "whole", **common, train__steps=4, checkpoint__every=1)
    run_on(1, fit, whole)
    plans = ({"data": 2}, {}, {"channel": 2, "channel_layers": "all"}, {"spatial": [2, 1]})
    for step, plan in enumerate(plans, 1):
        part = run_config(tmp_path, tmp_path / "parts", **common, train__steps=step, plan=plan, checkpoint__every=1)
        run_on(part.plan.devices, fit, part)
    mine, theirs = kept(part), kept(whole)
    scale = "model.loss.log_scale" if name == "tempered" else "model.loss.tempered.log_scale"
    assert mine.keys() == theirs.keys()
    assert scale in mine
    assert f"optimizer.state.{scale.removeprefix('model.')}.momentum_buffer" in mine
    assert float(theirs[scale]) != pytest.approx(0.3, abs=1e-4)
    assert max(float((mine[key].double() - theirs[key].double()).abs().max()) for key in theirs) < 1e-6
    out = tmp_path / "model.safetensors"
    export(part.folder, out)
    assert not [key for key in load_file(out) if key.startswith("loss")]
    without = run_config(tmp_path, tmp_path / "parts", model__dtype="float64", train__steps=5)
    assert "loss" in run_on(1, refused, without)[0]


def checked(config: Config) -> str:
    forget()
    return str(compare(0, config))


def test_a_run_with_its_loss_is_checked_against_one_device(tmp_path: Path) -> None:
    write_images(tmp_path)
    config = run_config(tmp_path, loss__name=f"{FILE}:tempered", model__dtype="float64", plan={"data": 2})
    texts = run_on(2, checked, config)
    assert all("exact" in text for text in texts), texts[0]
