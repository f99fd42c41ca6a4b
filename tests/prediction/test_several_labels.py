"""Several labels for each position: scored, written and predicted as yes or no for each, whatever the loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from torch.nn import functional as F

import mural
from mural.train import Config
from mural.train.loop import fit_rank
from mural.train.result_meaning import meaning_of
from mural.train.scores import Scores
from ranks import run_on

NAMES = ["disc", "bright", "left"]
OWN = """
from torch import nn
from torch.nn import functional as F
criterion = nn.BCEWithLogitsLoss()
def both(output, target):
    found = output.sigmoid()
    return F.binary_cross_entropy_with_logits(output, target) + 1 - (found * target).mean()
"""
LOSSES: dict[str, dict[str, Any]] = {
    "bce": {"name": "bce"},
    "function": {"name": "torch.nn.functional:binary_cross_entropy_with_logits"},
    "class": {"name": "torch.nn:BCEWithLogitsLoss", "arguments": {"pos_weight": [[[1.0]], [[2.0]], [[1.0]]]}},
    "instance": {"name": "own.py:criterion"},
    "own": {"name": "own.py:both"},
    "monai": {"name": "monai.losses:DiceLoss", "arguments": {"sigmoid": True}},
}


def write_labels(folder: Path, count: int = 3, side: int = 32) -> None:
    """Images with masks of three channels, each 0 or 1."""
    draw = np.random.default_rng(0)
    for kind in ("images", "masks"):
        (folder / kind).mkdir(parents=True)
    rows, columns = np.mgrid[:side, :side]
    for number in range(count):
        disc = (rows - draw.integers(8, 24)) ** 2 + (columns - draw.integers(8, 24)) ** 2 < 50
        bright = np.zeros((side, side), bool)
        bright[: draw.integers(4, 20)] = True
        image = np.stack([disc * 150, bright * 150, (columns < side // 2) * 150]) + draw.integers(
            0, 60, (3, side, side)
        )
        tifffile.imwrite(
            folder / f"images/{number}.tif", image.astype(np.uint8), photometric="rgb", planarconfig="separate"
        )
        mask = np.stack([disc, bright, columns < side // 2]).astype(np.uint8)
        tifffile.imwrite(folder / f"masks/{number}.tif", mask, photometric="minisblack", planarconfig="separate")
    (folder / "own.py").write_text(OWN)


def config_of(folder: Path, loss: dict[str, Any], **more: Any) -> Config:
    name = loss["name"].replace("own.py", str(folder / "own.py"))
    tables: dict[str, Any] = {
        "folder": str(folder / "run"),
        "model": {"factory": "mural.models:UNet", "arguments": {"classes": 3, "width": 4, "depth": 2}},
        "data": {
            "images": str(folder / "images/*.tif"), "masks": str(folder / "masks/*.tif"), "mask": "channels",
            "classes": NAMES,
        },
        "validation": {
            "images": str(folder / "images/*.tif"), "masks": str(folder / "masks/*.tif"), "write": "tiff", "every": 6,
        },
        "loss": loss | {"name": name},
        "optimizer": {"name": "AdamW", "lr": 0.02},
        "train": {"steps": 12},
        "log": {"every": 10, "tensorboard": "off"},
        "checkpoint": {"best": "mean_iou"},
    }  # fmt: skip
    return Config.of({**tables, **more})


def fit(config: Config) -> Any:
    return dict(fit_rank(0, config).scores)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_what_a_loss_takes_results_for(loss: dict[str, Any], tmp_path: Path) -> None:
    """They were values wherever there were several channels: the best checkpoint was that of the smallest logits."""
    pytest.importorskip("monai") if "monai" in loss["name"] else None
    write_labels(tmp_path, 1)
    config = config_of(tmp_path, loss)
    assert meaning_of(config, 3).kind == "logits"
    target = torch.randint(2, (2, 3, 8, 8)).float()
    right, wrong = Scores(config), Scores(config)
    right.add(target * 9 - 4, target, 0.1, 2)
    wrong.add(0.1 - target * 0.2, target, 0.9, 2)
    assert right.result()["mean_iou"] == 1.0
    assert wrong.result()["accuracy"] == 0.0


def test_a_label_that_is_wrong_lowers_its_own_score(tmp_path: Path) -> None:
    write_labels(tmp_path, 1)
    target = torch.zeros(1, 3, 4, 4)
    target[:, :2, :2] = 1
    output = target * 2 - 1
    output[:, 1] = 1  # yes everywhere
    scores = Scores(config_of(tmp_path, LOSSES["bce"]))
    scores.add(output, target, 0.0, 1)
    found = scores.result()
    assert found["iou"] == [1.0, 0.5, 0.0]
    assert found["mean_iou"] == 0.75  # the third label is nowhere
    assert found["accuracy"] == pytest.approx(5 / 6)


PLANS: dict[str, dict[str, Any]] = {"rank": {}, "ranks": {"spatial": [2, 1]}, "streamed": {"stream": [16, 16]}}


@pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=[pytest.mark.slow] if plan else [], id=name) for name, plan in PLANS.items()]
)
def test_validation_writes_what_predict_writes(plan: dict[str, Any], tmp_path: Path) -> None:
    """It wrote logits in floating numbers where `mural predict` writes 0 and 1."""
    write_labels(tmp_path)
    config = config_of(tmp_path, LOSSES["bce"], plan=plan)
    scores = run_on(2 if "spatial" in plan else 1, fit, config)[0]
    assert scores["mean_iou"] > 0.3
    assert [key for key in scores if key.startswith("iou/")] == [f"iou/{name}" for name in NAMES]
    lines = [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()]
    best = max((line for line in lines if line["kind"] == "validation"), key=lambda line: line["mean_iou"])
    mural.predict(config.folder, str(tmp_path / "images/*.tif"), tmp_path / "out", plan=mural.Plan())
    found: list[float] = []
    for number in range(3):
        written = config.folder / f"predictions/step-{best['step']:06d}/{number}.tif"
        mine, theirs = tifffile.imread(written), tifffile.imread(tmp_path / f"out/{number}.tif")
        assert mine.dtype == theirs.dtype == np.uint8
        assert mine.shape == theirs.shape == (3, 32, 32)
        assert (mine == theirs).all()
        found.append(float((mine == tifffile.imread(tmp_path / f"masks/{number}.tif")).mean()))
    assert best["accuracy"] == pytest.approx(np.mean(found))


def test_one_form_for_classes_and_values(tmp_path: Path) -> None:
    write_labels(tmp_path, 1)
    output = torch.randn(1, 3, 4, 4)
    for loss, mask, dtype in (("cross_entropy", "classes", torch.uint8), ("mse", "channels", torch.float32)):
        config = config_of(tmp_path, {"name": loss})
        config = Config.of({"loss": {"name": loss}, "data": {"mask": mask}})
        assert Scores(config).add(output, None, 0.0, 1).dtype == dtype


def test_a_loss_of_probabilities_and_one_that_nobody_knows(tmp_path: Path) -> None:
    write_labels(tmp_path, 1)
    (tmp_path / "own.py").write_text("def loss(output, target): return 1 - (output * target).mean() / output.sum()\n")
    target = torch.randint(2, (1, 3, 8, 8)).float()
    found = Scores(config_of(tmp_path, {"name": "torch.nn:BCELoss"}))
    found.add(target * 0.4 + 0.3, target, 0.0, 1)
    assert found.result()["mean_iou"] == 1.0
    unknown = Scores(config_of(tmp_path, {"name": "own.py:loss"}))
    assert torch.equal(unknown.add(target * 0.4, target, 0.5, 1), target * 0.4)
    assert unknown.result() == {"loss": 0.5}


def test_soft_labels_are_compared_with_probabilities() -> None:
    """Their distance was that from logits."""
    config = Config.of({"loss": {"name": "bce"}, "data": {"mask": "channels"}})
    scores, target = Scores(config), torch.rand(1, 2, 4, 4)
    scores.add(target.logit(), target, F.binary_cross_entropy(target, target).item(), 1)
    assert scores.result()["absolute_error"] == pytest.approx(0.0, abs=1e-6)
