"""Synthetic images with masks, of any size: each box is computed when it is read, from the seed and its position.

The look is that of stained tissue: eosin, pink, in the stroma, and hematoxylin, purple, in the nuclei. Nuclei come in two
kinds, small ones (class 1) and large, dark ones (class 2), which keep together in patches of many nuclei.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray

from mural import geometry
from mural.data.dataset import Dataset
from mural.data.samples import Sample
from mural.data.source import Box, Counter, Level, Source, checked_box, level_of
from mural.data.texture import Ellipses, Field, between, knots, smooth
from mural.data.write import create
from mural.errors import DataError
from mural.geometry import Interval

Kind = Literal["tissue", "cells"]
Part = Literal["image", "mask"]

CHANNELS: dict[Kind, int] = {"tissue": 3, "cells": 1}
"""Colours of stained tissue, or one channel that shines where nuclei are, as under a fluorescence microscope."""
CLASSES = ("background", "small nuclei", "large nuclei")
# Optical density of each dye in red, green and blue: Ruifrok and Johnston, 2001, the eosin a little warmer.
HEMATOXYLIN = (0.65, 0.70, 0.29)
EOSIN = (0.08, 0.95, 0.25)
COARSE = 4
"""Fields that change slowly are computed at every fourth position, and interpolated."""
TILE = 512
AT_ONCE = 2**18
"""How many positions are computed at once: their fields stay in the processor's cache."""


def synthetic(size: Sequence[int] | int, seed: int = 0, kind: Kind = "tissue") -> Sample:
    """A sample whose image and mask are computed as they are read; two sizes make an image, three a volume.

    >>> sample = synthetic((20_000, 30_000), seed=1)
    >>> sample.image.shape, sample.target.shape, sample.image.read([(0, 3), (9_000, 9_064), (5_000, 5_064)]).dtype
    ((3, 20000, 30000), (1, 20000, 30000), torch.uint8)
    """
    extents = (size, size) if isinstance(size, int) else tuple(int(n) for n in size)
    if kind not in CHANNELS:
        raise DataError(f"synthetic: kind={kind!r} is not one of {', '.join(map(repr, CHANNELS))}")
    if len(extents) not in (2, 3) or min(extents) < 1:
        raise DataError(f"synthetic: size={size} must be two or three numbers of at least 1, as in (4096, 4096)")
    name = f"synthetic {kind} {'×'.join(map(str, extents))}, seed {seed}"
    return Sample(name, Synthetic(extents, seed, kind, "image"), Synthetic(extents, seed, kind, "mask"))


@dataclass(frozen=True)
class Scene:
    """The fields behind an image: where nuclei lie, and how much of each dye there is."""

    seed: int

    def nuclei(self, box: geometry.Box) -> tuple[Field, NDArray[np.bool_]]:
        """How deep each position lies in a nucleus (above 0: inside), and whether that is a large one."""
        depth, large = Ellipses(self.seed).paint(box)
        depth += np.float32(0.15) * between(smooth(knots(box, COARSE), 2, self.seed, 1), box, COARSE)
        return depth, large

    def dyes(self, box: geometry.Box) -> tuple[Field, Field]:
        """Eosin and hematoxylin at each position."""
        coarse = knots(box, COARSE)

        def noise(spacing: int, salt: int) -> Field:
            return smooth(coarse, spacing, self.seed, salt)

        gap = np.clip(5 * (noise(18, 2) + np.float32(0.5) * noise(6, 3) - np.float32(0.75)), 0, 1)
        eosin = np.float32(0.42) + np.float32(0.14) * noise(12, 4) + np.float32(0.14) * self.fibres(coarse)
        haze = np.float32(0.08) + np.float32(0.05) * noise(4, 5)
        depth, large = self.nuclei(box)
        inside = np.clip(4 * depth, 0, 1)
        grain = self.grain(box)
        shade = np.float32(0.70) + np.float32(0.25) * large + grain
        hematoxylin = inside * shade + between(haze * (1 - gap), box, COARSE)
        return between(eosin * (1 - np.float32(0.92) * gap), box, COARSE) + np.float32(0.3) * grain, hematoxylin

    def fibres(self, coarse: geometry.Box) -> Field:
        """Wavy strands of stroma between -1 and 1: a wave along a slanted direction, bent by noise."""
        rows, columns = (np.arange(i.start, i.stop) * COARSE for i in coarse[-2:])
        # Whole numbers: a phase in sixteenths of a position is exact, however large the image.
        slant = ((13 * rows)[:, None] + (8 * columns)[None, :]) % 240
        bend = np.float32(60) * smooth(coarse, 16, self.seed, 6) + np.float32(12) * smooth(coarse, 4, self.seed, 7)
        phase = (slant.astype(np.float32) + bend + 960) * np.float32(1 / 240)
        phase = 2 * (phase - np.floor(phase)) - 1  # a parabola for each half of the wave
        return 4 * phase * (1 - np.abs(phase))

    def grain(self, box: geometry.Box) -> Field:
        """Fine noise: one tile of it, repeated, and moved on from slice to slice of a volume."""
        *before, rows, columns = (np.arange(i.start, i.stop) for i in box)
        for slices in before:
            rows = 37 * slices[:, None] + rows
        return grain_tile(self.seed)[:, columns % TILE][rows % TILE]


