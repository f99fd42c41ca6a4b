"""First runs: a folder in, a file out that trains as it is; and what the command line says about it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import tifffile
from PIL import Image
from typer.testing import CliRunner

import mural
from mural import cli
from mural.errors import ConfigError, DataError
from mural.survey import FirstRun, write_first_run
from mural.train import Config
from mural.train.loop import fit_rank

SMALL = {"width": 4, "depth": 2}
SHAPE = (40, 52)
Array = np.ndarray[Any, Any]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save(path: str, array: Array) -> None:
    """An array as a file of the format that the name says."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    if path.endswith(".nii"):
        nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), path)
    elif path.endswith(".tif"):
        tifffile.imwrite(path, array, **({"photometric": "rgb"} if array.shape[-1] == 3 else {}))
    else:
        Image.fromarray(array).save(path)


def mask(*values: int, shape: tuple[int, ...] = SHAPE, dtype: Any = np.uint8) -> Array:
    """A background of the first value, with a bar of each other one."""
    found = np.full(shape, values[0], dtype)
    for number, value in enumerate(values[1:]):
        found[3 + 9 * number : 10 + 9 * number, 5:25] = value
    return found


def noise(shape: tuple[int, ...], low: int = 0, high: int = 255, dtype: Any = np.uint8) -> Array:
    return np.random.default_rng(0).integers(low, high, shape).astype(dtype)


def trained(found: FirstRun, steps: int = 2) -> Config:
    """The run's configuration, after a few steps of it."""
    config = Config.load(found.path, {"train.steps": steps, "log.tensorboard": "off"})
    result = fit_rank(0, config)
    assert result.step == steps
    assert np.isfinite(result.loss)
    return config


# -- what is trained as it is ------------------------------------------------------------------------------------------


def test_colours_with_masks_of_0_and_255() -> None:
    for number in range(5):
        save(f"cells/images/{number}.tif", noise((*SHAPE, 3)))
        save(f"cells/masks/{number}.tif", mask(0, 255))
    config = trained(write_first_run("cells", arguments=SMALL))
    assert (config.data.images, config.data.masks) == ("cells/images/*.tif", "cells/masks/*.tif")
    assert config.data.labels == {255: 1}
    assert config.model.arguments["classes"] == 2
    assert (config.validation.fraction, config.checkpoint.best) == (0.2, "mean_iou")


def test_16_bits_of_which_12_are_used_with_masks_next_to_them() -> None:
    for number in range(4):
        save(f"scope/x{number}.png", noise(SHAPE, 0, 4000, np.uint16))
        save(f"scope/x{number}_mask.png", mask(0, 1, 2, dtype=np.uint16))
    found = write_first_run("scope", arguments=SMALL)
    config = trained(found)
    assert found.tables == (Path("run.csv"),)
    assert (config.data.table, config.data.scale) == (Path("run.csv"), 4095)
    assert config.model.arguments["in_channels"] == 1


def test_volumes_as_nnunet_has_them() -> None:
    shape = (10, 16, 20)
    for number in range(2):
        save(f"task/imagesTr/c{number}_0000.nii", noise(shape, -900, 2000, np.int16))
        save(f"task/labelsTr/c{number}.nii", mask(0, 1, shape=shape))
    config = trained(write_first_run("task", arguments=SMALL))
    assert (config.data.images, config.data.scale) == ("task/imagesTr/*_0000.nii", "none")
    assert config.model.arguments["dims"] == 3


def test_a_folder_for_each_class() -> None:
    for name in ("cat", "dog"):
        for number in range(3):
            save(f"pets/{name}/{number}.png", noise((16, 20, 3)))
    config = trained(write_first_run("pets", arguments={"width": 2, "depth": 2}))
    assert config.data.classes == ("cat", "dog")
    assert config.checkpoint.best == "accuracy"


def test_folders_of_their_own_for_validation_and_a_label_to_ignore() -> None:
    for split, count in (("train", 3), ("val", 1)):
        for number in range(count):
            save(f"roads/{split}/images/{number}.jpg", noise((30 + number, 40, 3)))
            save(f"roads/{split}/labels/{number}.png", mask(0, 1, 255, shape=(30 + number, 40)))
    config = trained(write_first_run("roads", arguments=SMALL))
    assert config.validation.images == "roads/val/images/*.jpg"
    assert config.loss.arguments == {"ignore_index": 255}
    assert config.data.batch == 1


def test_one_image_alone() -> None:
    save("one/image/a.png", noise((*SHAPE, 3)))
    save("one/mask/a.png", mask(0, 1))
    config = trained(write_first_run("one", arguments=SMALL))
    assert (config.validation.fraction, config.train.stop_after, config.checkpoint.best) == (0, 0, "")


def test_the_images_that_mural_makes() -> None:
    mural.data.write_synthetic("tissue", 2, 128)
    found = write_first_run("tissue", arguments=SMALL)
    trained(found)
    assert found.facts.odd == ()
    assert len(found.path.read_text().splitlines()) < 70


