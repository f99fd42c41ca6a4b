"""What a newcomer gets wrong: each is one of mural's errors, with the values and the fix, not a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from runs import run_config, write_images

from mural.data import Dataset
from mural.engine.alignment import alignment
from mural.errors import ConfigError, DataError, LayoutError, PlanError, ShapeError
from mural.models import UNet
from mural.ranks import spawn
from mural.train import Config, Trainer
from mural.train.config import LogConfig
from mural.train.journal import Journal
from mural.train.local_ranks import local_ranks
from mural.train.training_run import Run

MODELS = """
from torch import nn

class Several(nn.Conv2d):
    def forward(self, x):
        return {"out": super().forward(x), "aux": x}

def several():
    return Several(3, 2, 1)

def grey():
    return nn.Sequential(nn.Identity(), nn.Conv2d(1, 2, 1))
"""


def of_models(folder: Path, name: str) -> dict[str, Any]:
    (folder / "models.py").write_text(MODELS)
    return {"model__factory": f"{folder / 'models.py'}:{name}", "model__arguments": {}}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    write_images(folder, count=2)
    return folder


def test_a_configuration_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"folder\xe3\x00")
    with pytest.raises(ConfigError, match=r"run\.toml is not TOML: it is not a text file in UTF-8 \(byte 6\)"):
        Config.load(tmp_path / "run.toml")


def test_no_masks(images: Path) -> None:
    with pytest.raises(ConfigError, match=r'no masks and no labels, which loss\.name = "cross_entropy" compares with'):
        Trainer(run_config(images, "no-masks", data__masks=None)).fit()


def test_more_cuts_than_an_image_has_dims() -> None:
    with pytest.raises(PlanError, match=r"spatial = \[2, 1, 1\] cuts 3 dims, .* have 2: .* as spatial = \[2, 1\]"):
        alignment(UNet(width=4, depth=2), (1, 3, 64, 64), (2, 1, 1))


@pytest.mark.parametrize("loss", ["cross_entropy", "mse", "dice"])
def test_a_model_that_returns_a_dict(images: Path, loss: str) -> None:
    with pytest.raises(LayoutError, match=r"returned a dict with the keys 'out', 'aux': return the tensor alone"):
        Trainer(run_config(images, f"dict-{loss}", loss__name=loss, **of_models(images, "several"))).fit()


def test_a_model_of_other_channels(images: Path) -> None:
    words = r"takes 1 channels .* the shape \(2, 3, 48, 48\), in the layer 1 \(Conv2d\), for images of shape"
    with pytest.raises(ShapeError, match=words):
        Trainer(run_config(images, "channels", **of_models(images, "grey"))).fit()


@pytest.mark.parametrize("arguments", [{"speed": 1}, {"weight_decay": -1.0}])
def test_a_bad_argument_of_the_optimizer_is_one_line(images: Path, arguments: dict[str, Any]) -> None:
    """It printed all weights."""
    config = run_config(images, "optimizer", optimizer__arguments=arguments)
    with pytest.raises(ConfigError, match=r"optimizer\.arguments: SGD does not take lr = 0\.1, ") as found:
        Trainer(config).fit()
    assert len(str(found.value)) < 200


def test_a_name_in_other_case_suggests_the_class_not_the_module(images: Path) -> None:
    with pytest.raises(ConfigError, match=r"mural\.models has no 'Unet': did you mean 'UNet'\?"):
        Trainer(run_config(images, "case", model__factory="mural.models:Unet")).fit()


def test_devices_that_do_not_fit_the_plan_name_its_axes(images: Path) -> None:
    """It named data and spatial ranks alone."""
    config = run_config(images, plan__domain=2, launch__devices=3)
    with pytest.raises(PlanError, match=r"launch\.devices = 3, but the plan needs 2 ranks \(domain = 2\)"):
        local_ranks(config)


def test_a_list_of_globs_is_expanded_and_paired_by_name(images: Path) -> None:
    of = [str(images / "images" / name) for name in ("1*.tif", "0*.tif")]
    for masks in (str(images / "masks/*.tif"), [str(images / "masks" / name) for name in ("0*.tif", "1*.tif")]):
        found = [(Path(s.image).name, Path(s.target).name) for s in Dataset(of, masks)]
        assert found == [("1.tif", "1.tif"), ("0.tif", "0.tif")]
    assert len(Dataset(of)) == 2
    with pytest.raises(DataError, match=r"no image for the masks '1'"):
        Dataset(of[1:], [str(images / "masks/*.tif")])


@pytest.mark.slow
def test_a_script_without_the_main_guard(images: Path, tmp_path: Path) -> None:
    config = run_config(images, "guard", plan__spatial=(2, 1))
    config.save(tmp_path / "run.toml")
    (tmp_path / "script.py").write_text("import mural\nmural.Trainer('run.toml').fit()\n")
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert 'put what it does under `if __name__ == "__main__":`' in done.stderr.splitlines()[-1]
    assert done.stderr.count("Traceback") == 1


def test_data_ranks_without_an_image_are_warned_of(images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = SimpleNamespace(
        config=run_config(images, data__batch=1, plan__data=3),
        weights=7,
        loader=SimpleNamespace(dataset=[0]),
        held_out=None,
        total=1,
        journal=Journal(images, LogConfig(), 1, speaks=True),
    )
    Run.introduce(cast(Run, run))
    assert "warning: plan.data = 3 divides batches of data.batch = 1, so that 2 of 3 " in capsys.readouterr().out


def test_more_ranks_than_processors_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def stopped(*_: object, **__: object) -> None:
        raise PlanError("far enough")

    monkeypatch.setattr(spawn, "processors", lambda: 2)
    monkeypatch.setattr(spawn, "host", stopped)
    with pytest.raises(PlanError, match="far enough"):
        spawn.run_local(print, 3, say=said.append)
    assert said[1].startswith("warning: 3 ranks share 2 processors")


def test_names_of_classes_are_in_the_scores(images: Path) -> None:
    change = {"train__steps": 1, "validation__fraction": 0.5, "data__batch": 1}
    scores = Trainer(run_config(images, "named", data__classes=("background", "disc"), **change)).fit().scores
    assert scores["iou"] == [scores["iou/background"], scores["iou/disc"]]
    with pytest.raises(ConfigError, match=r"names 3 classes, but the model tells 2 apart"):
        Trainer(run_config(images, "three", data__classes=("a", "b", "c"))).fit()