@lru_cache(maxsize=16)
def grain_tile(seed: int) -> Field:
    """A square of normal noise."""
    return np.random.default_rng(seed).normal(0, 0.06, (TILE, TILE)).astype(np.float32)


class Synthetic(Source):
    """The image or the mask of a synthetic scene; nothing is kept, a box is computed whenever it is read."""

    def __init__(self, extents: tuple[int, ...], seed: int, kind: Kind, part: Part):
        self.kind, self.part, self.scene = kind, part, Scene(seed)
        self.shape = (CHANNELS[kind] if part == "image" else 1, *extents)
        self.name = f"synthetic {kind} {part} {'×'.join(map(str, extents))}, seed {seed}"
        self.dtype = torch.uint8
        self.levels = (Level(self.shape, (1.0,) * len(self.shape)),)
        self.chunks = (self.shape[0], *(1,) * (len(extents) - 2), TILE, TILE)
        self.counter = Counter()

    def read(self, box: Box | None = None, level: int = 0) -> torch.Tensor:
        """See `Source`; counted are the positions that were asked for."""
        level_of(self, level)
        place = checked_box(self.name, box, self.shape)
        channels, spatial = place[0], place[1:]
        out = np.empty([i.size for i in place], np.uint8)
        self.counter.add(reads=1, bytes_=out.size)
        if out.size:
            rows = max(1, AT_ONCE // prod(i.size for i in spatial[1:]))
            for start in range(spatial[0].start, spatial[0].stop, rows):
                strip = Interval(start, min(start + rows, spatial[0].stop))
                at = slice(strip.start - spatial[0].start, strip.stop - spatial[0].start)
                self.compute((strip, *spatial[1:]), range(channels.start, channels.stop), out[:, at])
        return torch.from_numpy(out)

    def compute(self, box: geometry.Box, channels: range, out: NDArray[np.uint8]) -> None:
        """Write the chosen channels of a box."""
        if self.part == "mask":
            depth, large = self.scene.nuclei(box)
            if channels:
                np.multiply(depth > 0, 1 + large.astype(np.uint8), out=out[0], casting="unsafe")
            return
        eosin, hematoxylin = self.scene.dyes(box)
        for row, channel in zip(out, channels, strict=True):
            if self.kind == "cells":
                row[...] = np.clip(np.float32(190) * hematoxylin + np.float32(12) * eosin, 0, 255)
            else:
                dyed = eosin * np.float32(EOSIN[channel] / 8) + hematoxylin * np.float32(HEMATOXYLIN[channel] / 8)
                row[...] = np.clip(np.float32(248) * absorbed(dyed), 0, 255)


def absorbed(eighth: Field) -> Field:
    """The light that passes an optical density, given its eighth: exp(-d), as 1 / (1 + d/8)^8."""
    light = 1 / (1 + eighth)
    light *= light
    light *= light
    light *= light
    return light


def write_synthetic(
    folder: str | Path,
    count: int = 4,
    size: Sequence[int] | int = 2048,
    seed: int = 0,
    kind: Kind = "tissue",
    suffix: str = ".tif",
) -> Dataset:
    """Write that many samples to `folder/images` and `folder/masks`, and return the dataset of these files.

    `suffix` chooses the format (`.tif`, `.zarr`, …). A band of tiles is in memory at a time, so any size can be written.
    """
    places = {cast(Part, part): Path(folder) / f"{part}s" for part in ("image", "mask")}
    written: dict[Part, list[Path]] = {part: [] for part in places}
    for place in places.values():
        place.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        sample = synthetic(size, seed + number, kind)
        for part, source in (("image", sample.image), ("mask", sample.target)):
            path = places[part] / f"{kind}-{number:04d}{suffix}"
            copy(source, path)
            written[part].append(path)
    return Dataset(written["image"], written["mask"])


def copy(source: Source, path: Path) -> None:
    """Write a source to a file, a band of tiles at a time."""
    rows = source.chunks[1] if len(source.shape) == 4 else TILE
    with create(path, source.shape, source.dtype) as writer:
        for start in range(0, source.shape[1], rows):
            box = [(0, n) for n in source.shape]
            box[1] = (start, min(start + rows, source.shape[1]))
            writer.write(box, source.read(box))
