"""The grid of an image in the world: how large its pixels are, and where they lie, as its file says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import tifffile

from mural.errors import package

MICROMETERS = {"INCH": 25400.0, "CENTIMETER": 10000.0}
"""What a TIFF counts pixels by."""
TIFFS = (".tif", ".tiff", ".btf", ".tf8")


@dataclass(frozen=True)
class PixelGrid:
    """What results are written with, so that they lie on their image.

    `spacing` is (height, width) in micrometers; `affine` a NIfTI's, row by row. What a file does not say is empty.
    """

    spacing: tuple[float, ...] = ()
    affine: tuple[tuple[float, ...], ...] = ()

    def coarser(self, times: tuple[float, ...]) -> PixelGrid:
        """The grid of a level with that many pixels for one, along each spatial dim.

        >>> PixelGrid((0.25, 0.25)).coarser((2.0, 2.0))
        PixelGrid(spacing=(0.5, 0.5), affine=())
        """
        found = tuple(size * n for size, n in zip(self.spacing, times, strict=True)) if self.spacing else ()
        return replace(self, spacing=found)


def pixel_grid(path: str | PathLike[str]) -> PixelGrid:
    """What a TIFF or NIfTI file says of its grid; other files say nothing here."""
    name = Path(path).name.lower()
    if name.endswith((".nii", ".nii.gz")):
        nibabel: Any = package("nibabel", "nifti")
        rows: Any = nibabel.load(path).affine
        return PixelGrid(affine=tuple(tuple(float(value) for value in row) for row in rows))
    return PixelGrid(tiff_spacing(Path(path))) if name.endswith(TIFFS) else PixelGrid()


def tiff_spacing(path: Path) -> tuple[float, ...]:
    """Height and width of a TIFF's pixels in micrometers; nothing where it does not say them in a unit of length."""
    with tifffile.TiffFile(path) as file:
        tags: Any = file.pages.first.tags
        found = [tags.get(name) for name in ("YResolution", "XResolution", "ResolutionUnit")]
    if None in found:
        return ()
    (up, across), unit = (tag.value for tag in found[:2]), MICROMETERS.get(getattr(found[2].value, "name", ""))
    if unit is None or not (up[0] and up[1] and across[0] and across[1]):
        return ()
    return unit * up[1] / up[0], unit * across[1] / across[0]
