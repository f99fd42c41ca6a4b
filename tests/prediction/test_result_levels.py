"""Results with levels, and on another grid than the model's: as the libraries read them that users have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import zarr
from runs import run_config
from slides import pixels, predicted

import mural
from mural.data.pixel_grid import pixel_grid
from mural.data.writing import write
from mural.errors import ConfigError, DataError
from mural.plans import Plan
from mural.prediction.result_form import ResultStyle
from mural.train.loop import fit_rank
from ranks import run_on

SIDE = (520, 1030)
WITH_LEVELS = ResultStyle(pyramid=True)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image of some tiles."""
    path = tmp_path_factory.mktemp("large") / "large.tif"
    options: dict[str, Any] = {"resolution": (40000, 20000), "resolutionunit": "CENTIMETER"}
    tifffile.imwrite(path, pixels(SIDE), tile=(64, 64), photometric="rgb", **options)
    return path


@pytest.fixture(scope="module")
def finest(run: Path, image: Path, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray[Any, Any]:
    """Its labels (H, W), as one rank gives them."""
    found = mural.predict(run, image, tmp_path_factory.mktemp("finest"))
    assert len(mural.open(found.files[0]).levels) == 1
    return tifffile.imread(found.files[0])


@pytest.mark.parametrize(
    ("ranks", "plan"), [(1, Plan(stream=(256, 256))), (2, Plan(spatial=(1, 2)))], ids=["streamed", "2 ranks"]
)
def test_labels_of_each_level_are_every_second_of_the_one_before(
    run: Path, image: Path, finest: np.ndarray[Any, Any], tmp_path: Path, ranks: int, plan: Plan
) -> None:
    run_on(ranks, predicted, run, tmp_path, plan, image, WITH_LEVELS)
    with tifffile.TiffFile(tmp_path / "large.tif") as file:
        levels = [level.asarray() for level in file.series[0].levels]
        assert file.pages.first.tags["XResolution"].value == (40000, 1)
    assert len(levels) == 3
    for level, labels in enumerate(levels):
        assert np.array_equal(labels, finest[:: 2**level, :: 2**level])


def test_an_ome_zarr_has_multiscales(run: Path, image: Path, finest: np.ndarray[Any, Any], tmp_path: Path) -> None:
    mural.predict(run, image, tmp_path, format="zarr", pyramid=True, probabilities=True)
    for folder, scale in ((tmp_path, 0.0), (tmp_path / "probabilities", 0.25)):
        group: Any = zarr.open_group(folder / "large.ome.zarr", mode="r")
        (multiscale,) = group.attrs["ome"]["multiscales"]
        sets = multiscale["datasets"]
        assert [one["path"] for one in sets] == ["0", "1", "2"]
        assert sets[1]["coordinateTransformations"][0]["scale"] == [1, 1.0, 0.5]
        moved = [change["translation"][1:] for change in sets[1]["coordinateTransformations"][1:]]
        assert moved == ([[scale, scale / 2]] if scale else [])
    assert pixel_grid(tmp_path / "large.ome.zarr").spacing == (0.5, 0.25)
    assert np.array_equal(zarr.open_array(tmp_path / "large.ome.zarr" / "1", mode="r")[0], finest[::2, ::2])
    shares = [np.asarray(group[name]) for name in "01"]
    assert np.allclose(shares[1], shares[0].reshape(2, 260, 2, 515, 2).mean((2, 4)))


def test_an_image_is_there_when_its_levels_are(
    run: Path, image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise DataError("interrupted")

    monkeypatch.setattr(write, "fill_levels", stop)
    with pytest.raises(DataError, match="interrupted"):
        mural.predict(run, image, tmp_path, pyramid=True)
    assert [path.name for path in tmp_path.iterdir()] == ["predictions.json"]
    monkeypatch.undo()
    found = mural.predict(run, image, tmp_path, pyramid=True)
    assert (found.skipped, len(mural.open(found.files[0]).levels)) == (0, 3)


# -- the grid of the source --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def coarse_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was trained on the second level of its images; they are next to it, with odd extents."""
    folder = tmp_path_factory.mktemp("coarse")
    for kind in ("images", "masks", "slides"):
        (folder / kind).mkdir()
    for number, side in enumerate(((96, 96), (96, 96), (75, 121))):
        image = pixels(side, number)
        mask = (image[..., 0] > 100).astype(np.uint8)
        for kind, finest in (("images", image), ("masks", mask)) if number < 2 else (("slides", image),):
            with tifffile.TiffWriter(folder / kind / f"{number}.tif") as file:
                options: dict[str, Any] = {"photometric": "rgb" if finest.ndim == 3 else "minisblack", "tile": (16, 16)}
                file.write(finest, subifds=1, resolution=(1000, 1000), resolutionunit="CENTIMETER", **options)
                file.write(finest[::2, ::2], subfiletype=1, **options)
    config = run_config(folder, data__level=1, data__multiple=4, train__steps=20)
    fit_rank(0, config)
    return config.folder


@pytest.mark.parametrize(
    ("ranks", "plan"),
    [(1, Plan()), (1, Plan(stream=(16, 16))), (2, Plan(spatial=(2, 1)))],
    ids=["1", "tiles", "2 ranks"],
)
def test_labels_come_on_the_source_s_grid_the_same_under_any_plan(
    coarse_run: Path, tmp_path: Path, ranks: int, plan: Plan
) -> None:
    slides = coarse_run.parent / "slides"
    mural.predict(coarse_run, slides, tmp_path / "level", grid="level")
    run_on(ranks, predicted, coarse_run, tmp_path / "source", plan, slides)
    level, source = (tifffile.TiffFile(tmp_path / name / "2.tif") for name in ("level", "source"))
    coarse, fine = (file.asarray().reshape(file.pages.first.shape) for file in (level, source))
    assert coarse.shape == (38, 61)
    assert 0 < coarse.mean() < 1
    assert np.array_equal(fine, coarse.repeat(2, 0).repeat(2, 1)[:75, :121])
    for file, resolution in ((level, 500), (source, 1000)):
        assert file.pages.first.tags["XResolution"].value == (resolution, 1)
        file.close()


def test_probabilities_are_interpolated_between_pixels_of_a_level(coarse_run: Path, tmp_path: Path) -> None:
    from torch.nn import functional as F

    slides = coarse_run.parent / "slides"
    for grid in ("level", "source"):
        mural.predict(coarse_run, slides, tmp_path / grid, grid=grid, probabilities=True)  # type: ignore[arg-type]
    coarse, fine = (mural.open(tmp_path / name / "probabilities" / "2.tif").read() for name in ("level", "source"))
    expected = F.interpolate(coarse[None], scale_factor=2, mode="bilinear")[0, :, :75, :121]
    assert np.allclose(fine, expected, atol=1e-6)
    assert not list(tmp_path.rglob(".*"))


def test_a_file_of_the_other_grid_is_not_taken_for_the_result(coarse_run: Path, tmp_path: Path) -> None:
    slides = coarse_run.parent / "slides"
    mural.predict(coarse_run, slides, tmp_path, grid="level")
    with pytest.raises(
        ConfigError, match=r"on the grid of the level, and would be that of .* on the grid of the source"
    ):
        mural.predict(coarse_run, slides, tmp_path)
    with pytest.raises(ConfigError, match='grid = "other" is not one of source, level'):
        mural.predict(coarse_run, slides, tmp_path, grid="other")  # type: ignore[arg-type]
