"""Images of any size whose classes show in wide context alone: regions that differ less than their pixels scatter.

A few blocks are drawn, and a hash of its place chooses the one of each cell, so that pixels cost a copy.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
import torch
from one_gpu.sources import BLOCKS, COUNT, Endless, tiles
from torch import Tensor
from torch.nn import functional as F

from mural.data import ComputedSource

CLASSES = 3
CELLS = 24
"""Random values along a side of a block, between which regions are interpolated."""
CONTRAST, NOISE = 9.0, 40.0
"""Brightness between two classes, and the scatter of a pixel, of 255."""
TILE = 512


def regions(seed: int) -> Tensor:
    """The class of each pixel of the blocks, (blocks, 1, H, W): a third of the pixels has each."""
    draw = torch.Generator().manual_seed(seed)
    coarse = torch.randn(COUNT, 1, CELLS, CELLS, generator=draw)
    field = F.interpolate(coarse, BLOCKS[2], mode="bicubic", align_corners=False)
    some = field[..., ::8, ::8].flatten()
    edges = torch.quantile(some, torch.arange(1, CLASSES) / CLASSES)
    return torch.bucketize(field, edges).to(torch.uint8)


class Texture(Endless):
    """Boxes of an endless image, or of the classes of its pixels."""

    def __init__(self, mask: bool, seed: int) -> None:
        super().__init__(2, 1)
        classes = regions(seed)
        if mask:
            self.blocks = classes
            return
        draw = torch.Generator().manual_seed(seed + 100)
        noise = torch.randn(COUNT, 3, *self.extents, generator=draw) * NOISE
        bright = 128 + CONTRAST * (classes.float() - (CLASSES - 1) / 2)
        self.blocks = (bright + noise).round().clamp(0, 255).to(torch.uint8)


def source(side: int, mask: bool = False, seed: int = 0) -> ComputedSource:
    """The image of a side, or its classes."""
    return ComputedSource(Texture(mask, seed), (1 if mask else 3, side, side), torch.uint8)


def path_of(folder: Path, side: int, mask: bool = False, seed: int = 0) -> Path:
    """The file of an image, or of its classes."""
    return folder / ("masks" if mask else "images") / f"{side}{f'-{seed}' if seed else ''}.tif"


def write_file(folder: Path, side: int, mask: bool = False, seed: int = 0) -> Path:
    """Write an image, tile after tile, as uncompressed BigTIFF; one that is there stays."""
    path = path_of(folder, side, mask, seed)
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    tile = min(TILE, -(-side // 16) * 16)
    shape, kind = ((side, side), "minisblack") if mask else ((side, side, 3), "rgb")
    with tifffile.TiffWriter(partial, bigtiff=True) as file:
        options: dict[str, Any] = {"tile": (tile, tile), "photometric": kind, "metadata": None}
        file.write(tiles(source(side, mask, seed), tile), shape=shape, dtype=np.uint8, **options)
    with partial.open("rb") as written:
        os.fsync(written.fileno())
    partial.rename(path)
    return path


def forget(path: Path) -> None:
    """Let the system drop what it keeps of a file in memory, so that it is read from the disk."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
