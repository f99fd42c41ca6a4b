"""Where pieces are written: a Zarr array or a TIFF file, each in units of which one process writes one at a time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tifffile

from mural.data.formats.dtypes import Array
from mural.data.formats.zarr import ts
from mural.data.pixel_grid import MICROMETERS, PixelGrid
from mural.data.writing.tiff_write import Pages, pages_of
from mural.data.writing.zarr_write import chunks_of, create_array, shard_of, spec, write_group
from mural.errors import DataError
from mural.geometry import Box, overlap, slices, whole
from mural.geometry.tile_grid import grid, tile_at, touched


class Store(Protocol):
    """An image under way, on a path that is not yet its own.

    `unit` is what one write replaces as a whole: a chunk's or shard's file, or a tile's bytes.
    """

    unit: tuple[int, ...]

    def make(self) -> None:
        """Make it, with zeros for pixels; one process does."""
        ...

    def open(self) -> None:
        """Open what was made; every process does."""
        ...

    def put(self, box: Box, pixels: Array) -> None:
        """Write whole units; at the image's end they may be cut off."""
        ...

    def get(self, box: Box) -> Array:
        """The pixels of a unit that was written before."""
        ...

    def close(self) -> None:
        """Release it."""
        ...

    def seal(self) -> None:
        """Make it an image that can be read; one process does, after all pixels are written."""
        ...


class ZarrStore:
    """An OME-Zarr folder with one level; its unit is a shard, or a chunk where there are no shards."""

    def __init__(
        self,
        name: str,
        folder: Path,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        chunks: Sequence[int] | None,
        shard: Sequence[int] | None,
        spacing: tuple[float, ...] = (),
    ) -> None:
        self.name, self.folder, self.shape, self.dtype, self.spacing = name, folder, shape, dtype, spacing
        self.chunks = chunks_of(name, shape, chunks)
        self.shard = None if shard is None else shard_of(name, shape, self.chunks, dtype.itemsize, shard)
        self.unit = self.shard or self.chunks
        self._array: Any = None

    def make(self) -> None:
        """Make the folder and its array."""
        create_array(self.folder / "0", self.shape, self.dtype, self.chunks, self.shard)

    def open(self) -> None:
        """Open the array."""
        self._array = ts.open(spec(self.folder / "0"), open=True).result()

    def put(self, box: Box, pixels: Array) -> None:
        """Write whole chunks, all at once; an error is raised when none of them is under way any more."""
        under_way: list[Any] = []
        for index in touched(box, self.unit):
            part = overlap(tile_at(index, self.unit), box)
            place = self._array[slices(part)]
            under_way.append(place.write(pixels[slices(part, box)]).commit)
        errors = [error for future in under_way if (error := future.exception()) is not None]
        if errors:
            raise errors[0]

    def get(self, box: Box) -> Array:
        """The pixels of a unit."""
        return np.array(self._array[slices(box)].read().result())

    def close(self) -> None:
        """Release the array."""
        self._array = None

    def seal(self) -> None:
        """Write the metadata of the image."""
        write_group(self.folder, Path(self.name).name, self.shape, [(1.0,) * len(self.shape)], "mean", self.spacing)


class TiffStore:
    """A BigTIFF without compression: every tile has its place from the start, at the start of a page of memory.

    Processes write disjoint tiles into one file, each at its offset.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        chunks: Sequence[int] | None,
        known: PixelGrid,
    ) -> None:
        self.name, self.path, self.shape, self.dtype, self.known = name, path, shape, dtype, known
        self.pages: Pages = pages_of(name, shape, dtype, chunks, known.geo is not None)
        self.unit = self.pages.unit
        self._offsets: list[int] = []
        self._file: int | None = None

    def make(self) -> None:
        """Make the file: directories, and a hole where the tiles will be."""
        with tifffile.TiffWriter(self.path, bigtiff=True, ome=self.pages.ome) as file:
            tags = () if self.known.geo is None else tuple(self.known.geo.tags())
            file.write(None, align=4096, extratags=tags, **(self.pages.options | resolution(self.known.spacing)))

    def open(self) -> None:
        """Open the file, and look up where its tiles are."""
        with tifffile.TiffFile(self.path) as file:
            self._offsets = [int(offset) for page in file.pages for offset in page.dataoffsets]
        if len(self._offsets) != prod(grid(self.shape, self.unit)):
            raise DataError(
                f"{self.name}: the file under way has {len(self._offsets)} tiles, which are too few", self.name
            )
        self._file = os.open(self.path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))

    def _place(self, index: tuple[int, ...]) -> tuple[int, int]:
        """The file, and where in it a tile begins: pages in C order of channels and depth, tiles of a page in rows."""
        if self._file is None:
            raise DataError(f"{self.name}: it was closed: write before close()", self.name)
        return self._file, self._offsets[int(np.ravel_multi_index(index, grid(self.shape, self.unit)))]

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
        """The pixels of one tile."""
        (index,) = touched(box, self.unit)
        file, offset = self._place(index)
        size = prod(self.unit) * self.dtype.itemsize
        tile = np.frombuffer(os.pread(file, size, offset), self.dtype).reshape(*self.pages.tile, -1)
        pixels = np.moveaxis(tile, -1, 0).reshape(self.unit)
        return pixels[slices(overlap(box, whole(self.shape)), box)].copy()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def seal(self) -> None:
        """Do nothing: the directories are there from the start."""


def resolution(spacing: tuple[float, ...]) -> dict[str, Any]:
    """The arguments of tifffile for pixels of (height, width) micrometers.

    >>> resolution((0.25, 0.5))
    {'resolution': (20000.0, 40000.0), 'resolutionunit': 'CENTIMETER'}
    """
    if not spacing:
        return {}
    height, width = spacing
    unit = "CENTIMETER"
    return {"resolution": (MICROMETERS[unit] / width, MICROMETERS[unit] / height), "resolutionunit": unit}
