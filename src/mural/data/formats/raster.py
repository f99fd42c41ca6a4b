"""GeoTIFF and other rasters through rasterio: bands are channels, overviews are levels."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Generator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mural.data.formats.axes import resolved
from mural.data.formats.dtypes import Array
from mural.data.formats.stored import OpenedFile, Options
from mural.data.source import Counter
from mural.errors import DataError, package
from mural.geometry import Box
from mural.geometry.tile_grid import count


class Datasets:
    """The datasets of one file: no two threads may use one at once, so each borrows one, or opens a new one."""

    def __init__(self, path: Path) -> None:
        self.path, self._lock = path, threading.Lock()
        self._idle: dict[int | None, list[Any]] = {}

    @contextlib.contextmanager
    def borrowed(self, overview: int | None) -> Generator[Any]:
        """A dataset of the full image, or of an overview, for the length of a block."""
        with self._lock:
            idle = self._idle.setdefault(overview, [])
            dataset = idle.pop() if idle else self._opened(overview)
        try:
            yield dataset
        finally:
            with self._lock:
                self._idle.setdefault(overview, []).append(dataset)

    def _opened(self, overview: int | None) -> Any:
        rasterio = package("rasterio", "geo")
        chosen = {} if overview is None else {"overview_level": overview}
        with warnings.catch_warnings():
            # A picture without georeferencing is read all the same.
            warnings.simplefilter("ignore", package("rasterio.errors", "geo").NotGeoreferencedWarning)
            return rasterio.open(self.path, **chosen)

    def close(self) -> None:
        """Close the datasets that nobody uses."""
        with self._lock:
            for dataset in (dataset for idle in self._idle.values() for dataset in idle):
                dataset.close()
            self._idle.clear()


@dataclass(frozen=True)
class Bands:
    """One level of a raster: dims (bands, height, width)."""

    datasets: Datasets
    overview: int | None
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: np.dtype[Any]

    def read_into(self, out: Array, box: Box, counter: Counter) -> None:
        """Fill an array with the pixels of a box."""
        bands, rows, columns = box
        indexes = [band + 1 for band in range(*bands)]
        with self.datasets.borrowed(self.overview) as dataset:
            out[...] = dataset.read(indexes, window=(tuple(rows), tuple(columns)))
        tiles = count(box, self.chunks)
        counter.add(tiles=tiles, bytes_=tiles * prod(self.chunks) * self.dtype.itemsize)


def level_of(datasets: Datasets, overview: int | None) -> Bands:
    """The full image, or one of its overviews."""
    with datasets.borrowed(overview) as dataset:
        kinds = sorted(set(dataset.dtypes))
        height, width = dataset.block_shapes[0]
        together = dataset.count if str(dataset.profile.get("interleave", "")).lower() == "pixel" else 1
        shape = (int(dataset.count), int(dataset.height), int(dataset.width))
    if len(kinds) != 1:
        raise DataError(
            f"{datasets.path}: its bands have several types, {', '.join(kinds)}: write them in one", str(datasets.path)
        )
    return Bands(datasets, overview, shape, (together, int(height), int(width)), np.dtype(kinds[0]))


def open_raster(path: Path, options: Options) -> OpenedFile:
    """A raster that GDAL reads."""
    datasets = Datasets(path)
    full = level_of(datasets, None)
    with datasets.borrowed(None) as dataset:
        overviews = len(dataset.overviews(1))
    levels = [full, *(level_of(datasets, number) for number in range(overviews))]
    return OpenedFile(levels, resolved(str(path), "CYX", full.shape, options.axes), datasets.close)
