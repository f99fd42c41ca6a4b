"""Tiled BigTIFF, written tile by tile: the image's dims as pages and samples, levels as SubIFDs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import tifffile

from mural.data.formats.dtypes import Array, numpy_dtype, to_array
from mural.data.source import Source
from mural.errors import DataError

TILE = 512
AT_ONCE = 8
"""Tiles of a row that are read from the source together."""
ONE_SAMPLE: dict[str, Any] = {"photometric": "minisblack", "planarconfig": "contig", "extrasamples": ()}
"""Arguments of tifffile for pages that have one sample for each pixel."""
BANDS: dict[str, Any] = {"photometric": "minisblack", "planarconfig": "separate"}
"""Arguments of tifffile for a page that has channels in tiles of their own."""


@dataclass(frozen=True)
class Pages:
    """How an image with channels first becomes pages: RGB has its samples in each page, other channels a page each.

    `bands`: all channels are one page, each in tiles of its own, as readers of maps expect; without OME's metadata.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    tile: tuple[int, int]
    bands: bool = False
    labels: bool = False
    """Whether channels are labels, which are no colours."""

    @property
    def rgb(self) -> bool:
        """Whether a page has three samples, which every viewer shows as colour."""
        return not self.labels and self.shape[0] == 3 and self.dtype.name in ("uint8", "uint16")

    @property
    def ome(self) -> bool:
        """Whether OME has the type: its metadata tell channels, depth and levels apart."""
        return not self.bands and self.dtype.name not in ("int64", "uint64", "float16")

    @property
    def unit(self) -> tuple[int, ...]:
        """The box of an image that one tile holds."""
        return (3 if self.rgb else 1, *(1,) * (len(self.shape) - 3), *self.tile)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of tifffile for the pages."""
        depth = self.shape[1:-2]
        shape = (*depth, *self.shape[-2:], 3) if self.rgb else self.shape
        letters = "ZYXS"[1 - len(depth) :] if self.rgb else "CZYX" if depth else "CYX"
        # Pages of one sample, said outright: else tifffile takes a last extent of 1 for samples, and not for the width.
        samples: dict[str, Any] = {"photometric": "rgb"} if self.rgb else ONE_SAMPLE
        if self.bands and not self.rgb and self.shape[0] > 1:
            samples = BANDS | {"extrasamples": (0,) * (self.shape[0] - 1)}
        metadata = None if self.bands else {"axes": letters}
        return {"shape": shape, "dtype": self.dtype, "tile": self.tile, "metadata": metadata, **samples}

    def corners(self, width: int = 1) -> Iterator[tuple[tuple[int, int], ...]]:
        """The boxes of the tiles, in the order in which a file has them, that many along a row together."""
        steps = (*self.unit[:-1], self.unit[-1] * width)
        starts = product(*(range(0, extent, step) for extent, step in zip(self.shape, steps, strict=True)))
        for corner in starts:
            yield tuple((at, min(at + s, n)) for at, s, n in zip(corner, steps, self.shape, strict=True))

    def tile_of(self, piece: Array) -> Array:
        """A tile with the pixels of its box, zeros beyond the image, samples last."""
        tile = np.zeros((*self.tile, 3) if self.rgb else self.tile, self.dtype)
        page = np.moveaxis(piece, 0, -1).reshape(*piece.shape[-2:], -1)
        tile[: page.shape[0], : page.shape[1]] = page if self.rgb else page[..., 0]
        return tile


def pages_of(
    name: str,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    chunks: Sequence[int] | None,
    bands: bool = False,
    labels: bool = False,
) -> Pages:
    """The pages of an image; only the last two extents of `chunks` matter, the tile's, which are multiples of 16."""
    tile = tuple(int(n) for n in (chunks or (TILE, TILE))[-2:])
    if len(tile) != 2 or any(n < 16 or n % 16 for n in tile):
        raise DataError(f"{name}: a TIFF tile of {tile}: height and width are multiples of 16, such as 512", name)
    if dtype.name in ("bool", "complex64", "complex128"):
        raise DataError(
            f"{name}: a TIFF is not written with pixels of type {dtype}: write uint8 or float, or Zarr", name
        )
    return Pages(shape, dtype, (tile[0], tile[1]), bands and len(shape) == 3, labels)


def tiles(source: Source, level: int, pages: Pages, done: Callable[[int], None]) -> Iterator[Array]:
    """The tiles of a level of a source, in the order in which a file has them; counts the bytes of each read."""
    for box in pages.corners(AT_ONCE):
        piece = to_array(source.read(box, level))
        done(piece.nbytes)
        for left in range(0, piece.shape[-1], pages.tile[1]):
            yield pages.tile_of(piece[..., left : left + pages.tile[1]])


def write_tiff(
    path: Path, partial: Path, source: Source, levels: int, chunks: Sequence[int], done: Callable[[int], None]
) -> None:
    """Write that many levels of a source into a file, compressed, one row of a few tiles in memory at a time."""
    dtype = numpy_dtype(source.dtype)
    wanted = [pages_of(str(path), level.shape, dtype, chunks) for level in source.levels[:levels]]
    with tifffile.TiffWriter(partial, bigtiff=True, ome=wanted[0].ome) as file:
        for level, pages in enumerate(wanted):
            place: dict[str, Any] = {"subifds": len(wanted) - 1} if level == 0 else {"subfiletype": 1}
            file.write(tiles(source, level, pages, done), compression="deflate", **(pages.options | place))
