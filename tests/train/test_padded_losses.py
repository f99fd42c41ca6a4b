"""Losses over padded targets: exactly those of what is not padded, on one rank, on several and in tiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from runs import run_config, write_images
from torch import Tensor
from torch.nn import functional as F

import mural
from mural.errors import ConfigError, DataError
from mural.shard import dice_loss
from mural.train.config import LossConfig
from mural.train.configured_loss import PADDED, make_loss
from mural.train.loop import fit_rank
from ranks import run_on

CPU, DOUBLE = torch.device("cpu"), torch.float64
LABELS = {
    "bce": F.binary_cross_entropy_with_logits, "mse": F.mse_loss, "l1": F.l1_loss, "smooth_l1": F.smooth_l1_loss,
    "cross_entropy": F.cross_entropy, "dice": dice_loss,
}  # fmt: skip
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in LABELS),
    ("bce", {"pos_weight": [2.0]}), ("bce", {"reduction": "sum"}), ("smooth_l1", {"beta": 0.3}),
    ("cross_entropy", {"weight": [1.0, 2.0, 0.5]}), ("cross_entropy", {"ignore_index": 0}),
    ("cross_entropy", {"label_smoothing": 0.1}), ("dice", {"background": False}), ("dice", {"ignore_index": 2}),
]  # fmt: skip


def target_for(name: str) -> Tensor:
    """Classes or yes and no for two images of 3 channels."""
    draw = torch.Generator().manual_seed(3)
    classes = torch.randint(3, (2, 10, 13), generator=draw)
    values = torch.randint(2, (2, 3, 10, 13), generator=draw).double()
    return classes if name in ("cross_entropy", "dice") else values


@pytest.mark.parametrize(("name", "arguments"), CASES, ids=str)
def test_padding_counts_in_no_loss(name: str, arguments: dict[str, Any]) -> None:
    output = torch.randn(2, 3, 16, 16, dtype=DOUBLE, requires_grad=True)
    target = target_for(name)
    given = {k: torch.tensor(v, dtype=DOUBLE) if isinstance(v, list) else v for k, v in arguments.items()}
    expected = LABELS[name](output[..., :10, :13], target, **given)
    padding = PADDED if name in ("cross_entropy", "dice") else float("nan")
    padded = F.pad(target, (0, 3, 0, 6), value=padding)
    found = make_loss(LossConfig(name, arguments), CPU, DOUBLE, padded=True)(output, padded)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    for mine, plain in zip(*(torch.autograd.grad(loss, output) for loss in (found, expected)), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-12, atol=1e-15)


def test_probabilities_of_classes_may_be_padded() -> None:
    output, target = torch.randn(2, 3, 16, dtype=DOUBLE), torch.rand(2, 3, 10, dtype=DOUBLE).softmax(1)
    padded = F.pad(target, (0, 6), value=float("nan"))
    found = make_loss(LossConfig(), CPU, DOUBLE, padded=True)(output, padded)
    torch.testing.assert_close(found, F.cross_entropy(output[..., :10], target), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["mse", "l1"])
def test_weights_do_not_go_with_padding(name: str) -> None:
    with pytest.raises(ConfigError, match=r"weight does not go with data\.multiple"):
        make_loss(LossConfig(name, {"weight": [1.0]}), CPU, DOUBLE, padded=True)


def several(folder: Path, side: int) -> None:
    """Masks of two channels: discs, and where an image is bright."""
    write_images(folder, 4, side=side)
    (folder / "labels").mkdir()
    for file in sorted((folder / "masks").glob("*.tif")):
        mask, image = tifffile.imread(file), tifffile.imread(folder / "images" / file.name)
        both = np.stack([mask, (image[..., 0] > 60).astype(np.uint8)])
        tifffile.imwrite(folder / "labels" / file.name, both, photometric="minisblack", planarconfig="separate")


PLANS: dict[str, dict[str, Any]] = {"rank": {}, "ranks": {"spatial": [2, 1]}, "streamed": {"stream": [24, 24]}}


def fit(config: mural.train.Config) -> tuple[float, Any]:
    result = fit_rank(0, config)
    return result.loss, result.scores


@pytest.mark.parametrize("name", ["mse", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bce", "dice"))])
def test_padded_runs_are_equal_whatever_the_plan(name: str, tmp_path: Path) -> None:
    several(tmp_path, 43)
    more: dict[str, Any] = (
        {} if name == "dice" else {"data__mask": "channels", "data__masks": str(tmp_path / "labels/*.tif")}
    )
    held = {
        "images": str(tmp_path / "images/[01].tif"),
        "masks": more.get("data__masks", str(tmp_path / "masks/*.tif")),
    }
    held["masks"] = held["masks"].replace("*", "[01]")
    more |= {"loss": {"name": name}, "validation": held, "data__multiple": 16, "model__dtype": "float64"}
    found: dict[str, tuple[float, Any]] = {}
    for plan, tables in PLANS.items():
        config = run_config(tmp_path, plan, plan=tables, train__steps=2, **more)
        found[plan] = run_on(2 if plan == "ranks" else 1, fit, config)[0]
    for loss, scores in found.values():
        assert loss == pytest.approx(found["rank"][0], rel=1e-10)
        assert scores == {k: pytest.approx(v, rel=1e-9) for k, v in found["rank"][1].items()}


def test_a_mask_that_holds_what_marks_padding_is_refused(tmp_path: Path) -> None:
    write_images(tmp_path, 2, side=43)
    for file in (tmp_path / "masks").glob("*.tif"):
        mask = tifffile.imread(file).astype(np.float32)
        mask[3, 4] = np.nan
        tifffile.imwrite(file, mask)
    one = {"classes": 1, "width": 4, "depth": 2}
    config = run_config(tmp_path, data__multiple=16, data__mask="channels", loss={"name": "mse"}, model__arguments=one)
    with pytest.raises(DataError, match="the mask holds NaN"):
        fit_rank(0, config)
