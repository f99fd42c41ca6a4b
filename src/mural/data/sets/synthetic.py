"""Synthetic images with masks, of any size: each box is computed when it is read, from the seed and its position.

The look is that of stained tissue: eosin, pink, in the stroma, and hematoxylin, purple, in the nuclei. Nuclei come in
two kinds, small ones (class 1) and large, dark ones (class 2), which keep together in patches of many nuclei.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from mural import geometry
from mural.data.image_sample import Sample
from mural.data.sets.dataset import Dataset
from mural.data.sets.memory_sources import Unfiled
from mural.data.sets.texture import Ellipses, Field, between, knots, smooth
from mural.data.source import Source
from mural.data.writing.write import create
from mural.errors import DataError
from mural.geometry import Interval, slices

Kind = Literal["tissue", "cells"]
What = Literal["image", "mask"]

CHANNELS: dict[Kind, int] = {"tissue": 3, "cells": 1}
"""Colours of stained tissue, or one channel that is bright where nuclei are, as under a fluorescence microscope."""
CLASSES = ("background", "small nuclei", "large nuclei")
# Optical density of each dye in red, green and blue: Ruifrok and Johnston, 2001, the eosin a little warmer.
HEMATOXYLIN = (0.65, 0.70, 0.29)
EOSIN = (0.08, 0.95, 0.25)
COARSE = 4
"""Fields that change slowly are computed at every fourth position, and interpolated."""
TILES = {2: (512, 512), 3: (64, 128, 128)}
"""What is computed at once, for each number of spatial dims: its fields stay in the processor's cache."""
GRAIN = 512
LATTICE = {2: (22, 5), 3: (16, 4)}
"""How far apart nuclei are, and how far they reach out of their cell."""


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
    """The fields that an image is computed from: where nuclei are, and how much of each dye there is."""

    seed: int

    def nuclei(self, box: geometry.Box) -> tuple[Field, NDArray[np.bool_]]:
        """How deep each position is in a nucleus (above 0: inside), and whether that is a large one."""
        depth, large = Ellipses(self.seed, *(LATTICE[len(box)])).paint(box)
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
        inside, large = self.nuclei(box)
        inside *= 4
        np.clip(inside, 0, 1, out=inside)
        grain = self.grain(box)
        shade = np.where(large, np.float32(0.95), np.float32(0.7))
        shade += grain
        shade += np.float32(0.2) * between(noise(1, 9), box, COARSE)  # chromatin
        inside *= shade
        inside += between(haze * (1 - gap), box, COARSE)
        grain *= np.float32(0.3)
        grain += between(eosin * (1 - np.float32(0.92) * gap), box, COARSE)
        return np.maximum(grain, 0, out=grain), np.maximum(inside, 0, out=inside)

    def fibres(self, coarse: geometry.Box) -> Field:
        """Wavy strands of stroma between -1 and 1: a wave along a slanted direction, bent by noise."""
        rows, columns = (np.arange(i.start, i.stop) * COARSE for i in coarse[-2:])
        # Whole numbers: a phase in sixteenths of a position is exact, however large the image.
        slant = ((13 * rows)[:, None] + (8 * columns)[None, :]) % 240
        bend = np.float32(420) * smooth(coarse, 16, self.seed, 6) + np.float32(60) * smooth(coarse, 4, self.seed, 7)
        phase = (slant.astype(np.float32) + bend + 960) * np.float32(1 / 240)
        phase = 2 * (phase - np.floor(phase)) - 1  # a parabola for each half of the wave
        strength = np.float32(2.4) + 2 * smooth(coarse, 14, self.seed, 8)
        return strength * phase * (1 - np.abs(phase))

    def grain(self, box: geometry.Box) -> Field:
        """Fine noise: one tile of it, repeated, and moved on from slice to slice of a volume."""
        *before, rows, columns = (np.arange(i.start, i.stop) for i in box)
        for numbers in before:
            rows = 37 * numbers[:, None] + rows
        return grain_tile(self.seed)[:, columns % GRAIN][rows % GRAIN]


