"""What a run keeps: its epoch where validation fails, its folder where it is refused, and the truth about its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from runs import run_config, write_images

from mural.checkpoint.folder import steps_in
from mural.errors import CheckpointError, ConfigError, DataError
from mural.train import Config, Result
from mural.train.loop import fit_rank
from ranks import run_on

HERE = Path(__file__).parent


def fit(config: Config) -> Result:
    return fit_rank(0, config)


def caught(config: Config) -> str:
    try:
        fit(config)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def lines(config: Config, kind: str) -> list[dict[str, Any]]:
    found = map(json.loads, (config.folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in found if line["kind"] == kind]


def status(config: Config) -> dict[str, Any]:
    return json.loads((config.folder / "status.json").read_text())


def described(folder: Path, name: str, **more: Any) -> Config:
    """Two epochs of three steps, with two held-out images, and no checkpoint that is due."""
    held = {"images": str(folder / "held/images/*.tif"), "masks": str(folder / "held/masks/*.tif")}
    changes = {"validation": held, "checkpoint__every": 100, "train__steps": 6, "model__dtype": "float64", **more}
    return run_config(folder, folder / name, **changes)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    write_images(tmp_path, 6)
    write_images(tmp_path / "held", 2, seed=1)
    return tmp_path


@pytest.mark.parametrize(
    ("plan", "every"),
    [
        ({}, 0),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (({"spatial": [2, 1]}, 0), ({}, 2), ({"stage": 2}, 2))
        ),
    ],
    ids=str,
)
def test_a_validation_that_fails_loses_nothing(images: Path, plan: dict[str, Any], every: int) -> None:
    """The checkpoint came after validation: the epoch was lost with it."""
    whole = described(images, "whole", plan=plan, validation__every=every)
    hurt = described(images, "hurt", plan=plan, validation__every=every)
    run_on(whole.plan.devices, fit, whole)
    mask = images / "held" / "masks" / "1.tif"
    good = mask.read_bytes()
    relabel(mask, {1: 7})
    for text in run_on(hurt.plan.devices, caught, hurt):
        assert "masks/1.tif" in text
    assert steps_in(hurt.folder / "checkpoints") == [every or 3]
    assert [line["step"] for line in lines(hurt, "train")] == list(range(1, (every or 3) + 1))
    assert lines(hurt, "validation") == []
    mask.write_bytes(good)
    run_on(hurt.plan.devices, fit, hurt)
    for kind in ("train", "validation"):
        for ours, theirs in zip(lines(hurt, kind), lines(whole, kind), strict=True):
            assert (ours["step"], ours["loss"]) == (theirs["step"], theirs["loss"])


def test_a_validation_is_not_repeated(images: Path) -> None:
    """A run that went on at the end of an epoch validated once more, and its journal had the step twice."""
    first = fit(described(images, "run", train__steps=3))
    again = fit(described(images, "run", train__steps=3))
    assert again.scores == first.scores
    assert status(described(images, "run"))["scores"] == dict(first.scores)
    last = described(images, "run")
    fit(last)
    assert [line["step"] for line in lines(last, "validation")] == [3, 6]
    assert [line["step"] for line in lines(last, "train")] == [1, 2, 3, 4, 5, 6]


def test_a_stopped_run_validates_what_it_owes(images: Path) -> None:
    """A signal at the last update of an epoch comes before its validation."""
    whole, parts = described(images, "whole"), described(images, "parts")
    fit(whole)
    fit(described(images, "parts", validation={}, train__steps=3))
    fit(parts)
    assert [(x["step"], x["loss"]) for x in lines(parts, "validation")] == [
        (x["step"], x["loss"]) for x in lines(whole, "validation")
    ]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file() and p.name != ".lock"}


REFUSED = {
    "another model": {"model__arguments": {"classes": 2, "width": 6, "depth": 2, "norm": "batch"}},
    "another optimizer": {"optimizer": {"name": "AdamW", "lr": 0.01}},
    "an optimizer that is none": {"optimizer": {"name": "Adamant"}},
    "a model that is none": {"model__factory": "mural.models:UNot"},
    "an own folder": {"checkpoint__resume": "never"},
    "no image": {"data__images": "nowhere/*.tif"},
}


@pytest.mark.parametrize(
    ("name", "ranks"), [*((name, 1) for name in REFUSED), ("another model", 2), ("another optimizer", 2)]
)
def test_a_refused_run_leaves_the_folder_as_it_was(images: Path, name: str, ranks: int) -> None:
    """`config.toml` became that of the run that was refused."""
    fit(described(images, "run", train__steps=2))
    before = contents(images / "run")
    refused = described(images, "run", **REFUSED[name], plan={"data": ranks} if ranks > 1 else {})
    assert all(run_on(ranks, caught, refused))
    assert contents(images / "run") == before


def test_a_run_that_must_resume_makes_no_folder(images: Path) -> None:
    config = described(images, "fresh", checkpoint__resume="must")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        fit(config)
    assert not config.folder.exists()


def test_a_state_that_no_checkpoint_holds_is_refused_at_the_start(images: Path) -> None:
    config = described(images, "run", model={"factory": f"{HERE / 'dropping.py'}:unsavable"})
    with pytest.raises(CheckpointError, match="_extra_state is a"):
        fit(config)
    assert not (config.folder / "metrics.jsonl").exists()


def test_the_status_is_that_of_the_last_run(images: Path) -> None:
    """It said «stopped by SIGINT» after later crashes."""
    config = described(images, "run", train__steps=2)
    fit(config)
    assert (status(config)["state"], status(config)["step"]) == ("finished", 2)
    loss = {"name": f"{HERE / 'dropping.py'}:failing", "arguments": {"how": "raise"}}
    crashed = described(images, "run", loss=loss, validation={})
    assert caught(crashed) == "RuntimeError: the third call fails"
    found = status(crashed)
    assert (found["state"], found["step"], found["saved"]) == ("failed", 4, 2)
    assert found["error"] == "RuntimeError: the third call fails"
    refused = described(images, "run", optimizer={"name": "AdamW"})
    assert "it holds the state of SGD" in caught(refused)
    assert status(crashed) == found


def looked(output: torch.Tensor, target: torch.Tensor, file: str) -> torch.Tensor:
    """A loss that looks at the status."""
    assert json.loads(Path(file).read_text())["state"] == "running"
    return torch.nn.functional.cross_entropy(output, target)


def test_the_status_of_a_run_that_runs(images: Path) -> None:
    file = images / "run" / "status.json"
    loss = {"name": f"{__file__}:looked", "arguments": {"file": str(file)}}
    config = described(images, "run", loss=loss)
    fit(config)
    assert status(config)["state"] == "finished"


@pytest.mark.slow
@pytest.mark.parametrize(("how", "state"), [("kill", "killed"), ("raise", "failed")])
def test_the_status_of_local_ranks_one_of_which_ends(images: Path, how: str, state: str) -> None:
    loss = {"name": f"{HERE / 'dropping.py'}:failing", "arguments": {"how": how}}
    config = described(images, "run", loss=loss, plan={"data": 2}, launch={"device": "cpu"})
    config.save(images / "run.toml")
    command = [sys.executable, "-m", "mural", "train", str(images / "run.toml")]
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert ended.returncode != 0
    found = status(config)
    assert found["state"] == state
    assert found["by"] == ("SIGKILL" if how == "kill" else "")
    assert "rank 1" in found["error"] if how == "kill" else found["error"] == "RuntimeError: the third call fails"
    assert found["step"] == 2


# -------------------------------------------------------------------------------------------------------------- labels


def relabel(file: Path, values: dict[int, int]) -> None:
    mask = tifffile.imread(file)
    tifffile.imwrite(file, np.vectorize(lambda v: values.get(int(v), v))(mask).astype(mask.dtype), tile=(16, 16))


@pytest.mark.parametrize(
    ("plan", "loss"),
    [
        ({}, "dice"),
        ({}, "torch.nn.functional:cross_entropy"),
        ({"spatial": [2, 1]}, "cross_entropy"),
        ({"data": 2}, "cross_entropy"),
        ({"stage": 2}, "cross_entropy"),
    ],
    ids=str,
)
def test_a_label_out_of_range_names_file_value_and_fix(images: Path, plan: dict[str, Any], loss: str) -> None:
    """A mask of 0 and 255 ended in torch's «Target 255 is out of bounds», on one rank; under Dice, in nothing."""
    relabel(images / "masks" / "4.tif", {1: 255})
    config = described(images, "run", plan=plan, loss={"name": loss})
    for text in run_on(config.plan.devices, caught, config):
        assert text.startswith("DataError")
        assert str(images / "masks" / "4.tif") in text
        assert "the value 255" in text
        assert "2 classes, 0 to 1" in text
        assert "data.labels = {255 = 1}" in text
        assert "ignore_index = 255" in text
    relabel(images / "masks" / "4.tif", {255: 1})
    relabel(images / "held" / "masks" / "1.tif", {1: 2})
    for text in run_on(config.plan.devices, caught, config):
        assert "held/masks/1.tif" in text
        assert "the value 2" in text
    assert steps_in(config.folder / "checkpoints") == [3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "plan"), [("labels = { 255 = 1 }", {"spatial": [2, 1]}), ("[data.labels]\n255 = 1", {})], ids=str
)
def test_labels_are_renamed_in_training_and_validation(images: Path, form: str, plan: dict[str, Any]) -> None:
    plain = described(images, "plain", plan=plan)
    run_on(plain.plan.devices, fit, plain)
    for mask in (*images.glob("masks/*.tif"), *images.glob("held/masks/*.tif")):
        relabel(mask, {1: 255})
    file = images / "run.toml"
    described(images, "renamed", plan=plan).save(file)
    text = file.read_text().replace("labels = {}\n", "")
    file.write_text(text.replace("[data]\n", f"[data]\n{form}\n") if "[" not in form else f"{text}\n{form}\n")
    renamed = Config.load(file)
    assert renamed.data.labels == {255: 1}
    run_on(renamed.plan.devices, fit, renamed)
    assert Config.load(renamed.folder / "config.toml") == renamed
    for kind in ("train", "validation"):
        assert [x["loss"] for x in lines(renamed, kind)] == [x["loss"] for x in lines(plain, kind)]
    assert lines(renamed, "validation")[-1]["iou"] == lines(plain, "validation")[-1]["iou"]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({"255": 1.5}, "data.labels.255 = 1.5 should be a whole number"),
        ({"255": True}, "data.labels.255 = True should be a whole number"),
        ({"white": 1}, "data.labels has the key 'white', which should be a whole number"),
        ({"1": 0, "01": 1}, "data.labels has the key 1 twice"),
        (255, "data.labels = 255 should be a table from whole numbers to whole numbers"),
    ],
)
def test_labels_that_are_none_are_refused(labels: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Config.of({"data": {"labels": labels}})
    assert message in str(error.value)


def test_labels_that_the_loss_ignores_are_taken(images: Path) -> None:
    relabel(images / "masks" / "4.tif", {1: 255})
    ignoring = {"name": "cross_entropy", "arguments": {"ignore_index": 255}}
    assert fit(described(images, "given", loss=ignoring, data__batch=1)).step == 6
    assert fit(described(images, "default", data__labels={255: -100}, data__batch=1)).step == 6
    with pytest.raises(DataError, match="the value 255"):
        fit(described(images, "neither", data__batch=1))


def test_a_label_of_a_table_out_of_range_is_named_before_the_run(images: Path) -> None:
    rows = "".join(f"images/{i}.tif,{i}\n" for i in range(4))
    (images / "labels.csv").write_text("image,label\n" + rows)
    model = {"factory": f"{HERE / 'dropping.py'}:classifier"}
    config = run_config(images, images / "run", model=model, data={"table": str(images / "labels.csv")})
    with pytest.raises(DataError) as error:
        fit(config)
    assert f"{images / 'images' / '2.tif'}: the label is 2" in str(error.value)
    assert "2 classes, 0 to 1" in str(error.value)


def test_values_out_of_range_for_binary_cross_entropy(images: Path) -> None:
    for mask in images.glob("masks/*.tif"):
        relabel(mask, {1: 255})
    model = {"arguments": {"classes": 1, "width": 4, "depth": 2}}
    more = {"model": model, "loss": {"name": "bce"}, "validation": {}, "data__mask": "channels"}
    with pytest.raises(DataError, match="but binary cross-entropy takes values from 0 to 1") as error:
        fit(described(images, "run", **more))
    (mask,) = (file for file in images.glob("masks/*.tif") if f"{file}: the mask" in str(error.value))
    row, column = np.argwhere(tifffile.imread(mask) == 255)[0]
    assert f"{mask}: the mask holds the value 255 (first at ({row}, {column})), but" in str(error.value)
    assert fit(described(images, "run", **more, data__labels={255: 1}, train__steps=2)).step == 2