def test_bad_files_are_left_out_and_the_rest_is_trained() -> None:
    for number in range(6):
        save(f"mixed/images/{number}.tif", noise((*SHAPE, 3)))
        save(f"mixed/masks/{number}.tif", mask(0, 1))
    Path("mixed/images/0.tif").write_bytes(Path("mixed/images/0.tif").read_bytes()[:300])
    save("mixed/masks/1.tif", mask(0, 1, shape=(40, 50)))
    save("mixed/images/2.tif", noise(SHAPE))
    save("mixed/images/lonely.tif", noise((*SHAPE, 3)))
    Path("mixed/images/Thumbs.db").write_text("no image")
    found = write_first_run("mixed", arguments=SMALL)
    trained(found)
    assert len(found.facts.survey.pairs) == 3
    text = found.path.read_text()
    assert all(word in text for word in ("0.tif", "(40, 50)", "1 channel of uint8", "lonely.tif"))


def test_a_model_that_needs_multiples_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    for number in range(2):
        save(f"odd/images/{number}.png", noise((*SHAPE, 3))[:, :50])
        save(f"odd/masks/{number}.png", mask(0, 1)[:, :50])
    config = trained(write_first_run("odd", model="test_model_and_plan:Strided"))
    assert config.data.multiple == 8


# -- what is written, and where ----------------------------------------------------------------------------------------


def pairs(folder: str, images: str = "images", masks: str = "masks") -> None:
    for number in range(2):
        save(f"{folder}/{images}/{number}.png", noise((*SHAPE, 3)))
        save(f"{folder}/{masks}/{number}.png", mask(0, 1))


def test_nothing_is_replaced_unless_it_is_asked_for() -> None:
    pairs("data")
    Path("run.csv").write_text("mine")
    with pytest.raises(ConfigError, match=r"run\.csv"):
        write_first_run("data")
    assert not Path("run.toml").exists()
    write_first_run("data", overwrite=True)
    with pytest.raises(ConfigError, match="--overwrite"):
        write_first_run("data")
    assert Path("run.csv").read_text() == "mine"


def test_files_named_by_hand_are_paired_as_training_pairs_them() -> None:
    pairs("data", "a", "b")
    with pytest.raises(DataError, match="--images and --masks"):
        write_first_run("data")
    found = write_first_run("data", "new/hand.toml", images=["data/a/*.png"], masks=["b/*.png"], arguments=SMALL)
    config = Config.load("new/hand.toml")
    assert (config.data.images, config.data.masks) == ("data/a/*.png", "data/b/*.png")
    assert config.folder == Path("runs/hand")
    assert found.facts.survey.channels == 3


def test_a_run_that_is_there_is_not_gone_on_with() -> None:
    pairs("data")
    Path("runs/data").mkdir(parents=True)
    write_first_run("data", arguments=SMALL)
    assert Config.load("run.toml").folder == Path("runs/data-2")


def test_names_with_signs_of_globs_are_names(here: Path) -> None:
    pairs("my [data], 1")
    found = write_first_run(here / "my [data], 1", arguments=SMALL)
    assert len(trained(found).data.images or "") > 0


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (mask(0, 1)[..., None].repeat(3, 2), "has 3 channels"),
        (np.arange(40 * 52).reshape(SHAPE).astype(np.uint16), "too many for classes"),
    ],
)
def test_masks_that_hold_no_classes_are_refused(broken: Array, said: str) -> None:
    save("data/images/a.png", noise((*SHAPE, 3)))
    save("data/masks/a.png", broken)
    with pytest.raises(DataError, match=said):
        write_first_run("data")
    assert not Path("run.toml").exists()


def test_compressed_volumes_are_to_be_unpacked() -> None:
    for name in ("images", "masks"):
        save(f"gz/{name}/a.nii", noise((8, 8, 8)))
        volume = nibabel.load(f"gz/{name}/a.nii")
        nibabel.save(volume, f"gz/{name}/b.nii.gz")
        Path(f"gz/{name}/a.nii").unlink()
    with pytest.raises(DataError, match="find gz -name"):
        write_first_run("gz")


# -- the command line --------------------------------------------------------------------------------------------------


def test_the_summary_fits_a_terminal_and_ends_with_the_next_command() -> None:
    for number in range(3):
        save(f"cells/images/{number}.tif", noise((*SHAPE, 3)))
        save(f"cells/masks/{number}.tif", mask(0, 255))
    options = ["init", "cells", "--arguments", "width = 4, depth = 2"]
    result = CliRunner().invoke(cli.app, options, env={"COLUMNS": "80", "NO_COLOR": "1"})
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= 80
    assert result.output.splitlines()[-1] == "  mural train run.toml"
    assert "255 → 1" in result.output
    assert "- masks hold 0, 255" in result.output


def test_an_error_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["mural", "init", "nowhere"])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == 1
    assert capsys.readouterr().err == "mural: nowhere: there is no such folder\n"
