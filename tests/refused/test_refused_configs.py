"""Configurations and command lines that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from mural.train import Config
from mural.train.flags import flags, value_of
from refusals import RUN, Bad, content, edited, refused

LATIN = "folder = 'größe'".encode("latin-1")
WITH_PLAN = f"plan = 'plan.toml'{RUN}"
BEST = "--validation.fraction 0.5 --data.batch 1 --checkpoint.best"

FILES = [
    Bad("a file that is not there", "train ran.toml", "ran.toml cannot be read: No such file or directory: did you"),
    Bad("a folder", "train images", "images cannot be read: Is a directory: give the path of a TOML file"),
    Bad("an empty file", "", 'nothing to train on: set data.images = "…/*.tif"', content("run.toml", "")),
    Bad("a binary file", "", "it is not a text file in UTF-8 (byte 6)", content("run.toml", b"folder\xe3\x00")),
    Bad("another encoding", "", "it is not a text file in UTF-8 (byte 12)", content("run.toml", LATIN)),
    Bad("no TOML", "", ("run.toml is not TOML", "(at line 9, column 6)"), edited("batch = 2", "batch: 2")),
    Bad("a key twice", "", "run.toml is not TOML: Cannot overwrite", edited("batch = 2", "batch = 2\nbatch = 3")),
    Bad("an unknown key", "", "unknown key 'data.banana'. Known: images, masks", edited("batch = 2", "banana = 2")),
    Bad("a misspelt key", "", "unknown key 'data.bacth': did you mean 'batch'?", edited("batch = 2", "bacth = 2")),
    Bad("a misspelt table", "", "'optimiser': did you mean 'optimizer'?", edited("[optimizer]", "[optimiser]")),
    Bad("a string for a table", "", "data = 'a.tif' should be a table", content("run.toml", "data = 'a.tif'")),
    Bad("a plan's file that is not there", "", "plan.toml cannot be read", content("run.toml", WITH_PLAN)),
]

VALUES = [
    Bad("a word for a number", "", "data.batch = 'two' should be a whole", edited("batch = 2", "batch = 'two'")),
    Bad("a fraction for a whole number", "", "data.batch = 2.5 should be", edited("batch = 2", "batch = 2.5")),
    Bad("a list for a string", "", "optimizer.name = ['SGD'] should be a string", edited('"SGD"', '["SGD"]')),
    Bad("a negative number", "", "train.steps = -2: the least is 0", edited("steps = 2", "steps = -2")),
    Bad("no epochs", "--train.epochs 0", "train.epochs = 0: the least is 1"),
    Bad("all samples held out", "--validation.fraction 1.0", "fraction = 1.0: give a part of 1, as 0.2"),
    Bad("a rate that is not a number", "--optimizer.lr nan", "--optimizer.lr 'nan' should be a number"),
    Bad("an infinite limit", "", "clip = inf should be a number", edited("steps = 2", "steps = 2\nclip = inf")),
    Bad("a scale of nothing", "--data.scale 0", ("data.scale = 0", "give a number above 0")),
    Bad("a seed that torch does not take", f"--seed {10**30}", "torch takes seeds from"),
    Bad("a crop of other dims", "--data.crop 16", "data.crop = [16] for images of 32 × 32: give 2 sizes"),
    Bad("a mean for other channels", "--data.mean 0.5,0.5", "has 2 numbers, but the image 3 channels"),
    Bad("a deviation of nothing", "--data.std 0.0,0.0,0.0", "a deviation must be above 0"),
    Bad("names of other classes", "--data.classes a,b,c", "names 3 classes, but the model tells 2 apart"),
    Bad("no GPU", "--launch.device cuda", 'launch.device = "cuda", but torch finds no GPU: set "cpu"'),
]

NAMES = [
    Bad("an unknown loss", "--loss.name cross_entrpy", "did you mean 'cross_entropy'?"),
    Bad("a class that is no loss", "--loss.name pathlib:Path", "names a class whose instances cannot be called"),
    Bad(
        "an unknown argument of a class",
        "--loss.name torch.nn:MSELoss --loss.arguments 'weight = 1'",
        "MSELoss does not take 'weight'",
    ),
    Bad("an unknown argument of a loss", "--loss.arguments 'wieght = [1.0]'", "did you mean 'weight'?"),
    Bad("weights of other classes", "--loss.arguments 'weight = [1.0, 2.0, 3.0]'", "tells 2 classes apart"),
    Bad("weights that are words", "--loss.arguments 'weight = [\"a\"]'", "['a'] should be a list of numbers"),
    Bad("a loss of each position", "--loss.arguments 'reduction = \"none\"'", 'set reduction = "mean"'),
    Bad("an unknown optimizer", "--optimizer.name Addam", "did you mean 'Adam'?"),
    Bad("an optimizer with a closure", "--optimizer.name LBFGS", '"LBFGS": it computes the loss several times'),
    Bad("an unknown argument of an optimizer", "--optimizer.arguments 'speed = 1'", "argument 'speed'"),
    Bad("a bad argument of an optimizer", "--optimizer.arguments 'weight_decay = -1.0'", "weight_decay = -1.0"),
    Bad("an unknown schedule", "--schedule.name cosin", "should be one of 'constant', 'linear', 'cosine'"),
    Bad("an unknown precision", "--plan.precision fp16", "should be one of 'float32', 'bfloat16'"),
    Bad("a score that there is not", f"{BEST} acuracy", "choose one of loss, accuracy, mean_iou, mean_dice"),
    Bad("a score of an unknown class", f"{BEST} iou/cat --data.classes bird,dog", "iou/bird, iou/dog"),
    Bad("a score without validations", "--checkpoint.best loss", "nothing is held out: set validation.images"),
    Bad("an unknown flag", "--optimizer.lrr 0.1", "No such option: --optimizer.lrr", code=2),
    Bad("a flag without a value", "--optimizer.lr", "Option '--optimizer.lr' requires an argument", code=2),
    Bad("a flag of another type", "--data.batch two", "--data.batch 'two' should be a whole number"),
    Bad("an unknown verb", "trian run.toml", "No such command 'trian'. Did you mean 'train'?", code=2),
]


@pytest.mark.parametrize("bad", [*FILES, *VALUES, *NAMES], ids=str)
def test_a_configuration_is_refused(bad: Bad, tmp_path: Path) -> None:
    refused(bad, tmp_path)


def test_a_plan_in_a_file_takes_flags(tmp_path: Path) -> None:
    """They were refused."""
    (tmp_path / "plan.toml").write_text("microbatches = 2\n")
    (tmp_path / "run.toml").write_text(WITH_PLAN)
    config = Config.load(tmp_path / "run.toml", {"plan.recompute": "all"})
    assert (config.plan.microbatches, config.plan.recompute) == (2, "all")


def test_a_list_of_words_is_a_flag() -> None:
    """`--plan.offload activations,optimizer` was refused."""
    known = {flag.name: flag for flag in flags()}
    assert value_of(known["plan.offload"], "activations,optimizer") == ["activations", "optimizer"]
