"""Runs through the public calls: equal curves under every plan, resume to the bit, clear ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import tifffile
import torch
from runs import run_config, write_images
from safetensors.torch import load_file

import mural
from mural.checkpoint import export
from mural.errors import CheckpointError, ConfigError, DataError, TrainingError
from mural.train import Config, Result, Trainer
from mural.train.loop import fit_rank
from ranks import run_on


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    write_images(folder)
    return folder


def fit(config: Config) -> Result:
    return fit_rank(0, config)


def curve(config: Config, kind: str = "train") -> list[dict[str, Any]]:
    lines = (config.folder / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] == kind]


def weights(config: Config) -> dict[str, torch.Tensor]:
    out = config.folder / "weights.safetensors"
    export(config.folder, out)
    return load_file(out)


HERE = Path(__file__).parent
PLANS = [
    {"data": 2, "spatial": [1, 2]},
    {"spatial": [2, 1]},
    {"stage": 2},
    {"offload": ["activations", "parameters", "optimizer"], "memory": "100KB", "recompute": "all"},
    pytest.param({"stage": 2, "data": 2, "cuts": "layers"}, marks=pytest.mark.slow),
    pytest.param({"stage": 2, "grids": [[2, 1], [1, 1]]}, marks=pytest.mark.slow),
    pytest.param({"data": 2}, marks=pytest.mark.slow),
    pytest.param({"spatial": [2, 2]}, marks=pytest.mark.slow),
]


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", [{"spatial": [2, 1]}, pytest.param({"data": 2, "spatial": [1, 2]}, marks=pytest.mark.slow)], ids=str
)
def test_a_real_task_is_learned_alike(tmp_path: Path, plan: dict[str, Any]) -> None:
    """Stained tissue that scikit-image ships, in float32: curves agree up to rounding, and the loss falls."""
    more = {
        "model": {"arguments": {"classes": 3, "width": 4, "depth": 2, "norm": "batch"}},
        "data": {
            "dataset": f"{HERE / 'dropping.py'}:tissue",
            "crop": [96, 96],
            "repeat": 8,
            "batch": 2,
        },
        "augment": {"flips": True, "rotations": True, "brightness": 0.05},
        "optimizer": {"name": "Adam", "lr": 3e-3},
        "train__steps": 12,
    }
    one, many = run_config(tmp_path, "one", **more), run_config(tmp_path, "many", **more, plan=plan)
    fit(one)
    run_on(many.plan.devices, fit, many)
    losses = [[line["loss"] for line in curve(config)] for config in (one, many)]
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
    assert sum(losses[1][-3:]) < 0.9 * sum(losses[1][:3])


def test_labels_from_a_table(tmp_path: Path) -> None:
    """Images with labels: the same curve on one rank and on data × spatial, with accuracy on held-out images."""
    write_images(tmp_path, 6)
    rows = "".join(f"images/{i}.tif,{i % 2}\n" for i in range(6))
    (tmp_path / "labels.csv").write_text("image,label\n" + rows)
    model = {"factory": f"{HERE / 'dropping.py'}:classifier", "dtype": "float64"}
    data = {"table": str(tmp_path / "labels.csv"), "batch": 3}
    more = {"model": model, "data": data, "validation": {"fraction": 0.34, "every": 3}}
    one, many = (run_config(tmp_path, tmp_path / name, **more) for name in ("one", "many"))
    many = many.with_plan(mural.Plan(data=2, spatial=(1, 2)))
    fit(one)
    run_on(4, fit, many)
    for kind in ("train", "validation"):
        losses = [[line["loss"] for line in curve(c, kind)] for c in (one, many)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    assert "accuracy" in curve(many, "validation")[0]


@pytest.mark.slow
def test_volumes(tmp_path: Path) -> None:
    """NIfTI volumes with masks, cut along depth and rows, with predictions of whole volumes."""
    draw = np.random.default_rng(0)
    for kind in ("images", "masks"):
        (tmp_path / kind).mkdir()
    for index in range(3):
        mask = (draw.random((12, 14, 10)) > 0.5).astype(np.uint8)
        for kind, values in (
            ("images", (mask * 100 + draw.integers(0, 50, mask.shape)).astype(np.int16)),
            ("masks", mask),
        ):
            nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), tmp_path / kind / f"{index}.nii")
    model = {
        "factory": "mural.models:UNet3D",
        "arguments": {"in_channels": 1, "classes": 2, "width": 4, "depth": 2},
        "dtype": "float64",
    }
    data = {"images": str(tmp_path / "images/*.nii"), "masks": str(tmp_path / "masks/*.nii"), "scale": 150.0}
    more = {"model": model, "data": data, "validation": {"fraction": 0.34, "write": "zarr"}, "train__steps": 3}
    one = run_config(tmp_path, tmp_path / "one", **more)
    many = run_config(tmp_path, tmp_path / "many", **more, plan={"spatial": [2, 2, 1]})
    fit(one)
    run_on(4, fit, many)
    assert [x["loss"] for x in curve(many)] == pytest.approx([x["loss"] for x in curve(one)], rel=1e-9)
    written = [sorted((c.folder / "predictions").glob("*/*.zarr"))[-1] for c in (one, many)]
    first, second = (mural.open(path).read() for path in written)
    assert first.shape == (1, 12, 14, 10)
    assert torch.equal(first, second)


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


@pytest.mark.parametrize("plan", [{}, {"data": 2}, {"spatial": [2, 1]}, {"stage": 2}], ids=str)
def test_a_resumed_run_repeats_every_bit(images: Path, tmp_path: Path, plan: dict[str, Any]) -> None:
    dropping = {"factory": f"{HERE / 'dropping.py'}:make"}
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
    second = run_config(images, tmp_path / "parts", **more, train__steps=3, plan={"data": 2, "spatial": [2, 1]})
    run_on(4, fit, second)
    third = run_config(images, tmp_path / "parts", **more, train__steps=4, plan={"stage": 2, "cuts": ["up"]})
    run_on(2, fit, third)
    # Its optimizer keeps its numbers on the host, and finds them there.
    fourth = run_config(
        images, tmp_path / "parts", **more, train__steps=5, plan={"offload": ["optimizer"], "memory": "1KB"}
    )
    fit(fourth)
    last = run_config(images, tmp_path / "parts", **more, plan={"spatial": [1, 2]})
    run_on(2, fit, last)
    assert [line["loss"] for line in curve(last)] == pytest.approx([line["loss"] for line in curve(whole)], rel=1e-9)
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(last)[name], tensor, rtol=1e-8, atol=1e-10)


def test_a_resumed_run_whose_batches_are_others_says_so(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the middle of an epoch, the number of batches used says nothing of batches of another size."""
    fit(run_config(images, tmp_path / "run", train__steps=2))
    fit(run_config(images, tmp_path / "run", train__steps=4, data__batch=3))
    assert "the batches are others than those of the checkpoint: on with epoch 1" in capsys.readouterr().out


def caught(config: Config) -> str:
    try:
        fit(config)
    except (TrainingError, DataError, ConfigError, mural.PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("plan", [{}, {"spatial": [2, 1]}, {"data": 2}, {"stage": 2, "cuts": ["last"]}], ids=str)
def test_a_loss_that_is_no_number_names_step_and_layer(images: Path, tmp_path: Path, plan: dict[str, Any]) -> None:
    broken = {"factory": f"{HERE / 'dropping.py'}:breaking", "arguments": {"after": 3}}
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
