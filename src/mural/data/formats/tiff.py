"""TIFF, BigTIFF and OME-TIFF: tifffile reads the directory, and of the pixels only the tiles that a box touches."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import tifffile

from mural.data.formats.axes import Axes, resolved
from mural.data.formats.dtypes import Array
from mural.data.formats.stored import OpenedFile, Options, Stored
from mural.data.formats.tiff_opening import check_directories, check_segments, quiet
from mural.data.formats.uncompressed import Handle, Raw
from mural.data.formats.whole import LIMIT
from mural.data.source import Counter
from mural.data.threads import decoders, each
from mural.errors import DataError
from mural.geometry import Box, overlap, slices
from mural.geometry.tile_grid import Index, grid, tile_at, touched

JPEG = {6, 7, 34892, 33007}
"""Compressions whose tiles need tables from the directory."""


@dataclass(frozen=True)
class Page:
    """Where one page's tiles (or strips) are, and what else decoding them needs."""

    handle: Handle
    offsets: np.ndarray[Any, np.dtype[np.uint64]]
    counts: np.ndarray[Any, np.dtype[np.uint64]]
    extra: dict[str, Any]


@dataclass(frozen=True)
class Tiles:
    """Pages of tiles or strips: dims (pages…, planes, depth, height, width, samples); a tile has the last four."""

    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: np.dtype[Any]
    pages: tuple[Page, ...]
    decode: Any
    fill: Any
    threads: int

    def read_into(self, out: Array, box: Box, counter: Counter) -> None:
        """Fill an array with the pixels of a box, decoding the tiles that it touches in parallel."""
        lead = len(self.shape) - 5
        inner = grid(self.shape[lead:], self.chunks[lead:])

        def paste(index: Index) -> None:
            page = int(np.ravel_multi_index(index[:lead], self.shape[:lead])) if lead else 0
            segment = int(np.ravel_multi_index(index[lead:], inner))
            tile = tile_at(index, self.chunks)
            part = overlap(box, tile)
            out[slices(part, box)] = self._segment(page, segment, counter)[slices(part, tile)[lead + 1 :]]

        tiles = list(touched(box, self.chunks))
        if self.threads > 1 and len(tiles) > 1:
            each(paste, tiles, decoders(self.threads))
        else:
            for tile in tiles:
                paste(tile)

    def _segment(self, page: int, segment: int, counter: Counter) -> Array:
        """A decoded tile or strip; one that the file leaves out is all fill."""
        at = self.pages[page]
        offset, count = int(at.offsets[segment]), int(at.counts[segment])
        if not count:
            return np.full(self.chunks[-4:], self.fill, self.dtype)
        try:
            decoded = self.decode(at.handle.read(offset, count), segment, **at.extra)[0]
        except Exception as error:
            raise ValueError(f"tile {segment} of page {page}, bytes {offset} to {offset + count}: {error}") from error
        counter.add(tiles=1, bytes_=decoded.nbytes)
        return decoded


