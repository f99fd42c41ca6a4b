"""Runs of several domains: label maps of each by the shared encoder and the head, under any plan."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from runs import run_config, write_images
from slides import predicted

import mural
from mural.checkpoint import open_snapshot, restore
from mural.domain import SeparationNetwork
from mural.errors import ConfigError
from mural.plans import Plan
from mural.prediction.trained_run import trained_run
from mural.train.factory import make_model
from mural.train.loop import fit_rank
from ranks import run_on

ARGUMENTS = {"domains": ["lab", "field"], "classes": 2, "image": [3, 48, 48], "width": 2}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a labelled domain and another one."""
    folder = tmp_path_factory.mktemp("domains")
    for seed, name in enumerate(("lab", "field")):
        write_images(folder / name, 2, seed=seed)
    lab = {"images": f"{folder}/lab/images/*.tif", "masks": f"{folder}/lab/masks/*.tif"}
    targets = {"images": {"field": f"{folder}/field/images/*.tif"}}
    model = {"factory": "mural.domain:segmentation_network", "arguments": ARGUMENTS}
    fit_rank(0, run_config(folder, model=model, data=lab, targets=targets, train__steps=8))
    return folder / "run"


def test_each_domain_s_images_are_predicted_as_the_network_does(run: Path, tmp_path: Path) -> None:
    for name in ("lab", "field"):
        found = mural.predict(run, None, tmp_path, domain=name)
        assert [file.relative_to(tmp_path) for file in found.files] == [Path(name) / f"{i}.tif" for i in range(2)]
    trained = trained_run(run)
    network = make_model(trained.config.model, 0)
    assert isinstance(network, SeparationNetwork)
    restore(open_snapshot(trained.checkpoints, None, trained.step), network)
    image = tifffile.imread(run.parent / "field" / "images" / "1.tif")
    with torch.no_grad():
        scores = network.predictor().eval()(torch.from_numpy(image).movedim(-1, 0)[None] / 255)
    assert np.array_equal(tifffile.imread(tmp_path / "field" / "1.tif"), scores.argmax(1)[0])


@pytest.mark.parametrize(("ranks", "plan"), [(1, Plan(stream=(16, 16))), (2, Plan(spatial=(2, 1)))], ids=str)
def test_a_domain_s_labels_are_the_same_under_any_plan(run: Path, tmp_path: Path, ranks: int, plan: Plan) -> None:
    images = run.parent / "field" / "images"
    mural.predict(run, images, tmp_path / "one")
    run_on(ranks, predicted, run, tmp_path / "other", plan, images)
    for name in ("0.tif", "1.tif"):
        assert np.array_equal(*(tifffile.imread(tmp_path / folder / name) for folder in ("one", "other")))


def test_extents_that_the_network_does_not_take_are_padded(run: Path, tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "odd.tif", np.full((45, 50, 3), 90, np.uint8), photometric="rgb")
    with pytest.raises(ConfigError, match=r"--multiple 16"):
        mural.predict(run, tmp_path / "odd.tif", tmp_path / "out")
    found = mural.predict(run, tmp_path / "odd.tif", tmp_path / "out", multiple=4)
    assert mural.open(found.files[0]).shape == (1, 45, 50)


def test_a_wrong_domain_is_told(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no domain 'attic': its domains are lab, field"):
        mural.predict(run, None, tmp_path, domain="attic")
    with pytest.raises(ConfigError, match="there is nothing to predict"):
        mural.predict(run)
