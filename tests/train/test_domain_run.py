"""Runs of several domains: the same curve under every plan, scores of each, resume, files, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import run_config, write_images
from safetensors.torch import load_file

import mural
from mural.checkpoint import export
from mural.data import Dataset, Loader
from mural.domain import segmentation_network
from mural.errors import ConfigError
from mural.train import Config, Result
from mural.train.domain_batches import DomainLoader
from mural.train.loop import fit_rank
from ranks import run_on

ARGUMENTS = {"domains": ["lab", "field", "archive"], "classes": 2, "image": [3, 48, 48], "width": 2}


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("roots")
    for seed, (name, count) in enumerate({"lab": 6, "field": 2, "archive": 3}.items()):
        write_images(folder / name, count, seed=seed)
    return folder


def domain_config(roots: Path, name: str, **changes: Any) -> Config:
    """A short run of three domains from three folders."""
    given = {
        "model": {"factory": "mural.domain:segmentation_network", "arguments": ARGUMENTS, "dtype": "float64"},
        "data": {"images": f"{roots}/lab/images/*.tif", "masks": f"{roots}/lab/masks/*.tif", "batch": 2},
        "validation": {"images": f"{roots}/lab/images/*.tif", "masks": f"{roots}/lab/masks/*.tif", "every": 100},
        "targets": {
            "images": {n: f"{roots}/{n}/images/*.tif" for n in ("field", "archive")},
            "held_out_images": {n: f"{roots}/{n}/images/*.tif" for n in ("field", "archive")},
            "held_out_masks": {"field": f"{roots}/field/masks/*.tif"},
        },
        "train": {"steps": 4},
        "checkpoint": {"every": 0},
    }
    return run_config(roots, name, **(given | changes))


def trained(config: Config) -> Result:
    return fit_rank(0, config)


def test_each_domain_has_its_scores(roots: Path) -> None:
    config = domain_config(roots, "one", validation__every=0)
    assert Config.of({"targets": {"images": {"field": "a"}}}).targets.images == {"field": "a"}
    result = trained(config)
    assert result.step == 4
    assert {"loss", "accuracy", "field/accuracy", "field/mean_iou"} <= set(result.scores)
    assert not any(name.startswith("archive/") for name in result.scores), "it has no labels"


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", [mural.Plan(domain=3), mural.Plan(domain=3, spatial=(2, 1)), mural.Plan(data=2)], ids=str
)
def test_a_run_of_domains_is_the_same_under_every_plan(roots: Path, plan: mural.Plan) -> None:
    alone = trained(domain_config(roots, f"alone {plan}".replace("\n", " "), validation__every=0))
    config = domain_config(roots, f"ranks {plan}".replace("\n", " "), validation__every=0).with_plan(plan)
    for result in run_on(plan.devices, fit_rank, 0, config):
        assert result.loss == pytest.approx(alone.loss, rel=1e-9)
        for name, score in alone.scores.items():
            assert result.scores[name] == pytest.approx(score, rel=1e-6), name


@pytest.mark.slow
def test_a_run_of_domains_goes_on_from_its_checkpoint_under_another_plan(roots: Path, tmp_path: Path) -> None:
    whole = trained(domain_config(roots, "whole"))
    trained(domain_config(roots, "parts", train__steps=2))
    config = domain_config(roots, "parts").with_plan(mural.Plan(domain=3))
    for result in run_on(3, fit_rank, 0, config):
        assert result.loss == pytest.approx(whole.loss, rel=1e-9)
    predictor = segmentation_network(**ARGUMENTS).double()  # type: ignore[arg-type]
    file = tmp_path / "weights.safetensors"
    export(config.folder / "checkpoints", file)
    predictor.load_state_dict(load_file(file))
    assert predictor.predictor()(torch.rand(1, 3, 16, 16).double()).shape == (1, 2, 16, 16)


def test_predictions_of_each_domain_are_written(roots: Path) -> None:
    config = domain_config(roots, "written", validation__every=0, validation__write="tiff", train__steps=1)
    trained(config)
    found = {path.relative_to(config.folder).parts[2] for path in config.folder.glob("predictions/*/*/*.tif")}
    assert found == {"lab", "field", "archive"}
    assert len(list(config.folder.glob("predictions/*/field/*.tif"))) == 2


def test_a_domain_that_runs_out_begins_anew_and_a_resumed_epoch_has_the_same_batches(roots: Path) -> None:
    mesh = mural.init()
    loaders = {n: Loader(Dataset(f"{roots}/{n}/images/*.tif"), mesh, batch=2) for n in ("lab", "field", "archive")}
    batches = DomainLoader(loaders)
    epochs = [[batch.names for batch in batches.epoch(number)] for number in range(2)]
    assert [len(names) for names in epochs[0]] == [
        2 + 2 + 2,
        2 + 2 + 1,
        2 + 2 + 2,
    ]  # three of the archive, two at a time
    assert [batch.names for batch in batches.epoch(1, start=1)] == epochs[1][1:]
    batches.close()


def test_domains_that_do_not_fit_are_refused(roots: Path) -> None:
    with pytest.raises(ConfigError, match=r"targets.images has \['field'\], but the model has the target domains"):
        fit_rank(0, domain_config(roots, "x", targets__images={"field": f"{roots}/field/images/*.tif"},
                                  targets__held_out_images={}, targets__held_out_masks={}))  # fmt: skip
    with pytest.raises(ConfigError, match=r"\['archive'\] have no held-out images, but other domains have"):
        fit_rank(0, domain_config(roots, "x", targets__held_out_images={"field": f"{roots}/field/images/*.tif"}))
    with pytest.raises(ConfigError, match=r"\['attic'\] have held-out files, but no images to train on"):
        fit_rank(0, domain_config(roots, "x", targets__held_out_tables={"attic": "a.csv"}))
