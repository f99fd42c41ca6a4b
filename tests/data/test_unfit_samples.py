"""What can be read and does not fit a run: an error, also where what cannot be read is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mural
from mural.data import Dataset, Loader
from mural.data.loading.label_range import LabelRange
from mural.errors import DataError
from ranks import run_on


def write(folder: Path, image: np.ndarray[Any, Any], mask: np.ndarray[Any, Any], number: int) -> None:
    for name, pixels in (("images", image), ("masks", mask)):
        (folder / name).mkdir(exist_ok=True)
        Image.fromarray(pixels).save(folder / name / f"{number}.png")


def pictures(folder: Path) -> None:
    """Three images with masks of two classes."""
    for number in range(3):
        write(folder, np.full((16, 24), number, np.uint8), np.ones((16, 24), np.uint8), number)


def loaded(folder: Path, spatial: tuple[int, ...]) -> str:
    """The error of the one epoch of a loader that leaves out what is bad."""
    samples = Dataset(folder / "images", folder / "masks")
    loader = Loader(samples, mural.init(spatial=spatial), skip_bad=True, label_range=LabelRange(2))
    try:
        loader.check()
        list(loader.epoch(0))
    except DataError as error:
        return str(error)
    return ""


def test_an_unknown_class_is_never_left_out(tmp_path: Path) -> None:
    """`skip_bad` left out every image whose mask held one, and the run went on without the rarest class."""
    pictures(tmp_path)
    mask = np.ones((16, 24), np.uint8)
    mask[11:, 20:] = 7
    write(tmp_path, np.zeros((16, 24), np.uint8), mask, 1)
    texts = {loaded(tmp_path, ()), *run_on(2, loaded, tmp_path, (2, 1))}
    for text in texts:
        assert "masks/1.png: the mask holds the value 7 (first at (11, 20)), but the model has 2 classes" in text
        assert "data.labels" in text
        assert "skip_bad" not in text


@pytest.mark.parametrize(
    ("image", "mask", "words"),
    [
        (np.zeros((16, 24), np.uint8), np.ones((16, 20), np.uint8), "the mask has the spatial extents (16, 20)"),
        (np.zeros((16, 24, 3), np.uint8), np.ones((16, 24), np.uint8), "has 3 channels of uint8"),
        (np.zeros((16, 24), np.uint8), np.ones((16, 24, 3), np.uint8), "the mask has 3 channels"),
    ],
)
def test_what_does_not_fit_the_others_is_never_left_out(
    image: np.ndarray[Any, Any], mask: np.ndarray[Any, Any], words: str, tmp_path: Path
) -> None:
    pictures(tmp_path)
    write(tmp_path, image, mask, 1)
    assert words in loaded(tmp_path, ())


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    pictures(tmp_path)
    (tmp_path / "masks" / "2.png").write_bytes(b"nothing")
    assert loaded(tmp_path, ()) == ""


def test_a_place_is_that_of_the_file_in_a_crop_that_is_turned(tmp_path: Path) -> None:
    mask = np.zeros((16, 24), np.uint8)
    mask[3, 5] = 9
    write(tmp_path, np.zeros((16, 24), np.uint8), mask, 0)
    samples = Dataset(tmp_path / "images", tmp_path / "masks")
    augment = mural.data.Augment(flips=True, rotations=True)
    for seed in range(4):
        loader = Loader(samples, mural.init(), augment=augment, crop=(14, 20), seed=seed, label_range=LabelRange(2))
        with pytest.raises(DataError, match=r"the value 9 \(first at \(3, 5\)\)"):
            [torch.as_tensor(batch.target.local) for batch in loader.epoch(0)]
