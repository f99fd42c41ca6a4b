"""Where the pixels of an image lie on the Earth: the tags of a GeoTIFF, which every format that GDAL reads can give."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tifffile

from mural.errors import package

CODES = {"scale": 33550, "tiepoints": 33922, "matrix": 34264, "keys": 34735, "doubles": 34736, "text": 34737}
"""The tags of GeoTIFF. GDAL's own value for missing pixels is not among them: labels have none."""
DOUBLE, SHORT, ASCII = 12, 3, 2
"""Types of a TIFF's values."""
RASTER_TYPE, POINT = 1025, 2
"""The key that says what a raster's whole coordinates are, and its value where they are the centres of pixels."""
Tag = tuple[int, int, int, Any, bool]
"""Code, type, count, value, and whether the first page alone has it: as tifffile writes it."""


@dataclass(frozen=True)
class Georeference:
    """The coordinate system of an image, and how its columns and rows become coordinates; what it lacks is empty.

    `scale` and `tiepoints` or `matrix` are in the order of GeoTIFF: columns first.
    """

    scale: tuple[float, ...] = ()
    tiepoints: tuple[float, ...] = ()
    matrix: tuple[float, ...] = ()
    keys: tuple[int, ...] = ()
    doubles: tuple[float, ...] = ()
    text: str = ""
    optimized: bool = False
    """Whether the file is a Cloud Optimized GeoTIFF: tiles, with overviews, and all directories before the pixels."""

    @property
    def corner(self) -> float:
        """The coordinate of the first pixel's outer edge: 0, or -0.5 where coordinates are those of centres."""
        entries = [self.keys[at : at + 4] for at in range(4, len(self.keys), 4)]
        return -0.5 if any(entry[0] == RASTER_TYPE and entry[-1] == POINT for entry in entries) else 0.0

    def coarser(self, times: Sequence[float]) -> Georeference:
        """The same place on a grid with one pixel for so many, along rows and columns of the last two of `times`.

        >>> Georeference((10.0, 10.0, 0.0), (4.0, 8.0, 0.0, 500.0, 900.0, 0.0)).coarser((2, 2))
        Georeference(scale=(20.0, 20.0, 0.0), tiepoints=(2.0, 4.0, 0.0, 500.0, 900.0, 0.0), ...)
        """
        down, across = times[-2:]
        factors, corner = (across, down), self.corner
        tiepoints = list(self.tiepoints)
        for at in range(0, len(tiepoints), 6):
            for dim, factor in enumerate(factors):
                tiepoints[at + dim] = (tiepoints[at + dim] - corner) / factor + corner
        scale = tuple(size * n for size, n in zip(self.scale, (*factors, 1.0), strict=False))
        return replace(self, scale=scale, tiepoints=tuple(tiepoints), matrix=self._stretched(factors))

    def _stretched(self, factors: Sequence[float]) -> tuple[float, ...]:
        """The matrix for coordinates of which one stands for so many."""
        if not self.matrix:
            return ()
        step = np.eye(4)
        for dim, factor in enumerate(factors):
            step[dim, dim], step[dim, 3] = factor, self.corner * (1 - factor)
        found = np.array(self.matrix).reshape(4, 4) @ step
        return tuple(float(value) for value in found.flat)

    def tags(self) -> Iterator[Tag]:
        """The tags of a GeoTIFF that says this."""
        for name, code in CODES.items():
            if value := getattr(self, name):
                # A text ends in a zero byte, which counts and which tifffile adds.
                kind = {"keys": SHORT, "text": ASCII}.get(name, DOUBLE)
                yield code, kind, len(value) + (name == "text"), value, True


def tiff_georeference(file: tifffile.TiffFile) -> Georeference | None:
    """What the first page of a TIFF says; None where it says nothing."""
    tags: Any = file.pages.first.tags
    found: dict[str, Any] = {}
    for name, code in CODES.items():
        if (tag := tags.get(code)) is not None:
            value = tag.value if name == "text" or isinstance(tag.value, (tuple, list)) else (tag.value,)
            found[name] = value if name == "text" else tuple(value)
    return Georeference(**found, optimized=is_optimized(file)) if found else None


def is_optimized(file: tifffile.TiffFile) -> bool:
    """Whether a TIFF is laid out as a Cloud Optimized GeoTIFF, by what GDAL notes in it or by its directories."""
    if (file.gdal_structural_metadata or {}).get("LAYOUT") == "IFDS_BEFORE_DATA":
        return True
    pages: list[Any] = list(file.pages)
    if len(pages) < 2 or not all(page.is_tiled for page in pages) or not all(page.is_reduced for page in pages[1:]):
        return False
    return max(page.offset for page in pages) < min(offset for page in pages for offset in page.dataoffsets if offset)


def raster_georeference(path: Path) -> Georeference | None:
    """What GDAL knows of a raster of another format, as the tags of a GeoTIFF of one pixel."""
    rasterio: Any = package("rasterio", "geo")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", package("rasterio.errors", "geo").NotGeoreferencedWarning)
        with rasterio.open(path) as raster:
            about = {"crs": raster.crs, "transform": raster.transform}
        if about["crs"] is None and about["transform"].is_identity:
            return None
        with rasterio.MemoryFile() as memory:
            with memory.open(driver="GTiff", width=1, height=1, count=1, dtype="uint8", **about):
                pass
            memory.seek(0)
            with tifffile.TiffFile(memory) as file:
                return tiff_georeference(file)
