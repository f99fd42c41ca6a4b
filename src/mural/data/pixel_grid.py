"""The grid of an image in the world: how large its pixels are, and where they lie, as its file says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import tifffile

from mural.data.formats.ngff import multiscales, node
from mural.data.formats.tiff_opening import quiet
from mural.data.georeference import Georeference, raster_georeference, tiff_georeference
from mural.data.open import chosen
from mural.errors import package

MICROMETERS = {"INCH": 25400.0, "CENTIMETER": 10000.0}
"""What a TIFF counts pixels by."""
MICROMETERS_PER = {"nanometer": 1e-3, "micrometer": 1.0, "millimeter": 1e3, "centimeter": 1e4, "meter": 1e6}
"""Micrometers of the units of an OME-Zarr."""


@dataclass(frozen=True)
class PixelGrid:
    """What results are written with, so that they lie on their image.

    `spacing` is (height, width) in micrometers, after the depth where it is known; `affine` a NIfTI's, row by row, and
    `geo` a map's. What a file does not say is empty.
    """

    spacing: tuple[float, ...] = ()
    affine: tuple[tuple[float, ...], ...] = ()
    geo: Georeference | None = None

    def coarser(self, times: tuple[float, ...]) -> PixelGrid:
        """The grid of a level with that many pixels for one, along each spatial dim.

        >>> PixelGrid((0.25, 0.25)).coarser((2.0, 2.0)).spacing
        (0.5, 0.5)
        """
        last = times[len(times) - len(self.spacing) :]
        found = tuple(size * n for size, n in zip(self.spacing, last, strict=True))
        return replace(self, spacing=found, geo=self.geo and self.geo.coarser(times))


def pixel_grid(path: str | PathLike[str]) -> PixelGrid:
    """What the file of an image says of its grid; some formats say nothing."""
    where = Path(path)
    found = GRIDS.get(chosen(where, None).name)
    return PixelGrid() if found is None else found(where)


def nifti_grid(path: Path) -> PixelGrid:
    """The affine of a NIfTI."""
    nibabel: Any = package("nibabel", "nifti")
    rows: Any = nibabel.load(path).affine
    return PixelGrid(affine=tuple(tuple(float(value) for value in row) for row in rows))


def tiff_grid(path: Path) -> PixelGrid:
    """The resolution of a TIFF, and its georeference."""
    with quiet(), tifffile.TiffFile(path) as file:
        return PixelGrid(tiff_spacing(file), geo=tiff_georeference(file))


def tiff_spacing(file: tifffile.TiffFile) -> tuple[float, ...]:
    """Height and width of a TIFF's pixels in micrometers; nothing where it does not say them in a unit of length."""
    tags: Any = file.pages.first.tags
    found = [tags.get(name) for name in ("YResolution", "XResolution", "ResolutionUnit")]
    if None in found:
        return ()
    (up, across), unit = (tag.value for tag in found[:2]), MICROMETERS.get(getattr(found[2].value, "name", ""))
    if unit is None or not (up[0] and up[1] and across[0] and across[1]):
        return ()
    return unit * up[1] / up[0], unit * across[1] / across[0]


def slide_grid(path: Path) -> PixelGrid:
    """The size of a slide's pixels, where its scanner says it."""
    with package("openslide", "slides").OpenSlide(path) as slide:
        sizes = [slide.properties.get(f"openslide.mpp-{axis}") for axis in "yx"]
    return PixelGrid(tuple(float(size) for size in sizes) if all(sizes) else ())


def zarr_grid(path: Path) -> PixelGrid:
    """The size of an OME-Zarr's pixels, where it is given in a unit of length."""
    group = node(path)
    first = next(iter(multiscales(group)), None) if group is not None else None
    if first is None or not isinstance(axes := first.get("axes"), list):
        return PixelGrid()
    changes = first["datasets"][0].get("coordinateTransformations", [])
    sizes = next((change["scale"] for change in changes if change.get("type") == "scale"), [])
    lengths = [
        size * MICROMETERS_PER[axis["unit"]]
        for axis, size in zip(axes, sizes, strict=False)
        if isinstance(axis, dict) and axis.get("type") == "space" and axis.get("unit") in MICROMETERS_PER
    ]
    return PixelGrid(tuple(lengths) if len(lengths) > 1 else ())


GRIDS = {
    "openslide": slide_grid,
    "zarr": zarr_grid,
    "nifti": nifti_grid,
    "tiff": tiff_grid,
    "rasterio": lambda path: PixelGrid(geo=raster_georeference(path)),
}
"""What reads the grid of an image, by its format."""
