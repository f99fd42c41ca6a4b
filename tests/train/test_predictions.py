"""Predictions of held-out images: a file for each, whatever the images are called."""

from __future__ import annotations

from pathlib import Path

import pytest
import tifffile
import torch
from hypothesis import given
from hypothesis import strategies as st
from runs import run_config, write_images

from mural.train import Config
from mural.train.loop import fit_rank
from mural.train.prediction_files import file_stem, file_stems
from mural.train.scores import Scores

PARTS = st.sampled_from(["a", "b", "A", "a_x", "x"])
NAMES = st.tuples(st.lists(PARTS, max_size=3), PARTS, st.sampled_from([".tif", ".png", ".ome.tif", "", "_2.tif"]))


def test_held_out_images_of_one_name_in_two_folders_have_a_prediction_each(tmp_path: Path) -> None:
    """`a/x.tif` and `b/x.tif` overwrote each other."""
    write_images(tmp_path, 4)
    for folder, count in (("a", 2), ("b", 3)):
        write_images(tmp_path / folder, count, side=32 if folder == "a" else 48, seed=count)
    images = sorted(map(str, tmp_path.glob("[ab]/images/*.tif")))
    held = {"images": images, "masks": [path.replace("/images/", "/masks/") for path in images], "write": "tiff"}
    config = run_config(tmp_path, tmp_path / "run", validation=held, train__steps=2)
    fit_rank(0, config)
    written = {p.name: tifffile.imread(p).shape[-2:] for p in (config.folder / "predictions").glob("*/*.tif")}
    small, large = (32, 32), (48, 48)
    assert written == {"a_0.tif": small, "a_1.tif": small, "b_0.tif": large, "b_1.tif": large, "2.tif": large}


@pytest.mark.parametrize(
    ("loss", "channels", "dtype"),
    [
        ("bce", 1, torch.uint8), ("bce", 3, torch.uint8), ("cross_entropy", 3, torch.uint8),
        ("cross_entropy", 300, torch.uint16), ("mse", 3, torch.float32),
    ],
)  # fmt: skip
def test_predictions_have_their_channels_first(loss: str, channels: int, dtype: torch.dtype) -> None:
    """Those of one channel that holds two classes had a dim too many, which no file of a volume could take."""
    by_class = loss == "cross_entropy"
    output, target = torch.randn(2, channels, 3, 4, 5), torch.ones(2, channels, 3, 4, 5)
    mask = "classes" if by_class else "channels"
    scores = Scores(Config.of({"loss": {"name": loss}, "data": {"mask": mask}}))
    predicted = scores.add(output, target[:, 0].long() if by_class else target, 1.0, 2)
    assert predicted.dtype == dtype
    assert predicted.shape == (2, 1 if by_class else channels, 3, 4, 5)


@given(st.lists(NAMES, max_size=8))
def test_names_of_predictions_differ_and_stay_where_they_can(paths: list[tuple[list[str], str, str]]) -> None:
    names = ["/".join([*folders, stem + suffix]) for folders, stem, suffix in paths]
    found = file_stems(names)
    assert len({name.casefold() for name in found}) == len(names)
    stems = [file_stem(name).casefold() for name in names]
    for name, stem in zip(found, stems, strict=True):
        assert stem in name.casefold()
        assert name.casefold() == stem or stems.count(stem) > 1


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["/d/a/images/x.tif", "/d/b/images/x.tif"], ["a_x", "b_x"]),
        (["/d/x.tif", "/d/a/x.tif"], ["x", "a_x"]),
        (["image 0", "image 1"], ["image_0", "image_1"]),
        (["X.tif", "x.tif"], ["X", "x_2"]),
        (["a/x.tif", "a/x.tif"], ["x", "x_2"]),
    ],
)
def test_a_name_keeps_the_part_of_the_path_that_tells_it_apart(names: list[str], wanted: list[str]) -> None:
    assert file_stems(names) == wanted
