"""Runs through the public calls: equal curves under every plan, resume to the bit, clear ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tifffile
import torch
from runs import run_config, write_images
from safetensors.torch import load_file

import mural
from mural.checkpoint import export
from mural.errors import CheckpointError, ConfigError, DataError, TrainingError
from mural.train import Config, Trainer
from mural.train.loop import fit_rank
from ranks import run_on


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    write_images(folder)
    return folder


def fit(config: Config) -> mural.train.Result:
    return fit_rank(0, config)


def curve(config: Config, kind: str = "train") -> list[dict[str, Any]]:
    lines = (config.folder / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] == kind]


def weights(config: Config) -> dict[str, torch.Tensor]:
    out = config.folder / "weights.safetensors"
    export(config.folder, out)
    return load_file(out)


PLANS = [{"data": 2}, {"spatial": [2, 1]}, {"data": 2, "spatial": [1, 2]}, {"spatial": [2, 2]}]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_the_curve_is_the_same_under_every_plan(images: Path, tmp_path: Path, plan: dict[str, Any]) -> None:
    more = {
        "model__dtype": "float64",
        "augment": {"flips": True, "rotations": True, "noise": 0.02, "brightness": 0.1},
        "validation__fraction": 0.34,
        "data__batch": 3,
        "schedule__name": "cosine",
        "train__clip": 1.0,
    }
    one = run_config(images, tmp_path / "one", **more)
    fit(one)
    many = run_config(images, tmp_path / "many", **more, plan=plan)
    run_on(many.plan.devices, fit, many)
    for kind, keys in (("train", ("loss", "gradient_norm", "lr")), ("validation", ("loss", "accuracy", "mean_iou"))):
        ours, theirs = curve(many, kind), curve(one, kind)
        assert [line["step"] for line in ours] == [line["step"] for line in theirs]
        for key in keys:
            assert [line[key] for line in ours] == pytest.approx([line[key] for line in theirs], rel=1e-9)
    for name, tensor in weights(one).items():
        torch.testing.assert_close(weights(many)[name], tensor, rtol=1e-8, atol=1e-10)


def test_it_learns(images: Path, tmp_path: Path) -> None:
    config = run_config(images, tmp_path / "run", train={"steps": 40}, validation__fraction=0.34, log__every=10)
    result = fit(config)
    assert result.step == 40
    assert result.scores["mean_iou"] > 0.8
    assert curve(config)[-1]["loss"] < 0.5 * curve(config)[0]["loss"]


def test_the_folder_tells_the_run(images: Path, tmp_path: Path) -> None:
    config = run_config(images, tmp_path / "run", validation__fraction=0.34, validation__write="tiff")
    fit(config)
    assert Config.load(config.folder / "config.toml") == config
    line = curve(config)[-1]
    assert {"loss", "lr", "step_seconds", "images_per_second", "megapixels_per_second"} <= set(line)
    assert {"communication", "data_wait", "peak_memory", "gradient_norm"} <= set(line)
    assert json.loads((config.folder / "status.json").read_text())["state"] == "finished"
    written = sorted((config.folder / "predictions").glob("*/*.tif"))
    assert len(written) >= 2
    assert tifffile.imread(written[0]).shape[-2:] == (48, 48)
    with pytest.raises(CheckpointError, match="holds step 6"):
        fit(run_config(images, tmp_path / "run", checkpoint__resume="never"))


@pytest.mark.parametrize("plan", [{}, {"data": 2}, {"spatial": [2, 1]}], ids=str)
def test_a_resumed_run_repeats_every_bit(images: Path, tmp_path: Path, plan: dict[str, Any]) -> None:
    dropping = {"factory": f"{Path(__file__).parent / 'dropping.py'}:make"}
    more = {"model": dropping, "augment__flips": True, "plan": plan, "optimizer": {"name": "AdamW", "lr": 0.01}}
    whole = run_config(images, tmp_path / "whole", **more, train__steps=7)
    parts = run_config(images, tmp_path / "parts", **more, train__steps=3)
    rest = run_config(images, tmp_path / "parts", **more, train__steps=7, checkpoint__resume="must")
    for config in (whole, parts, rest):
        run_on(max(1, config.plan.devices), fit, config)
    assert [line["loss"] for line in curve(rest)] == [line["loss"] for line in curve(whole)]
    for name, tensor in weights(whole).items():
        assert torch.equal(weights(rest)[name], tensor), name


def test_a_run_resumes_under_another_plan(images: Path, tmp_path: Path) -> None:
    more = {"model__dtype": "float64", "train__accumulate": 2}
    whole = run_config(images, tmp_path / "whole", **more)
    fit(whole)
    fit(run_config(images, tmp_path / "parts", **more, train__steps=2))
    second = run_config(images, tmp_path / "parts", **more, train__steps=4, plan={"data": 2, "spatial": [2, 1]})
    run_on(4, fit, second)
    last = run_config(images, tmp_path / "parts", **more, plan={"spatial": [1, 2]})
    run_on(2, fit, last)
    assert [line["loss"] for line in curve(last)] == pytest.approx([line["loss"] for line in curve(whole)], rel=1e-9)
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(last)[name], tensor, rtol=1e-8, atol=1e-10)


def caught(config: Config) -> str:
    try:
        fit(config)
    except (TrainingError, DataError, ConfigError, mural.PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("plan", [{}, {"spatial": [2, 1]}, {"data": 2}], ids=str)
def test_a_loss_that_is_no_number_names_step_and_layer(images: Path, tmp_path: Path, plan: dict[str, Any]) -> None:
    broken = {"factory": f"{Path(__file__).parent / 'dropping.py'}:breaking", "arguments": {"after": 3}}
    config = run_config(images, tmp_path / "run", model=broken, plan=plan)
    for text in run_on(max(1, config.plan.devices), caught, config):
        assert "TrainingError: step 4 (epoch 1" in text
        assert "the output of breaks (Breaks) was the first that is not finite" in text
        assert "Step 2 is saved in" in text
    assert weights(config)["conv.weight"].isfinite().all()


def test_nothing_to_train_on(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to train on"):
        Trainer({"folder": str(tmp_path / "run")}).fit()
    with pytest.raises(DataError, match="nothing"):
        Trainer({"folder": str(tmp_path / "run"), "data": {"images": str(tmp_path / "*.tif")}}).fit()


def test_a_bad_file_ends_the_run_on_every_rank_before_it_starts(images: Path, tmp_path: Path) -> None:
    write_images(tmp_path, 4)
    path = tmp_path / "images" / "2.tif"
    path.write_bytes(path.read_bytes()[:-900])
    config = run_config(tmp_path, tmp_path / "run", plan={"spatial": [2, 1]})
    for text in run_on(2, caught, config):
        assert "DataError" in text
        assert "2.tif" in text
    skipping = run_config(tmp_path, tmp_path / "run", plan={"spatial": [2, 1]}, data__skip_bad=True)
    results = run_on(2, fit, skipping)
    assert results[0].step == 6
    status = json.loads((skipping.folder / "status.json").read_text())
    assert ["2.tif" in bad["name"] for bad in status["bad"]] == [True]


def test_a_folder_that_cannot_be_written(images: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        fit(run_config(images, tmp_path / "file" / "run"))
