"""Synthetic images agree with themselves whatever boxes are read; real ones come with their masks."""

from __future__ import annotations

import pickle
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mural
from mural.data.loading.loader import Loader
from mural.data.sets.dataset import Dataset
from mural.data.sets.real_images import RULES, real
from mural.data.sets.synthetic import synthetic, write_synthetic
from mural.data.sets.texture import Ellipses, between, chance, smooth
from mural.errors import DataError
from mural.geometry import Interval

SIZES = {"image": (700, 900), "volume": (70, 140, 150)}


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    starts = [draw(st.integers(0, n)) for n in shape]
    return [(a, draw(st.integers(a, min(n, a + 150)))) for a, n in zip(starts, shape, strict=True)]


@pytest.mark.parametrize("kind", ["tissue", "cells"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@settings(max_examples=12)
@given(data=st.data())
def test_a_box_is_what_the_whole_shows_there(kind: str, size: tuple[int, ...], data: st.DataObject) -> None:
    sample = synthetic(size, seed=data.draw(st.integers(0, 1)), kind=kind)
    for source in (sample.image, sample.target):
        outer = data.draw(boxes(source.shape))
        inner = [(a + d, b - e) if b - a > (d := data.draw(st.integers(0, 9))) + (e := 3) else (a, b) for a, b in outer]
        part = source.read(outer)[tuple(slice(i[0] - o[0], i[1] - o[0]) for i, o in zip(inner, outer, strict=True))]
        assert torch.equal(source.read(inner), part)


def test_seeds_kinds_and_classes() -> None:
    box = [(0, 1), (5_000, 5_500), (90_000, 90_500)]
    masks = [synthetic(100_000, seed=s).target.read(box) for s in (0, 1)]
    assert not torch.equal(*masks)
    for mask in masks:
        shares = [float((mask == c).float().mean()) for c in (0, 1, 2)]
        assert sum(shares) == pytest.approx(1)
        assert 0.05 < shares[1] + shares[2] < 0.4
    assert synthetic((64, 64)).image.shape == (3, 64, 64)
    assert synthetic((8, 64, 64), kind="cells").image.shape == (1, 8, 64, 64)
    nuclei = synthetic((300, 300), kind="cells")
    light, mask = nuclei.image.read()[0].float(), nuclei.target.read()[0]
    assert light[mask == 2].mean() > light[mask == 1].mean() > 3 * light[mask == 0].mean()
    assert pickle.loads(pickle.dumps(nuclei.image)).read().equal(nuclei.image.read())
    with pytest.raises(DataError, match="kind='tissues'"):
        synthetic(64, kind="tissues")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="two or three"):
        synthetic((64,))


def test_hashed_numbers_are_uniform_and_unlike_their_neighbours() -> None:
    values = chance(3, [np.arange(-300, 300), np.arange(10**12, 10**12 + 500)], salt=2).ravel()
    assert values.min() >= 0
    assert values.max() < 1
    counts, _ = np.histogram(values, 20, (0, 1))
    assert np.abs(counts / counts.mean() - 1).max() < 0.03
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.01


def test_noise_is_smooth_and_passes_through_its_knots() -> None:
    box = (Interval(-20, 40), Interval(3, 50))
    noise = smooth(box, 10, seed=1, salt=0)
    assert np.abs(noise).max() <= 1
    assert np.abs(np.diff(noise, axis=0)).max() < 0.31  # at most 2 · 1.5 / 10
    knots = np.array([[0.0, 10.0], [20.0, 30.0]], np.float32)
    assert between(knots, (Interval(0, 4), Interval(0, 2)), 4)[[0, 2]].tolist() == [[0, 2.5], [10, 12.5]]


def test_ellipses_stay_inside_their_reach() -> None:
    """A cell is painted into a window; an ellipse that stuck out of it would be cut off straight."""
    for ndim, lattice in ((2, (22, 5)), (3, (16, 4))):
        width = lattice[0] + 2 * lattice[1]
        depth, large = Ellipses(1, *lattice).windows([np.arange(0, 24, 2)] * ndim, width)
        assert depth.dtype == np.float32
        assert 0.1 < large.mean() < 0.9
        for dim in range(ndim):
            edges = depth.take([0, width - 1], axis=2 * dim + 1)
            assert edges.max() < -0.15  # what `Scene.nuclei` bends the rim by


def test_written_files_hold_what_is_computed_in_little_memory(tmp_path: Path) -> None:
    for suffix in (".tif", ".zarr"):
        data = write_synthetic(tmp_path / suffix, count=2, size=(600, 530), seed=4, suffix=suffix)
        assert [s.image.name for s in data] == [f"tissue-0000{suffix}", f"tissue-0001{suffix}"]
        assert data.check().largest == (600, 530)
        for k, batch in enumerate(Loader(data, mural.init(), shuffle=False).epoch(0)):
            sample = synthetic((600, 530), seed=4 + k)
            assert torch.equal(batch.image.local[0], sample.image.read().float() / 255)
            assert torch.equal(batch.target.local[0], sample.target.read()[0].long())
    found = Dataset(str(tmp_path / ".tif/images/*"), str(tmp_path / ".tif/masks/*"))
    assert [s.target.name for s in found] == ["tissue-0000.tif", "tissue-0001.tif"]


@pytest.mark.slow
def test_a_large_image_is_written_in_bounded_memory(tmp_path: Path) -> None:
    tracemalloc.start()
    write_synthetic(tmp_path, count=1, size=(4096, 4096))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 0.6 * 3 * 4096 * 4096


@pytest.mark.parametrize("name", RULES)
def test_real_images_come_with_masks(name: str) -> None:
    sample = real(name)
    image, mask = sample.image.read(), sample.target.read()
    assert image.dtype == mask.dtype == torch.uint8
    assert image.shape[1:] == mask.shape[1:]
    shares = torch.bincount(mask.flatten()) / mask.numel()
    assert shares.min() > 0.05
    green = image[1].float()
    assert green[mask[0] == 1].mean() < green[(mask[0] == 0) & (image.amax(0) > 25)].mean()
    with pytest.raises(DataError, match="'retina'"):
        real("cat")


def test_real_images_name_the_extra_that_brings_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [m for m in sys.modules if m.split(".")[0] == "skimage"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "skimage", None)
    monkeypatch.setattr("mural.data.sets.real_images.bundled", real.__globals__["bundled"].__wrapped__)
    with pytest.raises(DataError, match=r"mural-train\[samples\]"):
        real("retina")
