"""Sources of integers as a model takes them: refused where nothing says how, else the very numbers of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mural
from law import difference
from mural.errors import DataError
from mural.train import Config
from ranks import run_on

PLANS = [
    mural.Plan(),
    mural.Plan(spatial=(2, 1)),
    mural.Plan(data=2),
    mural.Plan(stage=2, schedule="1f1b", microbatches=2),
]


def bytes_of(seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (3, 12, 10), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1)).double()


def fed(plan: mural.Plan, call: str) -> str:
    """What a model says to sources of integers."""
    pm = mural.parallelize(made(), plan)
    sources = [mural.data.ArraySource(bytes_of(i), f"slide{i}.tif") for i in range(2)]
    try:
        (pm(sources) if call == "inference" else pm.step(sources, torch.zeros(2, 12, 10).long()))
    except DataError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("call", ["inference", "step"])
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: " ".join(str(plan).split()))
def test_an_image_of_integers_is_refused_where_nothing_says_its_scale(plan: mural.Plan, call: str) -> None:
    """A model that was trained on [0, 1] saw 0 to 255, and gave one class everywhere."""
    for said in run_on(plan.devices, fed, plan, call):
        assert "slide0.tif: the image holds integers (torch.uint8)" in said
        assert 'mural.open(…, scale="range")' in said
        assert "data.scaled(source)" in said


def compared(plan: mural.Plan, options: dict[str, Any], mean: Any) -> list[float]:
    """Loss and result for scaled sources and a mask of integers, held against a plain model on plain tensors."""
    images = torch.stack([bytes_of(i) for i in range(2)])
    x = images.double() / options["divides"]
    x = x if mean is None else x - torch.tensor(mean).double().view(-1, 1, 1)
    masks = (images[:, :1] > 99).to(torch.uint8)
    sources = [mural.data.scaled(mural.data.ArraySource(image), options["scale"], mean) for image in images]
    targets = [mural.data.ArraySource(mask) for mask in masks]
    pm, plain = mural.parallelize(made(), plan), made()
    expected = plain(x)
    loss = F.cross_entropy(expected, masks[:, 0].long())
    found = [difference(pm.step(sources, targets), loss.detach())]
    return [*found, difference(pm.eval()(sources).full(), expected.detach())]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: " ".join(str(plan).split()))
@pytest.mark.parametrize(
    ("options", "mean"),
    [
        ({"scale": "range", "divides": 255.0}, None),
        ({"scale": 100.0, "divides": 100.0}, (0.5, 0.25, 0.125)),
        ({"scale": "none", "divides": 1.0}, None),
    ],
    ids=["range", "number and mean", "none"],
)
def test_scaled_sources_give_what_a_plain_model_gives(plan: mural.Plan, options: dict[str, Any], mean: Any) -> None:
    for found in run_on(plan.devices, compared, plan, options, mean):
        assert max(found) < 1e-10


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16, np.float32])
def test_a_run_says_how_its_images_were_read(tmp_path: Path, dtype: type) -> None:
    """The numbers of `Config.data.scaled` are those of the loader, to the bit."""
    values = (np.arange(3 * 12 * 10).reshape(12, 10, 3) * 7 % 201).astype(dtype)
    tifffile.imwrite(tmp_path / "a.tif", values, photometric="rgb")
    data = {"images": str(tmp_path / "*.tif"), "mean": [0.1, 0.2, 0.3], "std": [0.5, 0.25, 2.0]}
    Config.of({"data": data}).save(tmp_path / "config.toml")
    config = Config.load(tmp_path / "config.toml").data
    source = config.scaled(mural.open(tmp_path / "a.tif"))
    loader = mural.data.Loader(
        [mural.data.Sample("a", str(tmp_path / "a.tif"))], mural.init(), mean=config.mean, std=config.std
    )
    (batch,) = loader.epoch(0)
    assert torch.equal(source.read(), batch.image.local[0])
    assert torch.equal(source.read([(1, 3), (2, 7), (0, 10)]), batch.image.local[0, 1:3, 2:7])
    opened = mural.open(tmp_path / "a.tif", mean=config.mean, std=config.std)
    assert torch.equal(opened.read(), source.read())
    assert opened.dtype == torch.float32
    assert mural.open(tmp_path / "a.tif").read().dtype == torch.from_numpy(values).dtype


def test_a_scale_that_fits_no_image_is_refused() -> None:
    source = mural.data.ArraySource(bytes_of())
    with pytest.raises(DataError, match="give one for each channel"):
        mural.data.scaled(source, mean=(0.1, 0.2))
    with pytest.raises(DataError, match="give 'range'"):
        mural.data.scaled(source, "percent")  # type: ignore[arg-type]
