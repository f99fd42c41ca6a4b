"""Values of masks and images: all of small ones, a sample of large ones; what classes and scaling follow from them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from mural.data import open as open_source
from mural.errors import DataError
from mural.geometry import volume
from mural.survey import mask_values
from mural.survey.image_values import ImageValues, scaling_of, values_in_images
from mural.survey.mask_classes import MaskClasses, classes_of
from mural.survey.mask_values import MaskValues, counted, values_in
from mural.survey.sampled_boxes import boxes


def ignored(*_: object) -> None:
    """No progress."""


def masks(folder: Path, count: int, side: int = 600) -> list[Path]:
    """Masks of 0 with a square of 255 in tiled files."""
    mask = np.zeros((side, side), np.uint8)
    mask[: side // 2, : side // 2] = 255
    paths = [folder / f"{number}.tif" for number in range(count)]
    for path in paths:
        tifffile.imwrite(path, mask, tile=(64, 64))
    return paths


def classes(*values: float, sampled: bool = False, endings: tuple[str, ...] = (".png",), **more: Any) -> MaskClasses:
    return classes_of(MaskValues(Counter({float(v): 10 for v in values}), sampled=sampled, **more), endings)


# -- masks -------------------------------------------------------------------------------------------------------------


def test_small_masks_are_counted_as_a_whole(tmp_path: Path) -> None:
    found, bad = values_in(masks(tmp_path, 2), [600 * 600] * 2, ignored)
    assert found.counts == {0: 2 * 270_000, 255: 2 * 90_000}
    assert (found.sampled, found.dtypes, bad) == (False, (torch.uint8,), {})


def test_large_masks_are_sampled_within_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_values, "MOST", 2**17)
    found, _ = values_in(masks(tmp_path, 2), [600 * 600] * 2, ignored)
    assert found.sampled
    assert 0 < found.positions <= 2**17


def test_a_mask_that_cannot_be_read_is_named_and_the_others_count(tmp_path: Path) -> None:
    first, second = masks(tmp_path, 2)
    first.write_bytes(b"II*\0")
    found, bad = values_in([first, second], [600 * 600] * 2, ignored)
    assert found.positions == 600 * 600
    assert list(bad) == [first]


def test_counts_of_all_types_are_those_of_numpy() -> None:
    draw = np.random.default_rng(0)
    for kind in ("uint8", "int16", "uint16", "int32", "float32", "bool"):
        values = draw.integers(0, 2 if kind == "bool" else 90, 500).astype(kind) * (-1 if kind == "int16" else 1)
        found, often = np.unique(values, return_counts=True)
        assert counted(torch.from_numpy(values)) == dict(zip(found.tolist(), often.tolist(), strict=True))
    assert counted(torch.tensor([0, 2**40])) == {0: 1, 2**40: 1}


def test_boxes_lie_along_chunks_and_take_no_more_than_asked(tmp_path: Path) -> None:
    (path,) = masks(tmp_path, 1)
    with open_source(path) as source:
        some, complete = boxes(source, 100_000)
        assert not complete
        assert sum(map(volume, some)) <= 100_000
        assert all(interval.start % 64 == 0 for box in some for interval in box[1:])
        every, complete = boxes(source, 600 * 600)
        assert complete
        assert sum(map(volume, every)) == 600 * 600
    Image.new("L", (300, 300)).save(tmp_path / "whole.png")
    with open_source(tmp_path / "whole.png") as source:  # it can only be decoded as a whole
        every, complete = boxes(source, 10)
        assert complete
        assert sum(map(volume, every)) == 300 * 300


@pytest.mark.parametrize(
    ("values", "sampled", "count", "labels"),
    [
        ((0, 1, 2), False, 3, {}),
        ((0, 255), False, 2, {255: 1}),
        ((0, 128, 255), True, 3, {128: 1, 255: 2}),
        ((1, 2), False, 2, {1: 0, 2: 1}),
        ((0, 1, 3), False, 3, {3: 2}),
        ((0, 1, 3), True, 4, {}),  # 2 may be there, too
        ((0,), False, 2, {}),
    ],
)
def test_values_become_classes_from_0_on(
    values: tuple[int, ...], sampled: bool, count: int, labels: dict[int, int]
) -> None:
    found = classes(*values, sampled=sampled)
    assert (found.count, found.labels, found.ignored) == (count, labels, None)
    assert len(found.shares) == count
    assert sum(found.shares) == pytest.approx(1)


def test_a_value_that_stands_for_no_class_is_ignored() -> None:
    assert (classes(0, 1, 255).ignored, classes(0, 1, 255).count) == (255, 2)
    assert (classes(-1, 0, 1, 2).ignored, classes(-1, 0, 1, 2).count) == (-1, 3)


def test_rare_classes_weigh_more() -> None:
    found = classes_of(MaskValues(Counter({0.0: 9_950, 1.0: 50})), [".png"])
    assert found.rare == [1]
    assert found.weights[1] > 10 * found.weights[0]
    assert sum(found.weights) == pytest.approx(2, abs=0.01)


def test_what_is_unusual_about_masks_is_said() -> None:
    assert "0, 255, not classes from 0 on" in classes(0, 255).odd[0]
    assert "nothing but 0" in classes(0).odd[0]
    assert "float32" in classes(0, 1, dtypes=(torch.float32,)).odd[0]
    assert "several types: uint8, int16" in classes(0, 1, dtypes=(torch.uint8, torch.int16)).odd[0]
    assert "70 values" in classes(*range(70)).odd[0]


@pytest.mark.parametrize(
    ("values", "ending", "said"),
    [
        ((0, 0.5, 1), ".tif", "fractions"),
        ((0, float("nan")), ".tif", "not finite"),
        ((0, 3, 250, 255), ".jpg", "JPEG"),
        (range(300), ".png", "300 values"),
        (range(0, 70_000, 1000), ".png", "too many for classes"),
    ],
)
def test_values_that_are_no_classes_are_refused(values: tuple[float, ...], ending: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        classes(*values, endings=(ending,))


# -- images ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "low", "high", "scale"),
    [
        (torch.uint8, 0, 9, "range"),
        (torch.uint16, 0, 4000, 4095),
        (torch.uint16, 0, 60_000, "range"),
        (torch.int16, -1000, 3000, "none"),
        (torch.float32, 0, 1, "range"),
        (torch.float32, -3, 900, "none"),
    ],
)
def test_scaling_follows_type_and_range(dtype: torch.dtype, low: float, high: float, scale: float | str) -> None:
    found = scaling_of(dtype, ImageValues(low, high, (50.0,), (0.0,)))
    assert found.scale == scale
    assert (found.mean, found.std) == (((50.0,), (1.0,)) if scale == "none" else ((), ()))


def test_mean_and_deviation_are_those_of_each_channel_of_all_images(tmp_path: Path) -> None:
    images = np.random.default_rng(0).normal((3, -500), (2, 70), (3, 40, 50, 2)).astype(np.float32)
    for number, image in enumerate(images):
        np.save(tmp_path / f"{number}.npy", image)
    found, bad = values_in_images(sorted(tmp_path.iterdir()), ignored)
    assert found is not None
    assert found.mean == pytest.approx(images.mean((0, 1, 2)), rel=1e-5)
    assert found.std == pytest.approx(images.std((0, 1, 2)), rel=1e-4)
    assert (found.strange, bad) == (False, {})


def test_values_that_are_not_finite_are_noticed(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([[0, np.nan], [2, 4]], np.float32))
    found, _ = values_in_images([tmp_path / "a.npy"], ignored)
    assert found is not None
    assert (found.strange, found.low, found.high, found.mean) == (True, 0, 4, (2,))
