"""Converting an image to one that is read in windows: sharded OME-Zarr, or tiled BigTIFF, with a pyramid of levels."""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mural.data.formats.dtypes import Array, to_array
from mural.data.formats.nifti import is_gzip
from mural.data.open import open as open_source
from mural.data.source import Source
from mural.data.threads import each
from mural.data.writing.downsample import halve, pyramid, scales
from mural.data.writing.output import Output, kind_of, unwritable
from mural.data.writing.tiff_write import pages_of, write_tiff
from mural.data.writing.zarr_write import check_dtype, check_shape, chunks_of, create_array, shard_of, write_group
from mural.errors import DataError
from mural.geometry import Box, Interval, overlap, slices
from mural.geometry.tile_grid import grid, tile_at

Progress = Callable[[int, int], None]
"""Called with the bytes that are done and the bytes in total, whenever a part is complete."""


class Done:
    """The bytes that are done, reported to a callback."""

    def __init__(self, progress: Progress | None) -> None:
        self.progress, self.bytes, self.total = progress, 0, 0

    def __call__(self, count: int) -> None:
        self.bytes += count
        if self.progress is not None:
            self.progress(self.bytes, self.total)


@dataclass(frozen=True)
class Wanted:
    """What the caller said of the result."""

    chunks: Sequence[int] | None
    shard: Sequence[int] | None
    levels: int | None
    labels: bool
    workers: int | None

    @property
    def threads(self) -> int:
        """How many shards are under way at once."""
        return max(1, self.workers if self.workers is not None else min(4, os.cpu_count() or 1))


@dataclass(frozen=True)
class Levels:
    """The levels that are written, the full one first, each with its chunk and shard."""

    shapes: tuple[tuple[int, ...], ...]
    chunks: tuple[tuple[int, ...], ...]
    shards: tuple[tuple[int, ...], ...]
    dtype: np.dtype[Any]
    method: str
    dims: int
    """How many of the last dims are halved from level to level."""

    @property
    def bytes(self) -> int:
        """The uncompressed bytes of all levels."""
        return sum(prod(shape) for shape in self.shapes) * self.dtype.itemsize

    def boxes(self, level: int) -> list[Box]:
        """The shards of a level, as boxes within it."""
        shape, shard = self.shapes[level], self.shards[level]
        indices = product(*(range(n) for n in grid(shape, shard)))
        return [tile_at(index, shard, shape) for index in indices]


