"""Ways to read a window: mural's, what other libraries offer on the same file, and a cut out of the whole file."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import openslide
import rasterio
import rasterio.errors
import tifffile
import zarr
from PIL import Image

import mural.data

Window = tuple[tuple[int, int], tuple[int, int]]
Read = Callable[[Window], np.ndarray]
"""Rows and columns in; pixels (3, rows, columns) out."""


def ours(path: Path, **options: Any) -> tuple[Read, mural.data.Source]:
    """Windows by mural, and the source that counts them."""
    source = mural.data.open(path, whole=True, **options)
    deep = len(source.shape) == 4

    def read(window: Window) -> np.ndarray:
        if deep:  # NIfTI: (channels, rows, columns, 1)
            return source.read([(0, 3), *window, (0, 1)]).numpy()[..., 0]
        return source.read([(0, 3), *window]).numpy()

    return read, source


def by_tifffile(path: Path, stack: ExitStack) -> Read:
    """Windows by tifffile, through the Zarr store that it offers."""
    store = stack.enter_context(tifffile.TiffFile(path)).pages[0].aszarr()
    stack.callback(store.close)
    array: Any = zarr.open(store, mode="r")
    return lambda window: np.moveaxis(array[slice(*window[0]), slice(*window[1])], -1, 0)


def by_rasterio(path: Path, stack: ExitStack) -> Read:
    """Windows by rasterio; its cache of tiles is kept smaller than the image, as no window comes twice."""
    stack.enter_context(rasterio.Env(GDAL_CACHEMAX=16))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
        dataset = stack.enter_context(rasterio.open(path))
    return lambda window: dataset.read(window=window)


def by_openslide(path: Path, stack: ExitStack) -> Read:
    """Regions by openslide."""
    slide = stack.enter_context(openslide.OpenSlide(path))

    def read(window: Window) -> np.ndarray:
        (top, bottom), (left, right) = window
        region = np.asarray(slide.read_region((left, top), 0, (right - left, bottom - top)))
        return np.moveaxis(region[..., :3], -1, 0)

    return read


def by_zarr(path: Path, stack: ExitStack) -> Read:
    """Windows by zarr-python."""
    group: Any = zarr.open(path, mode="r")
    array: Any = group if isinstance(group, zarr.Array) else group["0"]
    return lambda window: array[:, slice(*window[0]), slice(*window[1])]


def by_nibabel(path: Path, stack: ExitStack) -> Read:
    """Windows by nibabel."""
    image: Any = nibabel.load(path)
    return lambda window: np.moveaxis(np.asarray(image.dataobj[slice(*window[0]), slice(*window[1]), 0]), -1, 0)


OTHERS: dict[str, dict[str, Callable[[Path, ExitStack], Read]]] = {
    "strips.tif": {"tifffile": by_tifffile, "rasterio": by_rasterio},
    ".tif": {"tifffile": by_tifffile, "rasterio": by_rasterio, "openslide": by_openslide},
    ".zarr": {"zarr-python": by_zarr},
    ".nii": {"nibabel": by_nibabel},
}


def others(path: Path) -> dict[str, Callable[[Path, ExitStack], Read]]:
    """The other libraries that read windows of a file."""
    return next((readers for end, readers in OTHERS.items() if path.name.endswith(end)), {})


def decoded(path: Path) -> np.ndarray:
    """All pixels of a file, by the library that most people would use for it, channels first."""
    name = path.name
    if name.endswith(".tif"):
        return np.moveaxis(tifffile.imread(path), -1, 0)
    if name.endswith(".zarr"):
        return by_zarr(path, ExitStack())(((0, None), (0, None)))  # type: ignore[arg-type]
    if name.endswith((".nii", ".nii.gz")):
        return np.moveaxis(np.array(nibabel.load(path).dataobj)[:, :, 0], -1, 0)  # type: ignore[attr-defined]
    if name.endswith(".npy"):
        return np.load(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        return np.moveaxis(np.asarray(Image.open(path)), -1, 0)


def cut(path: Path) -> Read:
    """The whole file, and the window out of it."""
    return lambda window: np.ascontiguousarray(decoded(path)[:, slice(*window[0]), slice(*window[1])])
