"""Streamed runs: the curve, the scores and the files of the same run in memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from runs import run_config, write_images
from torch import Tensor

import mural
from mural.errors import DataError, PlanError, TrainingError
from mural.train import Config
from mural.train.loop import fit_rank
from mural.train.run_check import compare_first_batch
from mural.train.start import start
from ranks import run_on

TILE = 20
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images with masks of classes, and with soft masks in [0, 1]."""
    folder = tmp_path_factory.mktemp("images")
    write_images(folder)
    (folder / "soft").mkdir()
    for path in (folder / "masks").glob("*.tif"):
        soft = tifffile.imread(path).astype(np.float32)
        soft[-1, -1] = 0.5  # in the last tile alone
        tifffile.imwrite(folder / "soft" / path.name, soft, tile=(16, 16))
    return folder


def fit(config: Config) -> Any:
    return fit_rank(0, config)


def in_tiles(config: Config) -> Config:
    """The same run, streamed."""
    return replace(config, plan=replace(config.plan, stream=(TILE, TILE)))


def lines(config: Config, kind: str) -> list[dict[str, Any]]:
    text = (config.folder / "metrics.jsonl").read_text()
    return [line for line in map(json.loads, text.splitlines()) if line["kind"] == kind]


def scores(config: Config) -> list[dict[str, Any]]:
    """What validations found, and after which step."""
    about = ("kind", "time")
    return [{k: v for k, v in line.items() if k not in about} for line in lines(config, "validation")]


def alike(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    return found == [{k: pytest.approx(v, rel=1e-5) for k, v in line.items()} for line in expected]


def written(config: Config) -> dict[str, Tensor]:
    return {f"{p.parent.name}/{p.name}": mural.open(p).read() for p in (config.folder / "predictions").glob("*/*")}


ONE = {"factory": "mural.models:UNet", "arguments": {"classes": 1, "width": 4, "depth": 2}}
BCE = {"loss": {"name": "bce"}, "model": ONE, "data__mask": "channels"}
CASES: dict[str, tuple[dict[str, Any], str, torch.dtype]] = {
    "classes": ({}, "mean_iou", torch.uint8),
    "two classes in one channel": (BCE, "mean_iou", torch.uint8),
    "soft masks": (BCE | {"data__masks": "soft/*.tif"}, "absolute_error", torch.uint8),
}
PLANS = [
    {},
    {"spatial": [1, 2]},
    pytest.param({"data": 2}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("case", ["classes", *(pytest.param(name, marks=pytest.mark.slow) for name in list(CASES)[1:])])
def test_scores_and_predictions_are_those_of_images_in_memory(
    images: Path, tmp_path: Path, case: str, plan: dict[str, Any]
) -> None:
    options, score, dtype = CASES[case]
    options = dict(options)
    if "data__masks" in options:
        options["data__masks"] = str(images / options["data__masks"])
    options |= {"validation": {"fraction": 0.5, "write": "zarr", "every": 2}, "augment__noise": 0.1, "train__steps": 4}
    plain, tiled = (run_config(images, tmp_path / name, **options, plan=plan) for name in ("plain", "tiled"))
    ranks = max(1, plain.plan.devices)
    run_on(ranks, fit, plain)
    run_on(ranks, fit, in_tiles(tiled))
    curves = [[line["loss"] for line in lines(config, "train")] for config in (plain, tiled)]
    assert curves[0] == pytest.approx(curves[1], rel=1e-6)
    assert alike(scores(tiled), scores(plain))
    assert all(score in found for found in scores(tiled))
    files = written(plain), written(tiled)
    assert len(files[0]) == 6
    assert set(files[0]) == set(files[1])
    for name, tensor in files[0].items():
        assert tensor.dtype == files[1][name].dtype == dtype
        assert tensor.shape == files[1][name].shape == (1, 48, 48)
        assert (files[1][name] - tensor).abs().max() < 1e-5


@pytest.mark.parametrize("plan", [{}, pytest.param({"data": 2, "spatial": [1, 2]}, marks=pytest.mark.slow)], ids=str)
def test_labels(images: Path, tmp_path: Path, plan: dict[str, Any]) -> None:
    table = tmp_path / "labels.csv"
    rows = [f"{path},{i % 2}" for i, path in enumerate(sorted((images / "images").glob("*.tif")))]
    table.write_text("\n".join(["image,label", *rows]) + "\n")
    model = {"factory": f"{HERE / 'dropping.py'}:classifier"}
    data = {"table": str(table), "batch": 2}
    options = {"model": model, "data": data, "validation": {"table": str(table)}, "train__steps": 3, "plan": plan}
    plain, tiled = (run_config(images, tmp_path / name, **options) for name in ("plain", "tiled"))
    ranks = max(1, plain.plan.devices)
    run_on(ranks, fit, plain)
    run_on(ranks, fit, in_tiles(tiled))
    assert alike(scores(tiled), scores(plain))
    assert "accuracy" in lines(plain, "validation")[0]


def test_a_run_in_memory_goes_on_by_window(images: Path, tmp_path: Path) -> None:
    more = {"augment__noise": 0.1, "augment__gamma": 0.2, "data__crop": [32, 32]}
    whole = run_config(images, tmp_path / "whole", **more, train__steps=7)
    fit(whole)
    fit(run_config(images, tmp_path / "parts", **more, train__steps=2))
    rest = run_config(images, tmp_path / "parts", **more, train__steps=7, checkpoint__resume="must")
    fit(in_tiles(rest))
    found, expected = ([line["loss"] for line in lines(config, "train")] for config in (rest, whole))
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_file_that_cannot_be_read_ends_the_step_with_its_name(images: Path, tmp_path: Path) -> None:
    write_images(tmp_path, 2)
    mask = tifffile.imread(tmp_path / "masks/1.tif")
    mask[40, 40] = 7
    tifffile.imwrite(tmp_path / "masks/1.tif", mask, tile=(16, 16))
    config = run_config(tmp_path, tmp_path / "run", data__batch=1, train__steps=2)
    with pytest.raises(DataError, match=r"masks/1\.tif: the mask holds the value 7"):
        fit(in_tiles(config))


def test_an_image_that_is_no_number_is_found_by_window(tmp_path: Path) -> None:
    write_images(tmp_path, 2)
    for path in (tmp_path / "images").glob("*.tif"):
        image = tifffile.imread(path).astype(np.float32)
        image[45, 45, 1] = np.nan
        tifffile.imwrite(path, image, tile=(16, 16), photometric="rgb")
    with pytest.raises(TrainingError, match="the image was the first that is not finite"):
        fit(in_tiles(run_config(tmp_path, tmp_path / "run", train__steps=2)))


def test_the_first_batch_is_compared_whole(images: Path, tmp_path: Path) -> None:
    with start(in_tiles(run_config(images, tmp_path / "run"))) as run:
        assert compare_first_batch(run).exact


def test_a_plan_that_does_not_stream_gives_no_tiles(images: Path, tmp_path: Path) -> None:
    with start(run_config(images, tmp_path / "run")) as run, pytest.raises(PlanError, match="plans that stream"):
        run.pm.evaluate_into(torch.zeros(1, 3, 8, 8), None, None)
