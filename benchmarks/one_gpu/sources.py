"""Images that never sit in memory whole: boxes made as they are read, at the speed of a copy, and files written so."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
import torch
from torch import Tensor

import mural
from mural.data import ComputedSource, Source, scaled
from mural.geometry import Box, overlap, slices
from mural.geometry.tile_grid import tile_at, touched

BLOCKS = {2: (1024, 1024), 3: (128, 128, 128)}
"""Extents of the random blocks, for each number of dims."""
COUNT = 4
PRIMES = (73_856_093, 19_349_663, 83_492_791)
TILE = 512
"""Of the files."""


class Endless:
    """Boxes of an endless image: a few random blocks, of which a hash of its place chooses the one of each cell.

    The mask is 1 where the first channel is bright, so that image and mask belong together.
    """

    def __init__(self, dims: int, channels: int, mask: bool = False, floating: bool = False) -> None:
        self.extents = BLOCKS[dims]
        draw = torch.Generator().manual_seed(0)
        blocks = torch.randint(0, 256, (COUNT, channels, *self.extents), dtype=torch.uint8, generator=draw)
        self.blocks = (blocks[:, :1] > 127).to(torch.uint8) if mask else blocks.float() / 255 if floating else blocks

    def __call__(self, box: Box) -> Tensor:
        """The pixels of a box, channels first."""
        channels, place = slice(*box[0]), box[1:]
        out = torch.empty([interval.size for interval in box], dtype=self.blocks.dtype)
        for index in touched(place, self.extents):
            cell = tile_at(index, self.extents)
            part = overlap(place, cell)
            number = sum(i * prime for i, prime in zip(index, PRIMES, strict=False)) // 7 % COUNT
            # NumPy copies whole rows at once.
            rows = self.blocks[number].numpy()[(channels, *slices(part, cell))]
            out.numpy()[(slice(None), *slices(part, place))] = rows
        return out


def made_image(channels: int, extents: Sequence[int], floating: bool = False) -> Source:
    """An image of those extents, as a model takes it; it holds uint8, or float32."""
    compute = Endless(len(extents), channels, floating=floating)
    source = ComputedSource(compute, (channels, *extents), compute.blocks.dtype, "an image made as it is read")
    return source if floating else scaled(source)


def made_mask(channels: int, extents: Sequence[int]) -> Source:
    """The classes of each position of an image of that many channels."""
    compute = Endless(len(extents), channels, mask=True)
    return ComputedSource(compute, (1, *extents), torch.uint8, "a mask made as it is read")


def paths_of(folder: Path, side: int) -> tuple[Path, Path]:
    """The files of an image of that side and of its mask."""
    return folder / f"image_{side}.tif", folder / f"mask_{side}.tif"


def write_files(folder: Path, side: int) -> None:
    """Write both as uncompressed, tiled BigTIFF, a tile at a time; what is there already stays."""
    folder.mkdir(parents=True, exist_ok=True)
    for path, channels, compute in zip(
        paths_of(folder, side), (3, 1), (Endless(2, 3), Endless(2, 3, mask=True)), strict=True
    ):
        if path.is_file():
            continue
        partial = path.with_suffix(".partial")
        tile = TILE if side >= TILE else 32
        shape, kind = ((side, side, 3), "rgb") if channels == 3 else ((side, side), "minisblack")
        source = ComputedSource(compute, (channels, side, side), torch.uint8)
        with tifffile.TiffWriter(partial, bigtiff=True) as file:
            options: dict[str, Any] = {"tile": (tile, tile), "photometric": kind, "metadata": None}
            file.write(tiles(source, tile), shape=shape, dtype=np.uint8, **options)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.rename(path)


def tiles(source: Source, tile: int) -> Iterator[np.ndarray[Any, Any]]:
    """The tiles of an image in the order of a file, channels last, zeros beyond the image."""
    channels, height, width = source.shape
    for top in range(0, height, tile):
        for left in range(0, width, tile):
            box = ((0, channels), (top, min(top + tile, height)), (left, min(left + tile, width)))
            piece = source.read(box).numpy()
            out = np.zeros((tile, tile, channels), np.uint8)
            out[: piece.shape[1], : piece.shape[2]] = np.moveaxis(piece, 0, -1)
            yield out if channels > 1 else out[..., 0]


def opened_files(folder: Path, side: int) -> tuple[Source, Source]:
    """Image and mask from their files."""
    image, mask = paths_of(folder, side)
    return mural.open(image, scale="range"), mural.open(mask)


def forget_files(folder: Path, side: int) -> None:
    """Let the system drop what it kept of the files in memory, so that they are read from the disk."""
    for path in paths_of(folder, side):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
