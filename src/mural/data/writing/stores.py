"""Where pieces are written: an image with its levels, each in units of which one process writes one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mural.data.formats.dtypes import Array
from mural.data.formats.zarr import ts
from mural.data.writing.downsample import pyramid, scales
from mural.data.writing.zarr_write import chunks_of, create_array, shard_of, spec, write_group
from mural.geometry import Box, overlap, slices
from mural.geometry.tile_grid import tile_at, touched


class StoredLevel(Protocol):
    """One resolution of an image under way.

    `unit` is what one write replaces as a whole: a chunk's or shard's file, or a tile's bytes.
    """

    shape: tuple[int, ...]
    unit: tuple[int, ...]

    def put(self, box: Box, pixels: Array) -> None:
        """Write whole units; at the image's end they may be cut off."""
        ...

    def get(self, box: Box) -> Array:
        """The pixels of a box that was written before."""
        ...


class Store(Protocol):
    """An image under way, on a path that is not yet its own."""

    @property
    def levels(self) -> Sequence[StoredLevel]:
        """Its resolutions, the full one first; each further one has half of the one before."""
        ...

    method: str
    """How a coarser level comes from a finer one: see `mural.data.writing.downsample`."""
    halved: int
    """How many of the last dims are halved from level to level."""

    def make(self) -> None:
        """Make it, with zeros for pixels; one process does."""
        ...

    def open(self) -> None:
        """Open what was made; every process does."""
        ...

    def close(self) -> None:
        """Release it; it may be opened again."""
        ...

    def seal(self) -> None:
        """Make it an image that can be read; one process does, after all pixels are written."""
        ...


class ZarrLevel:
    """One array of an OME-Zarr; its unit is a shard, or a chunk where there are no shards."""

    def __init__(
        self, path: Path, shape: tuple[int, ...], chunks: tuple[int, ...], shard: tuple[int, ...] | None
    ) -> None:
        self.path, self.shape, self.chunks, self.shard = path, shape, chunks, shard
        self.unit = shard or chunks
        self.array: Any = None

    def put(self, box: Box, pixels: Array) -> None:
        """Write whole chunks, all at once; an error is raised when none of them is under way any more."""
        under_way: list[Any] = []
        for index in touched(box, self.unit):
            part = overlap(tile_at(index, self.unit), box)
            place = self.array[slices(part)]
            under_way.append(place.write(pixels[slices(part, box)]).commit)
        errors = [error for future in under_way if (error := future.exception()) is not None]
        if errors:
            raise errors[0]

    def get(self, box: Box) -> Array:
        """The pixels of a box."""
        return np.array(self.array[slices(box)].read().result())


class ZarrStore:
    """An OME-Zarr folder."""

    def __init__(
        self,
        name: str,
        folder: Path,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        chunks: Sequence[int] | None,
        shard: Sequence[int] | None,
        spacing: tuple[float, ...] = (),
        levels: int | None = 1,
        method: str = "mean",
    ) -> None:
        self.name, self.folder, self.dtype, self.spacing, self.method = name, folder, dtype, spacing, method
        self.halved = len(shape) - 1
        first = chunks_of(name, shape, chunks)
        whole = None if shard is None else shard_of(name, shape, first, dtype.itemsize, shard)
        shapes = pyramid(shape, first, levels, self.halved)
        coarser = [ZarrLevel(folder / str(n + 1), s, chunks_of(name, s, first), None) for n, s in enumerate(shapes[1:])]
        self.levels: Sequence[ZarrLevel] = (ZarrLevel(folder / "0", shape, first, whole), *coarser)

    def make(self) -> None:
        """Make the folder and its arrays."""
        for level in self.levels:
            create_array(level.path, level.shape, self.dtype, level.chunks, level.shard)

    def open(self) -> None:
        """Open the arrays."""
        for level in self.levels:
            level.array = ts.open(spec(level.path), open=True).result()

    def close(self) -> None:
        """Release the arrays."""
        for level in self.levels:
            level.array = None

    def seal(self) -> None:
        """Write the metadata of the image."""
        sizes = scales([level.shape for level in self.levels], self.halved)
        write_group(self.folder, Path(self.name).name, self.levels[0].shape, sizes, self.method, self.spacing)