def convert(
    source: Source | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    chunks: Sequence[int] | None = None,
    shard: Sequence[int] | None = None,
    levels: int | None = None,
    labels: bool = False,
    workers: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """The path of a new image with the pixels of `source`: OME-Zarr 0.5 where `out` ends in .zarr, BigTIFF for .tif.

    Level 0 is exact. Each further level has half the resolution: the mean of 2 × 2 pixels (2 × 2 × 2 of a volume, but
    2 × 2 in a TIFF), or the nearest one with `labels=True` and for bool. Without `levels`, they end where one is a
    single chunk. `chunks` and `shard` have one extent per dim, channels first; a shard is one file of whole chunks.
    `workers` shards are under way at once, and nothing else takes memory that grows with the image. A TIFF of 64-bit
    integers or float16 has one level. The result takes its name when it is complete.
    """
    path = Path(out).expanduser()
    kind = kind_of(path)
    if kind == "nifti":
        raise DataError(
            f"{path}: an image is converted to OME-Zarr or TIFF: end the name in .ome.zarr or .tif", str(path)
        )
    output = Output(path, overwrite)
    done = Done(progress)
    try:
        output.begin()
        with reading(source, path.parent) as image:
            (to_zarr if kind == "zarr" else to_tiff)(
                image, output, Wanted(chunks, shard, levels, labels, workers), done
            )
        output.finish()
    except DataError:
        raise
    except (OSError, ValueError) as error:  # tensorstore raises ValueError for whatever the system refuses
        raise unwritable(path, error) from error
    finally:
        output.abandon()
    return path


@contextlib.contextmanager
def reading(source: Source | str | os.PathLike[str], folder: Path) -> Generator[Source]:
    """A source for the length of a block; a compressed NIfTI is unpacked next to the output, as it has no windows."""
    if isinstance(source, Source):
        yield source
        return
    path = Path(source).expanduser()
    if path.name.lower().endswith(".nii.gz") and path.is_file() and is_gzip(path):
        with tempfile.TemporaryDirectory(prefix=".unpacked-", suffix=".partial", dir=folder) as place:
            plain = Path(place) / path.name[: -len(".gz")]
            try:
                with gzip.open(path, "rb") as packed, plain.open("wb") as unpacked:
                    shutil.copyfileobj(packed, unpacked, 2**20)
            except (EOFError, gzip.BadGzipFile) as error:
                raise DataError(f"{path}: it cannot be unpacked: {error}. Copy or write it again", str(path)) from error
            try:
                opened = open_source(plain)
            except DataError as error:
                text = str(error).replace(str(plain), str(path))
                raise DataError(text, str(path)) from error.__cause__
            with opened:
                yield opened
        return
    with open_source(path, whole=True) as opened:
        yield opened


def levels_of(name: str, image: Source, wanted: Wanted, dims: int) -> Levels:
    """The levels that are to be written of an image, each half of the one before along its last dims."""
    if wanted.levels is not None and wanted.levels < 1:
        raise DataError(f"{name}: levels={wanted.levels}: there is at least one, the full resolution", name)
    shape, dtype, shard = check_shape(name, image.shape), check_dtype(name, image.dtype), wanted.shard
    first = chunks_of(name, shape, wanted.chunks)
    shapes = pyramid(shape, first, wanted.levels, dims)
    chunks = tuple(chunks_of(name, s, first) for s in shapes)
    shards = tuple(
        shard_of(name, s, c, dtype.itemsize, shard if level == 0 else fitted(shard, c))
        for level, (s, c) in enumerate(zip(shapes, chunks, strict=True))
    )
    method = "nearest" if wanted.labels or dtype == np.bool_ else "mean"
    return Levels(shapes, chunks, shards, dtype, method, dims)


def fitted(shard: Sequence[int] | None, chunks: Sequence[int]) -> tuple[int, ...] | None:
    """A shard of whole chunks, about as large as that one."""
    return None if shard is None else tuple(max(1, s // c) * c for s, c in zip(shard, chunks, strict=True))


def to_zarr(image: Source, output: Output, wanted: Wanted, done: Done) -> None:
    """Write an OME-Zarr."""
    levels = levels_of(str(output.path), image, wanted, len(image.shape) - 1)
    done.total = levels.bytes
    write_zarr(image, output.partial, output.path.name, levels, wanted.threads, done)


def write_zarr(image: Source, folder: Path, name: str, levels: Levels, workers: int, done: Done) -> None:
    """Write all levels into a folder, and last the metadata that make it an image."""
    arrays = [
        create_array(folder / str(level), shape, levels.dtype, levels.chunks[level], levels.shards[level])
        for level, shape in enumerate(levels.shapes)
    ]
    with ThreadPoolExecutor(workers, thread_name_prefix="mural-convert") as executor:
        for level, array in enumerate(arrays):
            finer = arrays[level - 1] if level else None

            def part(box: Box, level: int = level, array: Any = array, finer: Any = finer) -> int:
                pixels = to_array(image.read(box)) if finer is None else coarser(finer, box, levels, level)
                array[slices(box)].write(pixels).result()
                return pixels.nbytes

            each(part, levels.boxes(level), executor, done)
    write_group(folder, name, levels.shapes[0], scales(levels.shapes, levels.dims), levels.method)


def coarser(finer: Any, box: Box, levels: Levels, level: int) -> Array:
    """A box of a level, from the level before: chunk by chunk, so that little of that is in memory at a time."""
    above, chunks = levels.shapes[level - 1], levels.chunks[level]
    out = np.empty([interval.size for interval in box], levels.dtype)
    counts = grid([interval.size for interval in box], chunks)
    for index in product(*(range(n) for n in counts)):
        local = tile_at(index, chunks)
        part = overlap(tuple(i.shift(b.start) for i, b in zip(local, box, strict=True)), box)
        doubled = (Interval(2 * i.start, min(2 * i.stop, n)) for i, n in zip(part, above, strict=True))
        fine = (*part[: -levels.dims], *tuple(doubled)[-levels.dims :])
        out[slices(part, box)] = halve(finer[slices(fine)].read().result(), levels.method, levels.dims)
    return out


def to_tiff(image: Source, output: Output, wanted: Wanted, done: Done) -> None:
    """Write a TIFF; its levels come from a temporary Zarr next to it, as a TIFF is written in one go."""
    name, dtype = str(output.path), check_dtype(str(output.path), image.dtype)
    pages = pages_of(name, check_shape(name, image.shape), dtype, wanted.chunks)
    unit, count = pages.unit, wanted.levels if pages.ome else 1
    # The levels of a page are pages of its own, so depth stays as it is.
    levels = levels_of(name, image, Wanted(unit, None, count, wanted.labels, wanted.workers), 2)
    if len(levels.shapes) == 1:
        done.total = levels.bytes
        write_tiff(output.path, output.partial, image, 1, unit, done)
        return
    done.total = 2 * levels.bytes
    with tempfile.TemporaryDirectory(prefix=".levels-", suffix=".partial", dir=output.path.parent) as place:
        folder = Path(place) / "levels.zarr"
        write_zarr(image, folder, output.path.name, levels, wanted.threads, done)
        with open_source(folder) as staged:
            write_tiff(output.path, output.partial, staged, len(levels.shapes), unit, done)
