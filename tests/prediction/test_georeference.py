"""Predictions of maps: they lie where their images lie, as rasterio reads both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from slides import pixels

import mural
from mural.data.pixel_grid import pixel_grid
from mural.data.writing import cloud_optimized

rasterio = pytest.importorskip("rasterio")
Affine = rasterio.Affine
NORTH_UP = Affine(10, 0, 500000, 0, -10, 4649776)
PLACES = {
    "north": (NORTH_UP, "Area"),
    "rotated": (NORTH_UP @ Affine.rotation(10), "Area"),
    "point": (NORTH_UP, "Point"),
}
SIDE = (50, 61)


def write_map(path: Path, transform: Any = NORTH_UP, kind: str = "Area", side: tuple[int, int] = SIDE) -> None:
    """A GeoTIFF with a value for missing pixels."""
    image = pixels(side).transpose(2, 0, 1)
    about = {"driver": "GTiff", "count": 3, "height": side[0], "width": side[1], "dtype": "uint8", "nodata": 0}
    with rasterio.open(path, "w", crs="EPSG:32633", transform=transform, **about) as file:
        file.update_tags(AREA_OR_POINT=kind)
        file.write(image)


@pytest.mark.parametrize("name", PLACES)
def test_a_prediction_of_a_map_lies_where_the_map_lies(run: Path, tmp_path: Path, name: str) -> None:
    image = tmp_path / "map.tif"
    write_map(image, *PLACES[name])
    mural.predict(run, image, tmp_path / "out", probabilities=True)
    with rasterio.open(image) as given, rasterio.open(tmp_path / "out" / "map.tif") as found:
        assert found.crs == given.crs
        assert found.transform.almost_equals(given.transform, 1e-9)
        assert (found.count, found.nodata, found.shape) == (1, None, SIDE)
        classes = found.read(1)
    with rasterio.open(tmp_path / "out" / "probabilities" / "map.tif") as found:
        assert found.transform.almost_equals(PLACES[name][0], 1e-9)
        assert found.count == 2
        assert (found.read().argmax(0) == classes).all()


@pytest.mark.parametrize("name", PLACES)
def test_a_coarser_grid_has_larger_pixels_at_the_same_place(tmp_path: Path, name: str) -> None:
    transform, kind = PLACES[name]
    write_map(tmp_path / "map.tif", transform, kind)
    coarser = pixel_grid(tmp_path / "map.tif").coarser((2.0, 4.0))
    with mural.data.create(tmp_path / "small.tif", (1, 25, 15), "uint8", grid=coarser):
        pass
    with rasterio.open(tmp_path / "small.tif") as found:
        assert found.transform.almost_equals(transform @ Affine.scale(4, 2), 1e-9)


@pytest.fixture
def optimized(tmp_path: Path) -> Path:
    """A Cloud Optimized GeoTIFF."""
    from rasterio import shutil

    write_map(tmp_path / "plain.tif", side=(530, 640))
    shutil.copy(tmp_path / "plain.tif", tmp_path / "map.tif", driver="COG")
    return tmp_path / "map.tif"


def test_a_prediction_of_a_cloud_optimized_geotiff_is_one(run: Path, optimized: Path, tmp_path: Path) -> None:
    mural.predict(run, optimized, tmp_path / "out", probabilities=True)
    mural.predict(run, tmp_path / "plain.tif", tmp_path / "out")
    with rasterio.open(tmp_path / "out" / "plain.tif") as plain:
        labels = plain.read()
        assert (plain.overviews(1), plain.tags(ns="IMAGE_STRUCTURE").get("LAYOUT")) == ([], None)
    for name, count in (("map.tif", 1), ("probabilities/map.tif", 2)):
        with rasterio.open(tmp_path / "out" / name) as found:
            assert found.tags(ns="IMAGE_STRUCTURE")["LAYOUT"] == "COG"
            assert (found.count, found.overviews(1)) == (count, [2])
            assert found.transform.almost_equals(NORTH_UP, 1e-9)
            read = found.read()
        assert (read == labels).all() if count == 1 else (read.argmax(0) == labels[0]).all()
    with rasterio.open(tmp_path / "out" / "map.tif", overview_level=0) as coarser:
        assert (coarser.read() == labels[:, ::2, ::2]).all()
    assert not [path for path in (tmp_path / "out").rglob("*") if "partial" in path.name]


def test_without_rasterio_a_cloud_optimized_geotiff_becomes_a_tiled_one(
    run: Path, optimized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloud_optimized, "find_spec", lambda _: None)
    with pytest.warns(UserWarning, match=r"Cloud Optimized GeoTIFF, which takes rasterio .*\[geo\]"):
        mural.predict(run, optimized, tmp_path / "out")
    with rasterio.open(tmp_path / "out" / "map.tif") as found:
        assert found.profile["tiled"]
        assert found.overviews(1) == [2]


def test_a_raster_of_another_format_gives_its_georeference_too(run: Path, tmp_path: Path) -> None:
    from rasterio import shutil

    write_map(tmp_path / "map.tif")
    shutil.copy(tmp_path / "map.tif", tmp_path / "map.vrt", driver="VRT")
    mural.predict(run, tmp_path / "map.vrt", tmp_path / "out")
    with rasterio.open(tmp_path / "out" / "map.tif") as found:
        assert found.crs == rasterio.CRS.from_epsg(32633)
        assert found.transform.almost_equals(NORTH_UP, 1e-9)
