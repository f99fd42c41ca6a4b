"""Configurations: typed, strict, and the same from a file, a table or flags."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from mural.data import Augment
from mural.errors import ConfigError, DataError
from mural.plans import Plan
from mural.train.config import AugmentConfig, Config, DataConfig, ModelConfig, OptimizerConfig, ScheduleConfig
from mural.train.configured_loss import make_loss
from mural.train.factory import make_model, make_optimizer, named, rate
from mural.train.flags import documented, flags, value_of


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    config = Config(
        folder=tmp_path,
        data=DataConfig(images="a/*.tif", masks=("b/1.tif", "b/2.tif"), mean=(0.5, 0.25), crop=(64, 64)),
        optimizer=OptimizerConfig("SGD", 0.1, {"momentum": 0.9, "nesterov": True}),
        plan=Plan(data=2, spatial=(2, 1)),
    )
    config.save(tmp_path / "run.toml")
    assert Config.load(tmp_path / "run.toml") == config


def test_a_plan_may_be_a_file(tmp_path: Path) -> None:
    Plan(spatial=(2, 2)).save(tmp_path / "plan.toml")
    (tmp_path / "run.toml").write_text('plan = "plan.toml"\n[train]\nsteps = 3\n')
    assert Config.load(tmp_path / "run.toml").plan == Plan(spatial=(2, 2))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optimiser": {"lr": 1.0}}, "unknown key 'optimiser': did you mean 'optimizer'?"),
        ({"optimizer": {"learning_rate": 1.0}}, "unknown key 'optimizer.learning_rate'"),
        ({"train": {"epoch": 3}}, "did you mean 'epochs'?"),
        ({"train": {"epochs": "3"}}, "train.epochs = '3' should be a whole number"),
        ({"train": {"epochs": 0}}, "train.epochs = 0: the least is 1"),
        ({"data": {"batch": 0}}, "data.batch = 0: the least is 1"),
        ({"validation": {"fraction": 1.5}}, "give a part of 1"),
        ({"checkpoint": {"resume": "yes"}}, "checkpoint.resume = 'yes' is not one of"),
        ({"plan": {"spacial": [2]}}, "unknown key 'plan.spacial': did you mean 'spatial'?"),
        ({"model": 3}, "model = 3 should be a table"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.of(given)
    assert message in str(caught.value)


def test_the_augmentations_of_a_run_are_off_unless_they_are_named() -> None:
    assert Config.of({"augment": {"noise": 0.1}}).augment == AugmentConfig(flips=False, rotations=False, noise=0.1)
    shown = {flag.name: flag for flag in flags()}
    assert shown["augment.flips"].default is False
    assert shown["augment.noise"].words == documented(Augment)["noise"]
    with pytest.raises(DataError, match="noise=-1"):
        Config.of({"augment": {"noise": -1}})


def test_every_field_is_a_flag_with_words() -> None:
    found = {flag.name: flag for flag in flags()}
    assert {"seed", "model.factory", "plan.spatial", "optimizer.lr", "checkpoint.every", "launch.devices"} <= set(found)
    assert [name for name, flag in found.items() if not flag.words] == []


def test_the_page_of_the_configuration_is_that_of_the_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    docs = Path(__file__).parents[2] / "docs"
    monkeypatch.syspath_prepend(str(docs))
    script = importlib.import_module("generate_configuration")
    kept = (docs / "reference" / "configuration.md").read_text(encoding="utf-8")
    assert script.page() == kept, "run python docs/generate_configuration.py"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("optimizer.lr", "1e-4", 1e-4),
        ("plan.spatial", "2,2", [2, 2]),
        ("plan.spatial", "[2, 2]", [2, 2]),
        ("plan.spatial", "4", [4]),
        ("data.images", "scans/*.tif", "scans/*.tif"),
        ("data.images", "7", "7"),
        ("data.shuffle", "false", False),
        ("model.arguments", "{width = 8}", {"width": 8}),
        ("model.factory", "my.py:make", "my.py:make"),
    ],
)
def test_flags_are_read_as_toml(name: str, text: str, value: object) -> None:
    flag = {flag.name: flag for flag in flags()}[name]
    assert value_of(flag, text) == value


def test_names_are_looked_up_and_the_nearest_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("import torch\ndef make(width=1):\n    return torch.nn.Conv2d(1, width, 3)\n")
    assert named("mine.py:make", "model.factory")(width=2).out_channels == 2
    for path, message in (
        ("mural.models:UNett", "did you mean 'UNet'?"),
        ("mural.nothing:UNet", "there is no module 'mural.nothing'"),
        ("UNet", "should be"),
        ("other.py:make", "there is no file other.py"),
    ):
        with pytest.raises(ConfigError) as caught:
            named(path, "model.factory")
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        *((name, f"torchvision.models:{name}") for name in ("alexnet", "vgg16", "resnet50", "densenet121")),
        ("ResNet", "torchvision.models:resnet50"),
        ("InceptionV3", "torchvision.models:inception_v3"),
        ("swin_tiny", "torchvision.models:swin_t"),
        ("ViT", "timm.models:vit_small_patch16_224"),
        ("vit_tiny", "timm.models:vit_tiny_patch16_224"),
    ],
)
def test_errors_tell_what_torchvision_and_timm_ship(name: str, theirs: str) -> None:
    with pytest.raises(ConfigError, match=rf'write "{theirs}" \(pip install "mural-train\[models\]"\).*num_classes'):
        named(f"mural.models:{name}", "model.factory")
    with torch.device("meta"):
        model = make_model(ModelConfig(theirs, {"num_classes": 2}), 0)
    assert list(model.parameters())[-1].shape == (2,)


def test_wrong_arguments_are_named() -> None:
    config = Config.of({"model": {"arguments": {"widht": 3}}, "optimizer": {"name": "Adan"}, "loss": {"name": "dise"}})
    with pytest.raises(ConfigError, match=r"model\.arguments.*widht"):
        make_model(config.model, 0)
    with pytest.raises(ConfigError, match="did you mean 'Adam'"):
        make_optimizer(config.optimizer, [])
    with pytest.raises(ConfigError, match="did you mean 'dice'"):
        make_loss(config.loss, torch.device("cpu"), torch.float32)


def test_the_schedule_is_a_function_of_the_update() -> None:
    linear = ScheduleConfig("linear", warmup=4, final=0.1)
    assert [round(rate(linear, 14, u), 3) for u in (0, 3, 4, 9, 14, 20)] == [0.25, 1.0, 1.0, 0.55, 0.1, 0.1]
    steps = ScheduleConfig("step", period=10, factor=0.5)
    assert [rate(steps, 100, u) for u in (0, 9, 10, 25)] == [1.0, 1.0, 0.5, 0.25]
