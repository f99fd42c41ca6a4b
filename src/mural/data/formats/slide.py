"""Whole-slide formats through openslide: its levels, as RGB."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mural.data.formats.axes import Axes, resolved
from mural.data.formats.dtypes import Array
from mural.data.formats.stored import OpenedFile, Options
from mural.data.source import Counter
from mural.errors import package
from mural.geometry import Box
from mural.geometry.tile_grid import count

UINT8: np.dtype[Any] = np.dtype(np.uint8)


class Slide:
    """A slide that openslide opened; it may be read by several threads, and is opened again after `close`."""

    def __init__(self, path: Path) -> None:
        self.path, self._lock = path, threading.Lock()
        self._open: Any = None

    def get(self) -> Any:
        """The object of openslide."""
        with self._lock:
            if self._open is None:
                self._open = package("openslide", "slides").OpenSlide(self.path)
            return self._open

    def close(self) -> None:
        """Close the slide."""
        with self._lock:
            if self._open is not None:
                self._open.close()
                self._open = None


@dataclass(frozen=True)
class SlideLevel:
    """One level of a slide: dims (height, width, 3)."""

    slide: Slide
    level: int
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    downsample: float
    background: tuple[int, int, int]
    dtype: np.dtype[Any] = UINT8

    def read_into(self, out: Array, box: Box, counter: Counter) -> None:
        """Fill an array with the pixels of a box; where the slide has none, with its background."""
        rows, columns, samples = box
        corner = tuple(round(i.start * self.downsample) for i in (columns, rows))
        region = np.asarray(self.slide.get().read_region(corner, self.level, (columns.size, rows.size)))
        opaque = region[..., 3:] == 255
        blended = region[..., :3] if opaque.all() else over(region, self.background)
        out[...] = blended[..., slice(*samples)]
        tiles = count(box, self.chunks)
        counter.add(tiles=tiles, bytes_=tiles * prod(self.chunks))


def over(region: Array, background: tuple[int, int, int]) -> Array:
    """RGBA pixels on a background."""
    alpha = region[..., 3:].astype(np.float32) / 255
    return np.rint(region[..., :3] * alpha + np.asarray(background, np.float32) * (1 - alpha)).astype(np.uint8)


def open_slide(path: Path, options: Options) -> OpenedFile:
    """A slide; its tiles are as openslide's properties say, a single row of pixels where they do not."""
    slide = Slide(path)
    opened = slide.get()
    properties: Any = opened.properties
    colour = properties.get("openslide.background-color", "FFFFFF")
    background = (int(colour[0:2], 16), int(colour[2:4], 16), int(colour[4:6], 16))
    levels: list[SlideLevel] = []
    for level, (width, height) in enumerate(opened.level_dimensions):
        tile = [int(properties.get(f"openslide.level[{level}].tile-{side}", 1)) for side in ("height", "width")]
        shape, scale = (int(height), int(width), 3), float(opened.level_downsamples[level])
        levels.append(SlideLevel(slide, level, shape, (*tile, 3), scale, background))
    axes: Axes = resolved(str(path), "YXS", levels[0].shape, options.axes)
    return OpenedFile(levels, axes, slide.close)
