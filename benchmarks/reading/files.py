"""The files that are read: one image in every format, with tiles of 512² where the format has tiles."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import nibabel
import numpy as np
import tifffile
import zarr
from PIL import Image

import mural.data

TILE = 512


def image(size: int) -> np.ndarray:
    """An RGB image (3, size, size) that compresses about as a stained slide does: soft shapes and some noise."""
    random = np.random.default_rng(0)
    rows, columns = np.ogrid[:size, :size]
    planes: list[np.ndarray] = []
    for channel in range(3):
        shapes = np.zeros((size, size), np.float32)
        for wave in (701, 173, 41):
            shapes += np.sin(rows / wave + channel) * np.cos(columns / (wave * 1.3) - channel)
        noise = random.integers(-6, 7, (size, size), dtype=np.int8)
        planes.append(np.clip(190 + 18 * shapes + noise, 0, 255).astype(np.uint8))
    return np.stack(planes)


def tiff(compression: str | None, tiled: bool) -> Callable[[Path, np.ndarray], None]:
    """A writer of TIFF."""

    def write(path: Path, pixels: np.ndarray) -> None:
        last = np.ascontiguousarray(np.moveaxis(pixels, 0, -1))
        tile = (TILE, TILE) if tiled else None
        tifffile.imwrite(path, last, photometric="rgb", tile=tile, compression=compression, metadata=None)

    return write


def plain_zarr(version: int) -> Callable[[Path, np.ndarray], None]:
    """A writer of Zarr without shards, by zarr-python."""

    def write(path: Path, pixels: np.ndarray) -> None:
        chunks = (3, TILE, TILE)
        array = zarr.create_array(path, shape=pixels.shape, chunks=chunks, dtype=pixels.dtype, zarr_format=version)
        array[...] = pixels

    return write


def sharded(path: Path, pixels: np.ndarray) -> None:
    """Sharded OME-Zarr, as `mural convert` writes it."""
    source = path.with_name(f"{path.name}.npy")
    np.save(source, pixels)
    mural.data.convert(mural.data.open(source, axes="CHW"), path, chunks=(3, TILE, TILE))
    source.unlink()


def nifti(path: Path, pixels: np.ndarray) -> None:
    """NIfTI: dims (height, width, 1, channels)."""
    dims = np.moveaxis(pixels, 0, -1)[:, :, None]
    nibabel.save(nibabel.Nifti1Image(dims, np.eye(4), dtype=pixels.dtype), path)


def picture(path: Path, pixels: np.ndarray) -> None:
    """A picture by Pillow."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        Image.fromarray(np.ascontiguousarray(np.moveaxis(pixels, 0, -1))).save(path)


FILES: dict[str, tuple[str, Callable[[Path, np.ndarray], None]]] = {
    "TIFF, tiles, deflate": ("deflate.tif", tiff("deflate", tiled=True)),
    "TIFF, tiles, JPEG": ("jpeg.tif", tiff("jpeg", tiled=True)),
    "TIFF, strips, none": ("strips.tif", tiff(None, tiled=False)),
    "Zarr v2": ("two.zarr", plain_zarr(2)),
    "Zarr v3": ("three.zarr", plain_zarr(3)),
    "OME-Zarr, shards": ("shards.ome.zarr", sharded),
    "NIfTI": ("volume.nii", nifti),
    "NIfTI, gzip": ("volume.nii.gz", nifti),
    "NumPy": ("array.npy", lambda path, pixels: np.save(path, pixels)),
    "PNG": ("picture.png", picture),
    "JPEG": ("picture.jpg", picture),
}
