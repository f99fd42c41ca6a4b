"""A TIFF under way, without compression: every tile of every level has its place from the start."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import tifffile

from mural.data.formats.dtypes import Array
from mural.data.pixel_grid import MICROMETERS, PixelGrid
from mural.data.writing.cloud_optimized import optimize
from mural.data.writing.downsample import pyramid
from mural.data.writing.tiff_write import Pages, pages_of
from mural.errors import DataError
from mural.geometry import Box, overlap, slices
from mural.geometry.tile_grid import grid, tile_at, touched


class TiffLevel:
    """The pages of one level: tiles at known places of a file that is open."""

    def __init__(self, name: str, pages: Pages) -> None:
        self.name, self.pages, self.shape, self.unit = name, pages, pages.shape, pages.unit
        self.counts = grid(self.shape, self.unit)
        self.offsets: list[int] = []
        self.file: int | None = None

    def _place(self, index: tuple[int, ...]) -> tuple[int, int]:
        """The file, and where in it a tile begins: pages in C order of channels and depth, tiles of a page in rows."""
        if self.file is None:
            raise DataError(f"{self.name}: it was closed: write before close()", self.name)
        return self.file, self.offsets[int(np.ravel_multi_index(index, self.counts))]

    def put(self, box: Box, pixels: Array) -> None:
        """Write whole tiles."""
        for index in touched(box, self.unit):
            part = overlap(tile_at(index, self.unit), box)
            tile = self.pages.tile_of(pixels[slices(part, box)])
            file, offset = self._place(index)
            data = memoryview(tile.tobytes())
            while data:
                written = os.pwrite(file, data, offset)
                data, offset = data[written:], offset + written

    def get(self, box: Box) -> Array:
        """The pixels of a box."""
        out = np.empty([interval.size for interval in box], self.pages.dtype)
        for index in touched(box, self.unit):
            tile = tile_at(index, self.unit)
            part = overlap(tile, box)
            out[slices(part, box)] = self._tile(index)[slices(part, tile)]
        return out

    def _tile(self, index: tuple[int, ...]) -> Array:
        """The pixels of a tile, channels first."""
        file, offset = self._place(index)
        found = np.frombuffer(os.pread(file, prod(self.unit) * self.pages.dtype.itemsize, offset), self.pages.dtype)
        return np.moveaxis(found.reshape(*self.pages.tile, -1), -1, 0).reshape(self.unit)


class TiffStore:
    """A BigTIFF, to which processes write disjoint tiles, each at its offset, at the start of a page of memory.

    Coarser levels are SubIFDs of each page. In a map they are further pages, which is where GDAL looks for them.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        chunks: Sequence[int] | None,
        known: PixelGrid,
        levels: int | None = 1,
        method: str = "mean",
    ) -> None:
        self.name, self.path, self.known, self.method, self.halved = name, path, known, method, 2
        kind = known.geo is not None, method == "nearest"
        first = pages_of(name, shape, dtype, chunks, *kind)
        # Without OME's metadata, nothing says which pages are levels of which.
        count = levels if first.ome or first.bands else 1
        shapes = pyramid(shape, first.unit, count, self.halved)
        self.pages = [pages_of(name, extents, dtype, chunks, *kind) for extents in shapes]
        self.levels: Sequence[TiffLevel] = [TiffLevel(name, pages) for pages in self.pages]

    def make(self) -> None:
        """Make the file: directories, and holes where the tiles will be."""
        tags = () if self.known.geo is None else tuple(self.known.geo.tags())
        first, *coarser = self.pages
        below = 0 if first.bands else len(coarser)
        with tifffile.TiffWriter(self.path, bigtiff=True, ome=first.ome) as file:
            options = first.options | resolution(self.known.spacing)
            file.write(None, align=ALIGN, extratags=tags, subifds=below, **options)
            for pages in coarser:
                file.write(None, align=ALIGN, subfiletype=1, **pages.options)

    def open(self) -> None:
        """Open the file, and look up where its tiles are."""
        with tifffile.TiffFile(self.path) as file:
            for number, level in enumerate(self.levels):
                level.offsets = [int(offset) for page in self._pages(file, number) for offset in page.dataoffsets]
        descriptor = os.open(self.path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
        for level in self.levels:
            level.file = descriptor
            if len(level.offsets) != prod(level.counts):
                self.close()
                raise DataError(
                    f"{self.name}: the file under way has {len(level.offsets)} tiles, which are too few", self.name
                )

    def _pages(self, file: tifffile.TiffFile, level: int) -> Sequence[Any]:
        """The pages of a level."""
        if self.pages[0].bands:
            return [file.pages[level]]
        pages: list[Any] = list(file.pages)
        return pages if level == 0 else [page.pages[level - 1] for page in pages]

    def close(self) -> None:
        """Close the file."""
        descriptor = self.levels[0].file
        for level in self.levels:
            level.file = None
        if descriptor is not None:
            os.close(descriptor)

    def seal(self) -> None:
        """Bring it into the layout of its image; the directories are there from the start."""
        if self.known.geo is not None and self.known.geo.optimized and self.pages[0].bands:
            optimize(self.name, self.path, len(self.levels) > 1)


ALIGN = 4096
"""Tiles begin at multiples of this."""


def resolution(spacing: tuple[float, ...]) -> dict[str, Any]:
    """The arguments of tifffile for pixels of (…, height, width) micrometers.

    >>> resolution((0.25, 0.5))
    {'resolution': (20000.0, 40000.0), 'resolutionunit': 'CENTIMETER'}
    """
    if not spacing:
        return {}
    height, width = spacing[-2:]
    unit = "CENTIMETER"
    return {"resolution": (MICROMETERS[unit] / width, MICROMETERS[unit] / height), "resolutionunit": unit}
