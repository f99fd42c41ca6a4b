"""GeoTIFF and other rasters through rasterio: bands are channels, overviews are levels."""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mural.data.axes import resolved
from mural.data.blocks import count
from mural.data.dtypes import Array
from mural.data.extras import package
from mural.data.source import Counter
from mural.data.stored import Held, Options
from mural.errors import DataError
from mural.geometry import Box


class Datasets:
    """rasterio's datasets of one file: one for each thread and level, since none may be shared by threads."""

    def __init__(self, path: Path) -> None:
        self.path, self._lock = path, threading.Lock()
        self._open: dict[tuple[int, int | None], Any] = {}

    def get(self, overview: int | None) -> Any:
        """This thread's dataset of the full image, or of an overview."""
        key = (threading.get_ident(), overview)
        with self._lock:
            if key not in self._open:
                self._open[key] = self._opened(overview)
            return self._open[key]

    def _opened(self, overview: int | None) -> Any:
        rasterio = package("rasterio", "geo")
        chosen = {} if overview is None else {"overview_level": overview}
        with warnings.catch_warnings():
            # A picture without a place on Earth is a picture all the same.
            warnings.simplefilter("ignore", package("rasterio.errors", "geo").NotGeoreferencedWarning)
            return rasterio.open(self.path, **chosen)

    def close(self) -> None:
        """Close all datasets; no thread may be reading."""
        with self._lock:
            for dataset in self._open.values():
                dataset.close()
            self._open.clear()


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
        out[...] = self.datasets.get(self.overview).read(indexes, window=(tuple(rows), tuple(columns)))
        tiles = count(box, self.chunks)
        counter.add(tiles=tiles, bytes_=tiles * prod(self.chunks) * self.dtype.itemsize)


def level_of(datasets: Datasets, overview: int | None) -> Bands:
    """The full image, or one of its overviews."""
    dataset = datasets.get(overview)
    kinds = {np.dtype(name) for name in dataset.dtypes}
    if len(kinds) != 1:
        raise DataError(f"{datasets.path}: its bands have several types {sorted(map(str, kinds))}", str(datasets.path))
    height, width = dataset.block_shapes[0]
    together = dataset.count if str(dataset.profile.get("interleave", "")).lower() == "pixel" else 1
    shape = (int(dataset.count), int(dataset.height), int(dataset.width))
    return Bands(datasets, overview, shape, (together, int(height), int(width)), kinds.pop())


def open_raster(path: Path, options: Options) -> Held:
    """A raster that GDAL reads."""
    datasets = Datasets(path)
    full = level_of(datasets, None)
    overviews = len(datasets.get(None).overviews(1))
    levels = [full, *(level_of(datasets, number) for number in range(overviews))]
    return Held(levels, resolved(str(path), "CYX", full.shape, options.axes), datasets.close)
