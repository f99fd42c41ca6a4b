"""Losses that are classes, with arguments from the run's file: MONAI's and torch's, trained, scored and predicted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from runs import run_config, write_images
from torch import nn
from torch.nn import functional as F

import mural
from mural.errors import ConfigError, UnfitData
from mural.train.config import Config, LossConfig
from mural.train.configured_loss import label_range, make_loss
from mural.train.loop import fit_rank
from mural.train.result_meaning import kind_of
from ranks import run_on

CPU = torch.device("cpu")
MONAI = {"to_onehot_y": True, "softmax": True}


def loss_of(name: str, **arguments: Any) -> Callable[..., Any]:
    return make_loss(LossConfig(name, arguments), CPU, torch.float64)


def test_an_instance_is_made_of_a_class() -> None:
    scores, target = torch.randn(2, 3, 4, 4).double(), torch.randint(3, (2, 4, 4))
    loss = loss_of("torch.nn:CrossEntropyLoss", weight=[1.0, 2.0, 3.0], ignore_index=2)
    weight = torch.tensor([1.0, 2.0, 3.0]).double()
    torch.testing.assert_close(loss(scores, target), F.cross_entropy(scores, target, weight, ignore_index=2))
    found = label_range(loss, (3, 4, 4))
    assert found is not None
    assert (found.classes, found.ignored) == (3, 2)


@pytest.mark.parametrize(
    ("name", "arguments", "kind"),
    [
        ("DiceCELoss", MONAI, "classes"),
        ("DiceLoss", {"sigmoid": True}, "logits"),
        ("DiceLoss", {"sigmoid": True, "to_onehot_y": True}, "classes"),
        ("TverskyLoss", {"softmax": True}, "classes"),
        ("DiceFocalLoss", MONAI, "classes"),
        ("FocalLoss", {}, "logits"),
        ("FocalLoss", {"use_softmax": True}, "classes"),
        ("GeneralizedDiceLoss", MONAI, "classes"),
        ("DiceLoss", {}, "unknown"),
    ],
)
def test_what_results_are_to_losses_of_monai(name: str, arguments: dict[str, Any], kind: str) -> None:
    pytest.importorskip("monai")
    assert kind_of(loss_of(f"monai.losses:{name}", **arguments)) == kind


def test_monai_gets_the_channel_that_it_asks_for() -> None:
    monai = pytest.importorskip("monai.losses")
    scores, target = torch.randn(2, 3, 4, 4).double(), torch.randint(3, (2, 4, 4))
    expected = monai.DiceCELoss(**MONAI)(scores, target.unsqueeze(1))
    torch.testing.assert_close(loss_of("monai.losses:DiceCELoss", **MONAI)(scores, target), expected)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("torch.nn:MSELoss", {"weight": 1}, "MSELoss does not take 'weight'"),
        ("torch.nn:BCEWithLogitsLoss", {"pos_wieght": [1.0]}, "did you mean 'pos_weight'?"),
        ("torch.nn:CrossEntropyLos", {}, "did you mean 'CrossEntropyLoss'?"),
        ("pathlib:Path", {}, "names a class whose instances cannot be called"),
    ],
)
def test_what_is_not_a_loss_or_no_argument_is_refused(name: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loss_of(name, **arguments)
    assert words in str(caught.value)


def monai_config(folder: Path, name: str, **more: Any) -> Config:
    pytest.importorskip("monai")
    held = {"images": str(folder / "images/[01].tif"), "masks": str(folder / "masks/[01].tif"), "write": "tiff"}
    loss = {"name": "monai.losses:DiceCELoss", "arguments": MONAI}
    changes = {"loss": loss, "validation": held, "model__dtype": "float64", "checkpoint__best": "mean_iou"}
    return run_config(folder, name, **changes, **more)


def fit(config: Config) -> tuple[float, Any]:
    found = fit_rank(0, config)
    return found.loss, dict(found.scores)


def test_a_run_with_a_loss_of_monai(tmp_path: Path) -> None:
    write_images(tmp_path, 4)
    alone, apart = monai_config(tmp_path, "one"), monai_config(tmp_path, "two", plan={"spatial": [2, 1]})
    loss, scores = fit(alone)
    (found, theirs), *_ = run_on(2, fit, apart)
    assert found == pytest.approx(loss, rel=1e-9)
    assert theirs == {name: pytest.approx(value, rel=1e-9) for name, value in scores.items()}
    assert {"accuracy", "mean_iou", "mean_dice", "iou"} <= set(scores)
    mural.predict(apart.folder, str(tmp_path / "images/[01].tif"), tmp_path / "out", plan=mural.Plan())
    for number in (0, 1):
        predicted = tifffile.imread(tmp_path / f"out/{number}.tif")
        assert predicted.dtype == np.uint8
        written = sorted((apart.folder / "predictions").glob(f"*/{number}.tif"))
        assert any((tifffile.imread(file) == predicted).all() for file in written)


def test_masks_of_classes_need_channels_of_their_own(tmp_path: Path) -> None:
    write_images(tmp_path, 2)
    config = monai_config(tmp_path, "run", train__steps=1)
    with pytest.raises(ConfigError, match="to_onehot_y = true"):
        fit(Config.of({**tables(config), "loss": {"name": "monai.losses:DiceCELoss", "arguments": {"softmax": True}}}))


def test_an_unknown_class_is_refused_before_monai_counts_it(tmp_path: Path) -> None:
    write_images(tmp_path, 2)
    file = tmp_path / "masks/1.tif"
    tifffile.imwrite(file, tifffile.imread(file) * 5)
    with pytest.raises((UnfitData, mural.errors.DataError), match="the mask holds the value 5"):
        fit(monai_config(tmp_path, "run", train__steps=1))


def tables(config: Config) -> dict[str, Any]:
    """The tables of a configuration that say what a run of these tests is."""
    data = {"images": config.data.images, "masks": config.data.masks}
    return {"folder": str(config.folder), "model": {"arguments": config.model.arguments}, "data": data}


class Own(nn.Module):
    """A loss of the user's own, with an argument."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output * self.scale, target)


def test_a_class_of_the_users_own_is_trained_with_the_model(tmp_path: Path) -> None:
    write_images(tmp_path, 2)
    config = run_config(tmp_path, loss={"name": f"{__file__}:Own", "arguments": {"scale": 2.0}}, train__steps=2)
    fit_rank(0, config)
    with mural.train.start.start(config) as run:
        (scale,) = run.pm.loss_terms.parameters()
        run.begin()
        assert scale.item() != 2.0
