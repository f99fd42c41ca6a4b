"""NIfTI volumes: headers through nibabel, pixels read in windows; a compressed file has none."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mural.data.formats.axes import resolved
from mural.data.formats.dtypes import Array
from mural.data.formats.stored import OpenedFile, Options, Stored
from mural.data.formats.uncompressed import Handle, Raw, Reversed, check_size
from mural.data.formats.whole import WholeArray
from mural.data.source import Counter
from mural.errors import DataError, package
from mural.geometry import Box

LETTERS = {1: "W", 2: "HW", 3: "DHW", 4: "DHWC", 5: "DHWCC"}


@dataclass(frozen=True)
class Scaled:
    """A stored array whose values are slope · raw + intercept, in the type that nibabel gives them."""

    raw: Stored
    slope: float
    intercept: float

    @property
    def shape(self) -> tuple[int, ...]:
        """The extents in the file's order of dims."""
        return self.raw.shape

    @property
    def chunks(self) -> tuple[int, ...]:
        """What is decoded at a time."""
        return self.raw.chunks

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the scaled values."""
        return self._scaled(np.zeros(1, self.raw.dtype)).dtype

    def _scaled(self, raw: Array) -> Array:
        volumeutils: Any = package("nibabel.volumeutils", "nifti")
        return volumeutils.apply_read_scaling(raw, self.slope, self.intercept)

    def read_into(self, out: Array, box: Box, counter: Counter) -> None:
        """Fill an array with the scaled values of a box."""
        raw = np.empty(out.shape, self.raw.dtype)
        self.raw.read_into(raw, box, counter)
        out[...] = self._scaled(raw)


def open_nifti(path: Path, options: Options) -> OpenedFile:
    """A NIfTI file; dims in nibabel's order are (D, H, W), a fourth is channels."""
    name = str(path)
    compressed = is_gzip(path)
    if compressed and not options.whole:
        raise DataError(
            f"{name}: a compressed NIfTI cannot be read in windows: run `mural convert {name} OUT.ome.zarr` once and "
            "read that, or unpack it to .nii, or pass whole=True to hold all of it in memory",
            name,
        )
    nibabel: Any = package("nibabel", "nifti")
    image = nibabel.load(path)
    header: Any = image.header
    shape, dtype = tuple(int(n) for n in image.shape), header.get_data_dtype()
    if dtype.fields is not None:
        raise DataError(
            f"{name}: pixels of the compound type {dtype} are not read: save the parts as a fourth dim", name
        )
    offset = int(image.dataobj.offset)
    # In the file the first dim is the fastest: C order of the dims reversed.
    stored = compressed_array(path, shape, dtype, offset) if compressed else plain_array(path, shape, dtype, offset)
    slope, intercept = (float(value) for value in (image.dataobj.slope, image.dataobj.inter))
    axes = resolved(name, LETTERS.get(len(shape), "?" * len(shape)), shape, options.axes)
    close = stored.close if isinstance(stored, WholeArray) else stored.handle.close
    level = stored if (slope, intercept) == (1, 0) else Scaled(stored, slope, intercept)
    return OpenedFile((Reversed(level),), axes, close)


def is_gzip(path: Path) -> bool:
    """Whether a file begins as gzip's do."""
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def plain_array(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int) -> Raw:
    """The pixels of a file that is not compressed."""
    check_size(str(path), offset + prod(shape) * dtype.itemsize, path.stat().st_size)
    return Raw(Handle(path), offset, shape[::-1], dtype)


def compressed_array(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int) -> WholeArray:
    """The pixels of a compressed file, all at once."""

    def load() -> Array:
        with gzip.open(path, "rb") as file:
            file.seek(offset)
            data = file.read()  # to the end, where the checksum is
        return np.frombuffer(data, dtype, prod(shape)).reshape(shape[::-1])

    return WholeArray(str(path), shape[::-1], dtype, load, True)
