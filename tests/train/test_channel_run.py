"""Runs with `[plan] channel = 2`: the same curve and weights as on one rank, resumed under other plans, and checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from runs import run_config, write_images
from safetensors.torch import load_file

from mural.checkpoint import export
from mural.train import Config, Result
from mural.train.loop import fit_rank
from mural.train.run_check import compare
from ranks import run_on

SPLIT = {"channel": 2, "channel_layers": "all", "channel_exchange": "rank"}
MORE = {"model__dtype": "float64", "data__batch": 3, "train__clip": 1.0, "validation__fraction": 0.34}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    write_images(folder)
    return folder


def fit(config: Config) -> Result:
    return fit_rank(0, config)


def losses(config: Config) -> list[float]:
    lines = map(json.loads, (config.folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines]


def weights(config: Config) -> dict[str, torch.Tensor]:
    out = config.folder / "weights.safetensors"
    export(config.folder, out)
    return load_file(out)


@pytest.mark.slow
def test_a_run_is_the_same_with_split_layers_and_resumes_under_any_plan(images: Path, tmp_path: Path) -> None:
    one = run_config(images, str(tmp_path / "one"), **MORE)
    fit(one)
    wide = {"channel": 4, "channel_layers": "all"}
    for steps, plan in ((2, SPLIT), (3, {"spatial": [2, 1]}), (4, {**SPLIT, "data": 2}), (6, wide)):
        many = run_config(images, str(tmp_path / "many"), **MORE, plan=plan, train__steps=steps)
        run_on(many.plan.devices, fit, many)
    mine, theirs = weights(many), weights(one)
    assert mine.keys() == theirs.keys()
    assert max(float((mine[name] - theirs[name]).abs().max()) for name in theirs) < 1e-8
    assert losses(many)[-1] == pytest.approx(losses(one)[-1], rel=1e-8)


@pytest.mark.parametrize("plan", [SPLIT, {"stage": 2}], ids=["channel", "stage"])
def test_a_run_is_checked_against_one_device(images: Path, tmp_path: Path, plan: dict[str, object]) -> None:
    arguments = {"classes": 2, "width": 4, "depth": 2, "norm": "group"}
    config = run_config(images, str(tmp_path / "run"), model__dtype="float64", plan=plan, model__arguments=arguments)
    assert max(max(found.values()) for found in run_on(2, compare, 0, config)) < 1e-10


def test_a_loss_that_is_no_number_names_the_split_layer(images: Path, tmp_path: Path) -> None:
    config = run_config(images, str(tmp_path / "run"), plan=SPLIT, optimizer__lr=1e30)
    for text in run_on(2, caught, config):
        assert "was the first that is not finite" in text


def caught(config: Config) -> str:
    try:
        fit(config)
    except Exception as error:
        return str(error)
    return ""
