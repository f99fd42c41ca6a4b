"""A NIfTI file under way, without compression: a header, and pixels that every process writes at their places."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mural.data.formats.dtypes import Array
from mural.errors import DataError, package
from mural.geometry import Box, slices

OFFSET = 352
"""Where the pixels begin: after the header and the four bytes that say that nothing else comes before."""
UNIT = 64


class NiftiStore:
    """A .nii file of a volume: (D, H, W) in nibabel's order of dims, and several channels after them.

    It has one level, itself: the format knows no others.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        affine: tuple[tuple[float, ...], ...],
    ) -> None:
        if len(shape) != 4 or dtype.kind in "bc" or dtype.name == "float16":
            raise DataError(
                f"{name}: a NIfTI holds volumes (C, D, H, W) of whole or floating numbers, not {shape} of {dtype}: "
                f"write TIFF or OME-Zarr",
                name,
            )
        self.name, self.path, self.shape, self.dtype, self.affine = name, path, shape, dtype, affine
        self.unit = (1, *(min(UNIT, extent) for extent in shape[1:]))
        self.levels, self.method, self.halved = (self,), "nearest", 3
        self._pixels: Any = None

    def make(self) -> None:
        """Make the file: its header, and a hole where the pixels will be."""
        nibabel: Any = package("nibabel", "nifti")
        header: Any = nibabel.Nifti1Header()
        header.set_data_dtype(self.dtype)
        header.set_data_shape(self.shape[1:] if self.shape[0] == 1 else (*self.shape[1:], self.shape[0]))
        header["vox_offset"] = OFFSET
        header["magic"] = b"n+1"
        if self.affine:
            affine = np.array(self.affine)
            header.set_qform(affine, code="scanner", strip_shears=True)
            header.set_sform(affine, code="scanner")
        with self.path.open("wb") as file:
            header.write_to(file)
            file.truncate(OFFSET + prod(self.shape) * self.dtype.itemsize)

    def open(self) -> None:
        """Map the pixels: the first dim is the fastest in the file, channels are the slowest."""
        order = (*self.shape[1:], self.shape[0])
        pixels = np.memmap(self.path, self.dtype, "r+", OFFSET, order, "F")
        self._pixels = np.moveaxis(pixels, -1, 0)

    def put(self, box: Box, pixels: Array) -> None:
        """Write a box."""
        self._mapped[slices(box)] = pixels

    def get(self, box: Box) -> Array:
        """The pixels of a box."""
        return np.array(self._mapped[slices(box)])

    @property
    def _mapped(self) -> Any:
        if self._pixels is None:
            raise DataError(f"{self.name}: it was closed: write before close()", self.name)
        return self._pixels

    def close(self) -> None:
        """Release the file."""
        self._pixels = None

    def seal(self) -> None:
        """Do nothing: the header is there from the start."""