@lru_cache(maxsize=16)
def grain_tile(seed: int) -> Field:
    """A square of normal noise."""
    return np.random.default_rng(seed).normal(0, 0.06, (GRAIN, GRAIN)).astype(np.float32)


class Synthetic(Unfiled):
    """The image or the mask of a synthetic scene; nothing is kept, a box is computed whenever it is read."""

    def __init__(self, extents: tuple[int, ...], seed: int, kind: Kind, what: What):
        self.kind, self.what, self.scene = kind, what, Scene(seed)
        name = f"synthetic {kind} {what} {'×'.join(map(str, extents))}, seed {seed}"
        shape = (CHANNELS[kind] if what == "image" else 1, *extents)
        super().__init__(name, shape, torch.uint8, TILES[len(extents)])

    def part(self, box: geometry.Box) -> torch.Tensor:
        channels, spatial = box[0], box[1:]
        out = np.empty([i.size for i in box], np.uint8)
        edges = [range(i.start, i.stop, tile) for i, tile in zip(spatial, self.chunks[1:], strict=True)]
        for corner in product(*edges) if channels.size else ():
            tile = tuple(
                Interval(start, min(start + size, i.stop))
                for start, size, i in zip(corner, self.chunks[1:], spatial, strict=True)
            )
            self.compute(tile, range(*channels), out[(slice(None), *slices(tile, spatial))])
        return torch.from_numpy(out)

    def compute(self, box: geometry.Box, channels: range, out: NDArray[np.uint8]) -> None:
        """Write the chosen channels of a box."""
        if self.what == "mask":
            depth, large = self.scene.nuclei(box)
            np.multiply(depth > 0, large + np.uint8(1), out=out[0])
            return
        eosin, hematoxylin = self.scene.dyes(box)
        for row, channel in zip(out, channels, strict=True):
            if self.kind == "cells":
                light = np.float32(190) * hematoxylin
                light += np.float32(12) * eosin
                np.minimum(light, 255, out=light)
            else:
                light = eosin * np.float32(EOSIN[channel] / 8)
                light += hematoxylin * np.float32(HEMATOXYLIN[channel] / 8)
                absorb(light)
                light *= np.float32(248)
            row[...] = light


def absorb(eighth: Field) -> None:
    """Turn an optical density, given its eighth, into the light that passes: exp(-d), as 1 / (1 + d/8)^8; in place."""
    eighth += 1
    np.reciprocal(eighth, out=eighth)
    for _ in range(3):
        eighth *= eighth


def write_synthetic(
    folder: str | Path,
    count: int = 4,
    size: Sequence[int] | int = 2048,
    seed: int = 0,
    kind: Kind = "tissue",
    suffix: str = ".tif",
) -> Dataset:
    """Write that many samples to `folder/images` and `folder/masks`, and return the dataset of these files.

    `suffix` chooses the format (`.tif`, `.zarr`, …).
    """
    images, masks = Path(folder) / "images", Path(folder) / "masks"
    for place in (images, masks):
        place.mkdir(parents=True, exist_ok=True)
    names = [f"{kind}-{number:04d}{suffix}" for number in range(count)]
    for number, name in enumerate(names):
        sample = synthetic(size, seed + number, kind)
        copy(sample.image, images / name)
        copy(sample.target, masks / name)
    return Dataset([images / name for name in names], [masks / name for name in names])


def copy(source: Source, path: Path) -> None:
    """Write a source to a file, a band of tiles at a time."""
    rows = source.chunks[1]
    with create(path, source.shape, source.dtype) as writer:
        for start in range(0, source.shape[1], rows):
            box = [(0, n) for n in source.shape]
            box[1] = (start, min(start + rows, source.shape[1]))
            writer.write(box, source.read(box))
