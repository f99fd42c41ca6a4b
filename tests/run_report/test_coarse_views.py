"""Large images at the size of a picture: means and labels of the right places, of the right level, box by box."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import mural
from mural.data import ArraySource, convert
from mural.run_report import coarse_views
from mural.run_report.coarse_views import boxes_of, coarse_labels, coarse_values, place, view_of


def nothing() -> None:
    """Nobody is told."""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of 10 pixels, read in boxes of 64 positions."""
    monkeypatch.setattr(coarse_views, "SIZE", 10)
    monkeypatch.setattr(coarse_views, "AT_ONCE", 64)


@pytest.mark.usefixtures("small")
def test_values_are_means_and_labels_those_in_the_middle() -> None:
    image = torch.rand(3, 60, 40)
    source = ArraySource(image, "image")
    source.chunks = (3, 7, 9)
    view = view_of((60, 40), [source])
    assert view.size == (10, 7)
    assert len(boxes_of(source, view)[1]) > 1
    whole = F.interpolate(image[None], view.size, mode="nearest-exact")[0]
    assert torch.equal(coarse_labels(source, view, 3, nothing), whole)
    square = ArraySource(image[:, :, :30], "square")
    square.chunks = (3, 7, 9)
    means = F.avg_pool2d(image[:, :, :30], 6)
    torch.testing.assert_close(coarse_values(square, view_of((60, 30), [square]), 3, nothing), means)


@pytest.mark.usefixtures("small")
def test_a_small_image_stays_as_it_is() -> None:
    image = torch.rand(2, 8, 5)
    view = view_of((8, 5), [ArraySource(image, "image")])
    assert torch.equal(coarse_values(ArraySource(image, "image"), view, 1, nothing), image[:1])


@pytest.mark.usefixtures("small")
def test_the_coarsest_level_that_will_do_is_read(tmp_path: Path) -> None:
    array = torch.zeros(1, 64, 64, dtype=torch.uint8)
    array[:, 32:] = 200
    torch_file, pyramid = tmp_path / "a.npy", tmp_path / "a.ome.zarr"
    import numpy as np

    np.save(torch_file, array.numpy())
    convert(torch_file, pyramid, levels=4)
    with mural.open(pyramid) as source:
        assert len(source.levels) == 4
        view = view_of((64, 64), [source])
        level, box = place(source, view)
        assert (level, [i.size for i in box]) == (2, [16, 16])
        found = coarse_values(source, view, 1, nothing)
        assert (float(found[0, 0, 0]), float(found[0, -1, -1])) == (0, 200)


@pytest.mark.usefixtures("small")
def test_of_an_image_that_is_too_large_the_middle_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coarse_views, "MOST", 1000)
    monkeypatch.setattr(coarse_views, "PART", 20)
    image = torch.arange(40.0).expand(1, 40, 40)
    view = view_of((40, 40), [ArraySource(image, "image")])
    assert view.words == "40 × 40, the middle 20 × 20"
    assert coarse_labels(ArraySource(image, "image"), view, 1, nothing)[0, 0].tolist() == [*range(11, 31, 2)]


@pytest.mark.usefixtures("small")
def test_of_a_volume_the_middle_slice_is_shown() -> None:
    volume = torch.arange(5.0)[:, None, None].expand(1, 5, 20, 20)
    source = ArraySource(volume, "volume")
    view = view_of((5, 20, 20), [source])
    assert view.words == "5 × 20 × 20, the middle slice"
    assert coarse_values(source, view, 1, nothing).unique().tolist() == [2.0]