@dataclass(frozen=True)
class ContiguousPages:
    """Pages that are stored uncompressed, each in one stretch: read without tiles, pixel by pixel."""

    shape: tuple[int, ...]
    pages: tuple[Raw, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the pixels, in native order of bytes."""
        return self.pages[0].dtype

    @property
    def chunks(self) -> tuple[int, ...]:
        """Single pixels with their samples."""
        return (1,) * (len(self.shape) - 5) + self.pages[0].chunks

    def read_into(self, out: Array, box: Box, counter: Counter) -> None:
        """Fill an array with the pixels of a box."""
        lead = len(self.shape) - 5
        for index in np.ndindex(out.shape[:lead]):
            at = tuple(i + interval.start for i, interval in zip(index, box[:lead], strict=True))
            page = int(np.ravel_multi_index(at, self.shape[:lead])) if lead else 0
            self.pages[page].read_into(out[index], box[lead:], counter)


class Handles:
    """One handle for each file of a set."""

    def __init__(self) -> None:
        self.open: dict[str, Handle] = {}

    def of(self, page: Any) -> Handle:
        """The handle of the file that has a page."""
        path = page.parent.filehandle.path
        return self.open.setdefault(path, Handle(Path(path)))

    def close(self) -> None:
        """Close all of them."""
        for handle in self.open.values():
            handle.close()


def open_tiff(path: Path, options: Options) -> OpenedFile:
    """A TIFF file: the levels of one of its series."""
    handles = Handles()
    with quiet(), tifffile.TiffFile(path) as file:
        check_directories(path, file)
        series = chosen(str(path), file, options.series)
        levels = [stored(str(path), level, handles, options) for level in series.levels]
        letters = leading(str(path), series)[1] + "SZYXS"
    shape = levels[0].shape
    # Dims of extent 1 go, as in tifffile's own `axes`; what the user names are those that are left.
    kept = [dim for dim, letter in enumerate(letters) if shape[dim] > 1 or letter in "YX"]
    seen = "".join(letters[dim] for dim in kept)
    axes = resolved(str(path), seen, [shape[dim] for dim in kept], options.axes)
    named = dict(zip(kept, axes.letters, strict=True))
    return OpenedFile(levels, Axes("".join(named.get(dim, "_") for dim in range(len(shape)))), handles.close)


def chosen(name: str, file: tifffile.TiffFile, number: int) -> tifffile.TiffPageSeries:
    """The series that was asked for; `file.series` groups pages by shape, with pyramids as levels."""
    if not 0 <= number < len(file.series):
        what = "; ".join(f"{i}: {s.axes} {s.shape}" for i, s in enumerate(file.series)) or "none"
        raise DataError(f"{name}: series {number} was asked for, but the file's series are {what}", name)
    series = file.series[number]
    if series.transform is not None:
        raise DataError(
            f"{name}: the pixels of a {series.kind} series are not stored as they are shown; convert it", name
        )
    return series


def leading(name: str, series: tifffile.TiffPageSeries) -> tuple[tuple[int, ...], str]:
    """Extents and letters of the dims over which the pages of a series are spread, those of extent 1 left out."""
    shape, letters, page = series.shape, series.axes, prod(series.keyframe.shape)
    count = next((k for k in range(len(shape) + 1) if prod(shape[k:]) == page), None)
    if count is None:
        raise DataError(
            f"{name}: its series {letters} {shape} is not made of whole pages of {series.keyframe.shape}: "
            "write it again, one page for each image",
            name,
        )
    dims = [dim for dim in range(count) if shape[dim] > 1]
    return tuple(shape[dim] for dim in dims), "".join(letters[dim] for dim in dims)


def stored(name: str, series: tifffile.TiffPageSeries, handles: Handles, options: Options) -> Stored:
    """One level of a series."""
    lead = leading(name, series)[0]
    key: Any = series.keyframe
    pages: list[Any] = list(series._pages)
    if any(page is None for page in pages):
        missing = pages.index(None)
        raise DataError(f"{name}: page {missing} of {len(pages)} is in another file, which is not there", name)
    shape = (*lead, *(int(n) for n in key.shaped))
    if all(page.is_final for page in pages) and (len(pages) == prod(lead) or series.dataoffset is not None):
        return plain(name, series, shape, handles)
    if len(pages) != prod(lead):
        raise DataError(f"{name}: {prod(lead)} pages are announced, but {len(pages)} are there: it is truncated", name)
    chunks = (1,) * len(lead) + (1, *segment_shape(key))
    size = prod(chunks) * key.dtype.itemsize
    if size > LIMIT and not options.whole:
        raise DataError(
            f"{name}: a single tile or strip has {size / 2**20:.0f} MiB, all of which is decoded for any pixel: run "
            f"`mural convert {name} OUT.ome.zarr` once and read that in windows, or pass whole=True",
            name,
        )
    found = tuple(page_of(name, page, key, handles) for page in pages)
    dtype = np.dtype(key.dtype).newbyteorder("=")
    return Tiles(shape, chunks, dtype, found, key.decode, key.nodata, options.threads)


def plain(name: str, series: tifffile.TiffPageSeries, shape: tuple[int, ...], handles: Handles) -> ContiguousPages:
    """Pages without tiles or compression; a series may have more of them than directories, one after the other."""
    key: Any = series.keyframe
    pages: list[Any] = list(series._pages)
    dtype = np.dtype(key.dtype).newbyteorder(key.parent.byteorder)
    inner, handle = shape[-5:], handles.of(key)
    size = prod(inner) * dtype.itemsize
    if series.dataoffset is not None:
        offsets = [(handle, series.dataoffset + number * size) for number in range(prod(shape[:-5]))]
    else:
        offsets = [(handles.of(page), int(page.dataoffsets[0])) for page in pages]
    for at, offset in offsets:
        check_segments(name, at.path, [offset], [size])
    return ContiguousPages(shape, tuple(Raw(at, offset, inner, dtype) for at, offset in offsets))


def segment_shape(page: Any) -> tuple[int, int, int, int]:
    """Depth, height, width and samples of a page's tiles or strips."""
    samples = int(page.shaped[-1])
    if page.is_tiled:
        return int(page.tiledepth), int(page.tilelength), int(page.tilewidth), samples
    return 1, min(int(page.rowsperstrip), int(page.imagelength)), int(page.imagewidth), samples


def page_of(name: str, page: Any, key: Any, handles: Handles) -> Page:
    """A page's tiles; an error where they are not all within the file."""
    handle = handles.of(page)
    offsets, counts = (np.asarray(values, np.uint64) for values in (page.dataoffsets, page.databytecounts))
    wanted = prod(grid(key.shaped[:-1], (1, *segment_shape(key)[:-1])))
    if min(len(offsets), len(counts)) < wanted:
        raise DataError(
            f"{name}: page {page.index} lists {len(offsets)} tiles, but needs {wanted}: it is damaged; write it again",
            name,
        )
    check_segments(name, handle.path, offsets, counts)
    extra = {"jpegtables": page.jpegtables, "jpegheader": key.jpegheader} if key.compression in JPEG else {}
    return Page(handle, offsets, counts, extra)
